import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.math.BigInteger;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Arrays;
import java.util.Map;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.avro.util.Utf8;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.CloseOptions;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.errors.InvalidStateStoreException;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.Repartitioned;
import org.apache.kafka.streams.processor.api.ContextualProcessor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.Stores;

/**
 * The loyalty points as a Kafka Streams program, written to be fast: members' invoices are re-keyed by card without
 * being re-encoded; one processor on a persistent RocksDB store with a changelog sends a notification for each.
 *
 * <p>Points are ten-thousandths in the format of {@link Balance}. An instance answers queries only from its own
 * partitions, because only one instance is measured.
 */
public final class RewardsStreams {
    private static final String STORE = "rewards";
    private static final Utf8 PRIME = new Utf8("PRIME");
    // 0.02 points per unit: each hundredth gives two ten-thousandths.
    private static final long POINTS_OF_A_CENT = 2;
    private static final Duration CLOSE_TIMEOUT = Duration.ofSeconds(6);

    private final Options options;
    private final WriterSchemas schemas;
    private final KafkaStreams streams;

    private RewardsStreams(Options options) {
        this.options = options;
        schemas = new WriterSchemas(options.get("schema-registry-url"));
        streams = new KafkaStreams(topology(), options.properties());
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.ERROR) {
                Runtime.getRuntime().halt(1);
            }
        });
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
    }

    public static void main(String[] args) throws IOException {
        new RewardsStreams(Options.of(args)).run();
    }

    private void run() throws IOException {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", options.number("http-port")), 1024);
        server.createContext("/status", exchange -> answer(exchange, 200, "{\"state\":\"" + streams.state() + "\"}"));
        server.createContext("/api/customers.getRewards", this::rewards);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            server.stop(0);
            streams.close(CloseOptions.timeout(CLOSE_TIMEOUT)
                    .withGroupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP));
        }));
        server.start();
        streams.start();
    }

    private Topology topology() {
        Serde<byte[]> bytes = Serdes.ByteArray();
        var store = Stores.keyValueStoreBuilder(Stores.persistentKeyValueStore(STORE), bytes, bytes);
        store = options.number("cache-bytes") > 0 ? store.withCachingEnabled() : store.withCachingDisabled();
        StreamsBuilder builder = new StreamsBuilder();
        builder.addStateStore(store.withLoggingEnabled(Map.of()));
        builder.stream(options.get("topic"), Consumed.with(bytes, bytes))
                .process(() -> new ByCard(schemas))
                .repartition(Repartitioned.with(bytes, bytes).withName("by-card"))
                .process(() -> new Earn(schemas, options.number("notification-schema-id")), STORE)
                .to(options.get("output-topic"), Produced.with(bytes, bytes));
        return builder.build();
    }

    private void rewards(HttpExchange exchange) throws IOException {
        String query = exchange.getRequestURI().getRawQuery();
        byte[] card = query.substring("customerCardNo=".length()).getBytes(StandardCharsets.UTF_8);
        try {
            byte[] points = streams.store(StoreQueryParameters.fromNameAndType(
                            STORE, QueryableStoreTypes.<byte[], byte[]>keyValueStore()))
                    .get(card);
            boolean unknown = points == null;
            String body = unknown ? "{}" : "{\"points\":" + Balance.decimal(points, 4) + "}";
            answer(exchange, unknown ? 404 : 200, body);
        } catch (InvalidStateStoreException restoringOrMoving) {
            answer(exchange, 503, "{}");
        }
    }

    private static void answer(HttpExchange exchange, int status, String text) throws IOException {
        byte[] body = text.getBytes(StandardCharsets.UTF_8);
        exchange.sendResponseHeaders(status, body.length);
        exchange.getResponseBody().write(body);
        exchange.close();
    }

    private static byte[] bytesOf(GenericRecord invoice, int field) {
        Utf8 text = (Utf8) invoice.get(field);
        return Arrays.copyOf(text.getBytes(), text.getByteLength());
    }

    /** Re-keys members' invoices, unchanged, by card number. */
    private static final class ByCard extends ContextualProcessor<byte[], byte[], byte[], byte[]> {
        private final InvoiceReader invoices;

        ByCard(WriterSchemas schemas) {
            invoices = new InvoiceReader(schemas, "customerType", "customerCardNo");
        }

        @Override
        public void process(Record<byte[], byte[]> event) {
            try {
                GenericRecord invoice = invoices.read(event.value());
                if (PRIME.equals(invoice.get(0))) {
                    context().forward(event.withKey(bytesOf(invoice, 1)));
                }
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    /** Adds points, and sends a notification of each addition. */
    private static final class Earn extends ContextualProcessor<byte[], byte[], byte[], byte[]> {
        private final InvoiceReader invoices;
        private final byte[] header;
        private final ByteArrayOutputStream frame = new ByteArrayOutputStream();
        private BinaryEncoder encoder;
        private KeyValueStore<byte[], byte[]> store;

        Earn(WriterSchemas schemas, int notificationSchemaId) {
            invoices = new InvoiceReader(schemas, "invoiceNumber", "customerCardNo", "totalAmount");
            header = ByteBuffer.allocate(5).put((byte) 0).putInt(notificationSchemaId).array();
        }

        @Override
        public void init(ProcessorContext<byte[], byte[]> context) {
            super.init(context);
            store = context.getStateStore(STORE);
        }

        @Override
        public void process(Record<byte[], byte[]> event) {
            try {
                GenericRecord invoice = invoices.read(event.value());
                ByteBuffer total = (ByteBuffer) invoice.get(2);
                byte[] unscaled = new byte[total.remaining()];
                total.duplicate().get(unscaled);
                long earned = Math.multiplyExact(new BigInteger(unscaled).longValueExact(), POINTS_OF_A_CENT);
                byte[] points = Balance.plus(store.get(event.key()), earned);
                store.put(event.key(), points);
                context().forward(event.withValue(notification(invoice, unscaled, earned, points)));
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }

        private byte[] notification(GenericRecord invoice, byte[] total, long earned, byte[] points)
                throws IOException {
            frame.reset();
            frame.write(header);
            encoder = EncoderFactory.get().directBinaryEncoder(frame, encoder);
            encoder.writeString((Utf8) invoice.get(0));
            encoder.writeString((Utf8) invoice.get(1));
            encoder.writeBytes(total);
            encoder.writeBytes(BigInteger.valueOf(earned).toByteArray());
            encoder.writeBytes(points);
            return frame.toByteArray();
        }
    }
}
