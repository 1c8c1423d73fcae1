# Starts a broker like the official image: KAFKA_SOME_NAME becomes some.name, CLUSTER_ID is the cluster id.
set -euo pipefail
env | while IFS='=' read -r name value; do
  case $name in
    KAFKA_*) echo "$(echo "${name#KAFKA_}" | tr 'A-Z_' 'a-z.')=$value" ;;
  esac
done > server.properties
export CLASSPATH="/opt/stand-in/jars/*"
flags="-Xmx512m -XX:+UseSerialGC -Djava.awt.headless=true"
java $flags kafka.tools.StorageTool format --ignore-formatted -t "$CLUSTER_ID" -c server.properties
exec java $flags -Dlog4j2.level=WARN kafka.Kafka server.properties
