import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.FileReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.connect.source.SourceRecord;

/** Debezium's embedded engine and outbox router, with a Kafka producer. Arguments: engine properties, bootstrap servers. */
public class Relay {
  public static void main(String[] arguments) throws Exception {
    Properties engineProperties = new Properties();
    try (FileReader reader = new FileReader(arguments[0])) {
      engineProperties.load(reader);
    }
    Properties producerProperties = new Properties();
    producerProperties.put("bootstrap.servers", arguments[1]);
    producerProperties.put("acks", "all");
    producerProperties.put("enable.idempotence", "true");
    producerProperties.put("linger.ms", "0");
    KafkaProducer<byte[], byte[]> producer =
        new KafkaProducer<>(producerProperties, new ByteArraySerializer(), new ByteArraySerializer());
    DebeziumEngine<RecordChangeEvent<SourceRecord>> engine =
        DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
            .using(engineProperties)
            .using((success, message, error) -> {
              System.err.println("The engine ended: " + message + " " + error);
              System.exit(1);
            })
            .notifying((records, committer) -> {
              List<Future<RecordMetadata>> sent = new ArrayList<>(records.size());
              for (RecordChangeEvent<SourceRecord> event : records) {
                SourceRecord record = event.record();
                if (record.value() != null) {
                  sent.add(producer.send(message(record)));
                }
              }
              for (Future<RecordMetadata> each : sent) {
                try {
                  each.get();
                } catch (ExecutionException error) {
                  throw new RuntimeException(error);
                }
              }
              for (RecordChangeEvent<SourceRecord> event : records) {
                committer.markProcessed(event);
              }
              committer.markBatchFinished();
            })
            .build();
    engine.run();
  }

  private static ProducerRecord<byte[], byte[]> message(SourceRecord record) {
    ProducerRecord<byte[], byte[]> message =
        new ProducerRecord<>(record.topic(), bytes(record.key()), bytes(record.value()));
    record.headers().forEach(header -> message.headers().add(header.key(), bytes(header.value())));
    return message;
  }

  private static byte[] bytes(Object value) {
    return value instanceof byte[] raw ? raw : String.valueOf(value).getBytes(StandardCharsets.UTF_8);
  }
}
