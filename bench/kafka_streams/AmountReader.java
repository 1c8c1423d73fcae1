import java.io.IOException;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.avro.LogicalTypes;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.BinaryDecoder;
import org.apache.avro.io.DecoderFactory;

/** Reads the amount of a `FundsAdded` by its writer's schema. For one thread, because it reuses its buffers. */
final class AmountReader {
    /** Not an amount: amounts have 18 digits at most. */
    static final long ANOTHER_TYPE = Long.MIN_VALUE;

    static final int SCALE = 2;

    private static final String FUNDS_ADDED = "parts.code.balance.events.FundsAdded";
    private static final int HEADER_BYTES = 5;

    private final WriterSchemas schemas;
    private final Map<Integer, Writer> writers = new HashMap<>();
    private BinaryDecoder decoder;
    private GenericRecord event;

    AmountReader(WriterSchemas schemas) {
        this.schemas = schemas;
    }

    /**
     * The amount in a Confluent frame, in hundredths; ANOTHER_TYPE for a record of another type.
     *
     * @throws ArithmeticException the amount has more than two decimals, or more digits than a long
     */
    long amountIn(byte[] frame) throws IOException {
        if (frame == null || frame.length < HEADER_BYTES || frame[0] != 0) {
            throw new IOException("a value that is not in Confluent's format");
        }
        Writer writer = writers.computeIfAbsent(ByteBuffer.wrap(frame).getInt(1), id -> Writer.of(schemas.get(id)));
        if (writer.reader == null) {
            return ANOTHER_TYPE;
        }
        decoder = DecoderFactory.get().binaryDecoder(frame, HEADER_BYTES, frame.length - HEADER_BYTES, decoder);
        event = writer.reader.read(event, decoder);
        ByteBuffer unscaled = (ByteBuffer) event.get(0);
        return writer.scale == SCALE && unscaled.remaining() <= Long.BYTES
                ? number(unscaled)
                : rescaled(unscaled, writer.scale);
    }

    private static long number(ByteBuffer bigEndian) {
        long number = bigEndian.get(bigEndian.position());
        for (int i = bigEndian.position() + 1; i < bigEndian.limit(); i++) {
            number = number << Byte.SIZE | bigEndian.get(i) & 0xFF;
        }
        return number;
    }

    private static long rescaled(ByteBuffer unscaled, int scale) {
        byte[] bytes = new byte[unscaled.remaining()];
        unscaled.duplicate().get(bytes);
        return new BigDecimal(new BigInteger(bytes), scale).setScale(SCALE).unscaledValue().longValueExact();
    }

    /** A reader for one writer's schema: decodes the amount and skips all other fields. */
    private record Writer(GenericDatumReader<GenericRecord> reader, int scale) {
        static Writer of(Schema written) {
            if (!written.getFullName().equals(FUNDS_ADDED)) {
                return new Writer(null, 0);
            }
            Schema amount = written.getField("amount").schema();
            if (!(amount.getLogicalType() instanceof LogicalTypes.Decimal decimal)) {
                throw new IllegalArgumentException("the amount is not a decimal in " + written);
            }
            Schema wanted = Schema.createRecord(
                    written.getName(), null, written.getNamespace(), false,
                    List.of(new Schema.Field("amount", amount)));
            GenericData generic = new GenericData();
            generic.setFastReaderEnabled(true);
            return new Writer(new GenericDatumReader<>(written, wanted, generic), decimal.getScale());
        }
    }
}
