import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpHandler;
import com.sun.net.httpserver.HttpServer;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.lang.management.ManagementFactory;
import java.net.InetSocketAddress;
import java.net.URI;
import java.net.URLDecoder;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AdminClientConfig;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.CloseOptions;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyQueryMetadata;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.errors.InvalidStateStoreException;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.processor.StateRestoreListener;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.HostInfo;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlyKeyValueStore;
import org.apache.kafka.streams.state.Stores;

/**
 * The balance as a Kafka Streams program, written to be fast: one processor on a persistent RocksDB store with a
 * changelog, exactly once, no repartition, and interactive queries over HTTP.
 *
 * <p>Keys remain bytes, as in Kafka; balances are bytes too, see {@link Balance}.
 */
public final class BalanceStreams {
    private static final String STORE = "balance";
    private static final String FORWARDED = "Forwarded";
    private static final ByteArraySerializer KEYS = new ByteArraySerializer();
    private static final long NOTHING_APPLIED = -1;
    private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(6);
    private static final Duration PROXY_TIMEOUT = Duration.ofSeconds(5);

    private final Options options;
    private final HostInfo self;
    private final KafkaStreams streams;
    private final Admin admin;
    private final HttpClient peers = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();

    // Partition to next source offset: all records below it are in the store, committed or not. Tasks that have applied
    // nothing since they were opened are absent; their position is the committed offset of the group.
    private final Map<Integer, AtomicLong> positions = new ConcurrentHashMap<>();
    private final AtomicLong restored = new AtomicLong();
    private volatile Long runningAtMs;
    private volatile Long firstAppliedAtMs;
    private volatile Long restoredAtMs;

