# Format /data if it is empty, and start the broker.
set -eu
{ cat /server.properties; echo "advertised.listeners=PLAINTEXT://${KAFKA_HOST:?the name that clients use}:9092"; } \
  >/data/server.properties
java="java -Xms64m -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dorg.slf4j.simpleLogger.defaultLogLevel=warn"
java="$java -cp /opt/kafka/*"
set -f # Java expands the star
[ -f /data/logs/meta.properties ] ||
  $java kafka.tools.StorageTool format --ignore-formatted -t bWFpbGJvYXQtaGFyYm9yMQ -c /data/server.properties
exec $java kafka.Kafka /data/server.properties
