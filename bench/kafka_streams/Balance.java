import java.lang.invoke.MethodHandles;
import java.lang.invoke.VarHandle;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.ByteOrder;

/**
 * A balance in the store: hundredths as a two's complement, big-endian number of 8 bytes, or of more bytes if
 * necessary. Exact at any size.
 */
final class Balance {
    private static final VarHandle LONG =
            MethodHandles.byteArrayViewVarHandle(long[].class, ByteOrder.BIG_ENDIAN);

    private Balance() {}

    /** The balance plus an amount in hundredths; the balance is null before the first event. */
    static byte[] plus(byte[] balance, long amount) {
        if (balance == null) {
            return bytes(amount);
        }
        if (balance.length == Long.BYTES) {
            long before = (long) LONG.get(balance, 0);
            long after = before + amount;
            boolean overflowed = ((before ^ after) & (amount ^ after)) < 0;
            if (!overflowed) {
                return bytes(after);
            }
        }
        BigInteger sum = new BigInteger(balance).add(BigInteger.valueOf(amount));
        return sum.bitLength() < Long.SIZE ? bytes(sum.longValue()) : sum.toByteArray();
    }

    /** The balance as a decimal with this scale. */
    static BigDecimal decimal(byte[] balance, int scale) {
        return new BigDecimal(new BigInteger(balance), scale);
    }

    private static byte[] bytes(long balance) {
        byte[] bytes = new byte[Long.BYTES];
        LONG.set(bytes, 0, balance);
        return bytes;
    }
}
