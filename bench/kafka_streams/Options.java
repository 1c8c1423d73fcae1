import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.streams.StreamsConfig;

/** The command line of a program, `--name value …`, and the settings of Kafka Streams for high throughput. */
final class Options {
    private final Map<String, String> values = new HashMap<>(Map.of("topic", "balance", "standbys", "0", "committed", "false"));

    private Options() {}

    static Options of(String[] args) {
        Options options = new Options();
        options.values.put("stream-threads", String.valueOf(Runtime.getRuntime().availableProcessors()));
        for (int i = 0; i + 1 < args.length; i += 2) {
            options.values.put(args[i].substring("--".length()), args[i + 1]);
        }
        return options;
    }

    String get(String name) {
        return values.get(name);
    }

    int number(String name) {
        return Integer.parseInt(values.get(name));
    }

    Properties properties() {
        Properties properties = new Properties();
        properties.put(StreamsConfig.APPLICATION_ID_CONFIG, get("application-id"));
        properties.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, get("bootstrap-servers"));
        properties.put(StreamsConfig.APPLICATION_SERVER_CONFIG, get("application-server"));
        properties.put(StreamsConfig.STATE_DIR_CONFIG, get("state-dir"));
        properties.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        if (Boolean.parseBoolean(get("committed"))) {
            // KIP-892: a store holds what is committed, and queries show nothing else.
            properties.put(StreamsConfig.TRANSACTIONAL_STATE_STORES_CONFIG, true);
            properties.put(
                    StreamsConfig.DEFAULT_INTERACTIVE_QUERY_ISOLATION_LEVEL_CONFIG,
                    IsolationLevel.READ_COMMITTED.name());
        }
        properties.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, number("stream-threads"));
        properties.put(StreamsConfig.NUM_STANDBY_REPLICAS_CONFIG, number("standbys"));
        properties.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, number("cache-bytes"));
        properties.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, number("commit-interval-ms"));
        // The minimum: a partition moves soon to an instance that has warmed up.
        properties.put(StreamsConfig.PROBING_REBALANCE_INTERVAL_MS_CONFIG, 60_000);
        // For throughput; a single record is still fetched at once.
        properties.put(StreamsConfig.BUFFERED_RECORDS_PER_PARTITION_CONFIG, 10_000);
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.MAX_POLL_RECORDS_CONFIG), 10_000);
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.MAX_PARTITION_FETCH_BYTES_CONFIG), 4 << 20);
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.RECEIVE_BUFFER_CONFIG), 1 << 20);
        properties.put(StreamsConfig.producerPrefix(ProducerConfig.BATCH_SIZE_CONFIG), 256 << 10);
        properties.put(StreamsConfig.producerPrefix(ProducerConfig.BUFFER_MEMORY_CONFIG), 64L << 20);
        // The default of Streams; each commit flushes the producer.
        properties.put(StreamsConfig.producerPrefix(ProducerConfig.LINGER_MS_CONFIG), 100);
        // As in the service, which does not compress its records either.
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.SESSION_TIMEOUT_MS_CONFIG), 10_000);
        properties.put(StreamsConfig.producerPrefix(ProducerConfig.TRANSACTION_TIMEOUT_CONFIG), 10_000);
        return properties;
    }
}