    private BalanceStreams(Options options) {
        this.options = options;
        self = HostInfo.buildFromEndpoint(options.get("application-server"));
        streams = new KafkaStreams(topology(), options.properties());
        admin = Admin.create(Map.of(AdminClientConfig.BOOTSTRAP_SERVERS_CONFIG, options.get("bootstrap-servers")));
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.RUNNING && runningAtMs == null) {
                runningAtMs = sinceStartMs();
            } else if (now == KafkaStreams.State.ERROR) {
                Runtime.getRuntime().halt(1);
            }
        });
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setGlobalStateRestoreListener(new RestoreProgress());
    }

    public static void main(String[] args) throws IOException {
        new BalanceStreams(Options.of(args)).run();
    }

    private void run() throws IOException {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", options.number("http-port")), 1024);
        // A thread for each concurrent request, so that instances that wait for each other do not run out of threads.
        server.setExecutor(Executors.newCachedThreadPool());
        server.createContext("/api/customers.getBalance", answering(this::balance));
        server.createContext("/status", answering(exchange -> new Answer(200, status())));
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            server.stop(0);
            // Otherwise the partitions would wait for the session timeout.
            streams.close(CloseOptions.timeout(CLOSE_TIMEOUT)
                    .withGroupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP));
        }));
        server.start();
        streams.start();
    }

    private Topology topology() {
        var store = Stores.keyValueStoreBuilder(
                Stores.persistentKeyValueStore(STORE), Serdes.ByteArray(), Serdes.ByteArray());
        // Even a cache of zero bytes would process every record.
        store = options.number("cache-bytes") > 0 ? store.withCachingEnabled() : store.withCachingDisabled();
        WriterSchemas schemas = new WriterSchemas(options.get("schema-registry-url"));
        ByteArrayDeserializer bytes = new ByteArrayDeserializer();
        return new Topology()
                .addSource("events", bytes, bytes, options.get("topic"))
                .addProcessor("fold", () -> new Fold(schemas), "events")
                .addStateStore(store.withLoggingEnabled(Map.of()), "fold");
    }

    private static long sinceStartMs() {
        return System.currentTimeMillis() - ManagementFactory.getRuntimeMXBean().getStartTime();
    }

    /** Adds amounts to balances. One instance per task, used only by the thread of that task. */
    private final class Fold implements Processor<byte[], byte[], Void, Void> {
        private final AmountReader amounts;
        private final AtomicLong position = new AtomicLong(NOTHING_APPLIED);
        private ProcessorContext<Void, Void> context;
        private KeyValueStore<byte[], byte[]> store;

        Fold(WriterSchemas schemas) {
            amounts = new AmountReader(schemas);
        }

        @Override
        public void init(ProcessorContext<Void, Void> context) {
            this.context = context;
            store = context.getStateStore(STORE);
            positions.put(context.taskId().partition(), position);
        }

        @Override
        public void process(Record<byte[], byte[]> event) {
            long amount = amountIn(event);
            if (amount != AmountReader.ANOTHER_TYPE) {
                store.put(event.key(), Balance.plus(store.get(event.key()), amount));
            }
            position.setRelease(context.recordMetadata().orElseThrow().offset() + 1);
            if (firstAppliedAtMs == null) {
                firstAppliedAtMs = sinceStartMs();
            }
        }

        private long amountIn(Record<byte[], byte[]> event) {
            try {
                return amounts.amountIn(event.value());
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        @Override
        public void close() {
            positions.remove(context.taskId().partition(), position);
        }
    }

    private final class RestoreProgress implements StateRestoreListener {
        @Override
        public void onRestoreStart(TopicPartition changelog, String store, long first, long end) {}

        @Override
        public void onBatchRestored(TopicPartition changelog, String store, long end, long count) {
            restored.addAndGet(count);
        }

        @Override
        public void onRestoreEnd(TopicPartition changelog, String store, long total) {
            restoredAtMs = sinceStartMs();
        }
    }

    private record Answer(int status, String body) {
        static final Answer UNAVAILABLE = new Answer(503, "{\"detail\":\"no owner can answer now\"}");
    }

    @FunctionalInterface
    private interface Route {
        Answer answer(HttpExchange exchange) throws IOException, InterruptedException;
    }

    private static HttpHandler answering(Route route) {
        return exchange -> {
            Answer answer;
            try {
                answer = route.answer(exchange);
            } catch (InvalidStateStoreException | IllegalStateException | IOException restoringOrMoving) {
                answer = Answer.UNAVAILABLE;
            } catch (InterruptedException stopping) {
                return;
            }
            byte[] body = answer.body.getBytes(StandardCharsets.UTF_8);
            exchange.getResponseHeaders().set("Content-Type", "application/json");
            exchange.sendResponseHeaders(answer.status, body.length);
            exchange.getResponseBody().write(body);
            exchange.close();
        };
    }

    private Answer balance(HttpExchange exchange) throws IOException, InterruptedException {
        String query = exchange.getRequestURI().getRawQuery();
        if (query == null || !query.startsWith("customerId=")) {
            return new Answer(400, "{\"detail\":\"customerId is missing\"}");
        }
        String customer = URLDecoder.decode(query.substring("customerId=".length()), StandardCharsets.UTF_8);
        byte[] key = customer.getBytes(StandardCharsets.UTF_8);
        KeyQueryMetadata owner = streams.queryMetadataForKey(STORE, key, KEYS);
        if (owner.equals(KeyQueryMetadata.NOT_AVAILABLE)) {
            return Answer.UNAVAILABLE;
        }
        if (owner.activeHost().equals(self)) {
            return ownBalance(key, owner.partition());
        }
        boolean forwarded = exchange.getRequestHeaders().containsKey(FORWARDED);
        return forwarded ? Answer.UNAVAILABLE : ask(owner.activeHost(), exchange.getRequestURI());
    }

    private Answer ownBalance(byte[] key, int partition) {
        ReadOnlyKeyValueStore<byte[], byte[]> store = streams.store(
                StoreQueryParameters.fromNameAndType(STORE, QueryableStoreTypes.<byte[], byte[]>keyValueStore())
                        .withPartition(partition));
        byte[] balance = store.get(key);
        return balance == null
                ? new Answer(404, "{\"detail\":\"no such customer\"}")
                : new Answer(200, "{\"amount\":" + Balance.decimal(balance, AmountReader.SCALE) + "}");
    }

    private Answer ask(HostInfo owner, URI asked) throws IOException, InterruptedException {
        URI address = URI.create(
                "http://" + owner.host() + ":" + owner.port() + asked.getRawPath() + "?" + asked.getRawQuery());
        HttpRequest request = HttpRequest.newBuilder(address).timeout(PROXY_TIMEOUT).header(FORWARDED, "1").build();
        var answer = peers.send(request, BodyHandlers.ofString(StandardCharsets.UTF_8));
        return new Answer(answer.statusCode(), answer.body());
    }

    private String status() throws InterruptedException {
        Map<Integer, Long> next = new TreeMap<>();
        positions.forEach((partition, position) -> next.put(partition, position.getAcquire()));
        if (next.containsValue(NOTHING_APPLIED)) {
            Map<Integer, Long> committed = committedOffsets();
            next.replaceAll((partition, position) ->
                    position == NOTHING_APPLIED ? committed.getOrDefault(partition, 0L) : position);
        }
        String owned = next.entrySet().stream()
                .map(task -> "\"" + task.getKey() + "\":" + task.getValue())
                .collect(Collectors.joining(","));
        return String.format(
                "{\"state\":\"%s\",\"positions\":{%s},\"restored\":%d,"
                        + "\"readyAtMs\":%d,\"firstAppliedAtMs\":%d,\"restoredAtMs\":%d}",
                streams.state(), owned, restored.get(), runningAtMs, firstAppliedAtMs, restoredAtMs);
    }

    private Map<Integer, Long> committedOffsets() throws InterruptedException {
        Map<Integer, Long> committed = new HashMap<>();
        try {
            admin.listConsumerGroupOffsets(options.get("application-id")).partitionsToOffsetAndMetadata().get()
                    .forEach((source, offset) -> committed.put(source.partition(), offset.offset()));
        } catch (ExecutionException error) {
            throw new IllegalStateException(error);
        }
        return committed;
    }
}
