package parts.code.balance;

import java.util.Arrays;

/**
 * Reads the body of one record from its start to its end, for one thread.
 *
 * Nothing that the bytes claim is believed: a length is compared with the bytes that are left before anything is
 * allocated, and a budget in proportion to the bytes bounds the values that a record makes. Avro's BinaryDecoder does
 * neither.
 *
 * Source: Avro 1.12 specification, "Binary Encoding".
 */
final class Body {
  // A value takes up to some 16 bytes of the heap. Most values take a byte of the record or more; those of nested
  // records without fields, and columns that only the reader has, take none.
  private static final long VALUES = 250000, VALUES_PER_BYTE = 4;

  private final byte[] data;
  private int at;
  private long values;

  Body(byte[] data, int start) {
    this.data = data;
    this.at = start;
    this.values = VALUES + VALUES_PER_BYTE * (data.length - start);
  }

  /** Spends some of the budget of values. */
  void spend(long count) {
    this.values -= count;
    if (this.values < 0) {
      throw new Reading.Unreadable(
        "values-too-many",
        "it holds more than " + VALUES + " values and " + VALUES_PER_BYTE + " more for each of its bytes");
    }
  }

  /**
   * Returns the number of items in the next block of an array or a map; 0 after the last block.
   *
   * @param leastBytes how many bytes an item takes at least.
   */
  long items(long leastBytes) {
    long count = this.readLong();
    if (count < 0) {
      // The size of the block, which only a reader that passes over it unread needs.
      this.readLong();
      count = -count;
    }
    if (count < 0 || leastBytes > 0 && count > (this.data.length - this.at) / leastBytes) {
      throw this.tooShort();
    }
    return count;
  }

  int readInt() {
    long number = this.readLong();
    if (number != (int) number) {
      throw new Reading.Unreadable(Reading.BODY, "an int has more than 32 bits");
    }
    return (int) number;
  }

  long readLong() {
    long bits = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      if (this.at == this.data.length) {
        throw this.tooShort();
      }
      long next = this.data[this.at++];
      bits |= (next & 127) << shift;
      if (next >= 0) {
        return bits >>> 1 ^ -(bits & 1);
      }
    }
    throw new Reading.Unreadable(Reading.BODY, "a long has more than 64 bits");
  }

  boolean readBoolean() {
    byte value = this.data[this.passed(1)];
    if (value != 0 && value != 1) {
      throw new Reading.Unreadable(Reading.BODY, "a boolean is neither 0 nor 1");
    }
    return value == 1;
  }

  float readFloat() {
    return Float.intBitsToFloat((int) this.littleEndian(4));
  }

  double readDouble() {
    return Double.longBitsToDouble(this.littleEndian(8));
  }

  long readBigEndian() {
    return Long.reverseBytes(this.littleEndian(8));
  }

  /** Returns bytes that follow their length. */
  byte[] readBytes() {
    return this.readFixed(this.readLong());
  }

  byte[] readFixed(long size) {
    int from = this.passed(size);
    return Arrays.copyOfRange(this.data, from, this.at);
  }

  /** Passes over bytes that follow their length. */
  void skipBytes() {
    this.passed(this.readLong());
  }

  void skipFixed(int size) {
    this.passed(size);
  }

  private long littleEndian(int size) {
    int from = this.passed(size);
    long bits = 0;
    for (int i = size - 1; i >= 0; i--) {
      bits = bits << 8 | this.data[from + i] & 255;
    }
    return bits;
  }

  private int passed(long size) {
    if (size < 0 || size > this.data.length - this.at) {
      throw this.tooShort();
    }
    int from = this.at;
    this.at += (int) size;
    return from;
  }

  private Reading.Unreadable tooShort() {
    return new Reading.Unreadable(Reading.BODY, "the record ends within a value");
  }
}
