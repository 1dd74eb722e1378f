// Forwards messages of Watermill's SQL Pub/Sub from Postgres to Kafka, for `make bench-peers`.
// Arguments: URL of the database, bootstrap servers, topic (of the table watermill_<topic> and of Kafka).
package main

import (
	"context"
	stdsql "database/sql"
	"fmt"
	"os"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	_ "github.com/lib/pq"
)

func main() {
	if err := forward(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func forward(url, bootstrap, topic string) error {
	logger := watermill.NewStdLogger(false, false)
	database, err := stdsql.Open("postgres", url)
	if err != nil {
		return err
	}
	subscriber, err := wsql.NewSubscriber(wsql.BeginnerFromStdSQL(database), wsql.SubscriberConfig{
		SchemaAdapter:    wsql.DefaultPostgreSQLSchema{},
		OffsetsAdapter:   wsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true,
		ConsumerGroup:    "bench",
		PollInterval:     5 * time.Millisecond,
	}, logger)
	if err != nil {
		return err
	}
	config := kafka.DefaultSaramaSyncPublisherConfig()
	config.Producer.RequiredAcks = sarama.WaitForAll
	publisher, err := kafka.NewPublisher(kafka.PublisherConfig{
		Brokers:               []string{bootstrap},
		OverwriteSaramaConfig: config,
		Marshaler: kafka.NewWithPartitioningMarshaler(func(_ string, m *message.Message) (string, error) {
			return m.Metadata.Get("key"), nil
		}),
	}, logger)
	if err != nil {
		return err
	}
	messages, err := subscriber.Subscribe(context.Background(), topic)
	if err != nil {
		return err
	}
	fmt.Println("forwarding", topic)
	for m := range messages {
		if err := publisher.Publish(topic, m); err != nil {
			return err
		}
		m.Ack()
	}
	return nil
}
