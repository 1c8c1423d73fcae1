package parts.code.balance;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.Serializable;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import org.apache.avro.LogicalTypes;
import org.apache.avro.NameValidator;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.spark.sql.Column;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.expressions.Literal;
import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.catalyst.expressions.objects.Invoke;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.catalyst.util.MapData;
import org.apache.spark.sql.classic.ExpressionUtils;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;
import scala.jdk.javaapi.CollectionConverters;

/**
 * Encodes structs as framed Avro records of one schema: the opposite of `Reading`.
 *
 * A field of the record has the value of the column with its name; without one, its default. A column has the type that
 * `Reading.typeOf` gives the field, or one whose values the field has too: a smaller integer, a float for a double, a
 * decimal of another precision and of no larger scale. The bytes are those that fastavro writes. Has no state, so any
 * thread may use it.
 *
 * Source: Avro 1.12 specification, "Binary Encoding" and "Schema Resolution".
 */
public final class Writing implements Serializable {
  private static final StructType TRIED = new StructType().add("frame", "binary").add("misfit", "string");
  private static final StructType ALL_TRIED =
    new StructType().add("frame", DataTypes.createArrayType(DataTypes.BinaryType)).add("misfit", "string");
  private static final int MOST_SAID = 60;
  // Of one event; a transaction and the memory of several processes hold them at once.
  private static final int MOST_STRUCTS = 10000;
  private static final int MOST_BYTES = 4 << 20;

  private final String text;
  private final byte[] header;
  private final StructType type;
  private final transient Part record;

  /**
   * @param text the record's schema
   * @param header the first bytes of each frame; empty for records without one
   * @param type of the structs
   * @throws IllegalArgumentException if a field has neither a column nor a default, or does not take its column's type
   */
  public Writing(String text, byte[] header, DataType type) {
    this.text = text;
    this.type = (StructType) type;
    this.header = header;
    // Other languages' libraries check neither names nor defaults.
    Schema schema = new Schema.Parser(NameValidator.NO_VALIDATION).setValidateDefaults(false).parse(text);
    this.record = new Fields(schema, this.type, "");
  }

  /** Returns Spark's type for the values of an Avro type, as they are read. */
  public static DataType typeOf(String text) {
    return Reading.typeOf(new Schema.Parser(NameValidator.NO_VALIDATION).setValidateDefaults(false).parse(text));
  }

  /** Returns the frames of a column of structs. A struct that does not fit fails the query: see `Unfit`. */
  public Column of(Column struct) {
    return this.invoked("write", DataTypes.BinaryType, struct);
  }

  /** Returns, for a column of structs, the `frame`; or, where a struct does not fit, the `misfit`: the field and why. */
  public Column tried(Column struct) {
    return this.invoked("attempt", TRIED, struct);
  }

  /** Returns, for a column of arrays of structs, the `frame` of each; or the `misfit` of one, as `tried`. */
  public Column allTried(Column structs) {
    return this.invoked("attemptAll", ALL_TRIED, structs);
  }

  /** Returns the frames of a column of arrays of structs; null if they are too many, or too large, for one event. */
  public Column ofAll(Column structs) {
    return this.invoked("writeAll", DataTypes.createArrayType(DataTypes.BinaryType), structs);
  }

  private Column invoked(String method, DataType made, Column struct) {
    List arguments = Collections.singletonList(ExpressionUtils.expression(struct));
    List types = new ArrayList();
    return ExpressionUtils.column(new Invoke(
      Literal.fromObject(this), method, made, CollectionConverters.asScala(arguments).toSeq(),
      CollectionConverters.asScala(types).toSeq(), true, true, true));
  }

  public byte[] write(InternalRow struct) {
    Bytes out = new Bytes();
    out.put(this.header);
    ((Fields) this.record).put(struct, out);
    return out.copied();
  }

  public ArrayData writeAll(ArrayData structs) {
    int count = structs.numElements();
    if (count > MOST_STRUCTS) {
      return null;
    }
    Object[] frames = new Object[count];
    long size = 0;
    for (int i = 0; i < count; i++) {
      byte[] frame = this.write(structs.getStruct(i, this.type.length()));
      size += frame.length;
      if (size > MOST_BYTES) {
        return null;
      }
      frames[i] = frame;
    }
    return new GenericArrayData(frames);
  }

  public InternalRow attempt(InternalRow struct) {
    try {
      return new GenericInternalRow(new Object[] {this.write(struct), null});
    } catch (Unfit e) {
      return new GenericInternalRow(new Object[] {null, UTF8String.fromString(e.getMessage())});
    }
  }

  public InternalRow attemptAll(ArrayData structs) {
    try {
      for (int i = 0; i < structs.numElements(); i++) {
        if (structs.isNullAt(i)) {
          throw new Unfit("record " + i, null, "one");
        }
      }
      ArrayData frames = this.writeAll(structs);
      return new GenericInternalRow(frames != null ? new Object[] {frames, null}
        : new Object[] {null, UTF8String.fromString(structs.numElements() + " records are too many, or too large")});
    } catch (Unfit e) {
      return new GenericInternalRow(new Object[] {null, UTF8String.fromString(e.getMessage())});
    }
  }

  // Public, because Janino makes private methods static.
  public Object readResolve() {
    return new Writing(this.text, this.header, this.type);
  }

  /** A value that its field does not take. Has no stack trace, because many records may have one. */
  public static final class Unfit extends RuntimeException {
    Unfit(String path, Object value, String wanted) {
      super(path + " is " + shown(value) + ", but " + wanted + " is expected", null, false, false);
    }

    private static String shown(Object value) {
      String text = String.valueOf(value);
      return text.length() <= MOST_SAID ? text : text.substring(0, MOST_SAID) + "\u2026";
    }
  }

  /** Bytes that grow. */
  private static final class Bytes {
    private byte[] data = new byte[128];
    private int size;

    byte[] copied() {
      return Arrays.copyOf(this.data, this.size);
    }

    void put(byte[] more) {
      this.require(more.length);
      System.arraycopy(more, 0, this.data, this.size, more.length);
      this.size += more.length;
    }

    void putSized(byte[] more) {
      this.putLong(more.length);
      this.put(more);
    }

    void putByte(int one) {
      this.require(1);
      this.data[this.size++] = (byte) one;
    }

    void putLong(long number) {
      this.require(10);
      long bits = number << 1 ^ number >> 63;
      while ((bits & ~127L) != 0) {
        this.data[this.size++] = (byte) (bits & 127 | 128);
        bits >>>= 7;
      }
      this.data[this.size++] = (byte) bits;
    }

    void putLittleEndian(long bits, int count) {
      this.require(count);
      for (int i = 0; i < count; i++) {
        this.data[this.size++] = (byte) (bits >> 8 * i);
      }
    }

    private void require(int more) {
      if (more > this.data.length - this.size) {
        this.data = Arrays.copyOf(this.data, Math.max(2 * this.data.length, this.size + more));
      }
    }
  }

  /** Writes one value of a row, an array or a map. */
  private abstract static class Part {
    /** @param at the position of the value, which is not null */
    abstract void write(SpecializedGetters from, int at, Bytes out);
  }

  /** Returns how values of a type are written. */
  private static Part partOf(Schema kind, DataType type, String path) {
    if (kind.getType() == Schema.Type.UNION) {
      List members = kind.getTypes();
      int ofNull = 0;
      while (ofNull < members.size() && ((Schema) members.get(ofNull)).getType() != Schema.Type.NULL) {
        ofNull++;
      }
      if (members.size() > 2 || members.size() == 2 && ofNull == 2) {
        throw new IllegalArgumentException(path + " is a union of several types, which is not written");
      }
      int other = ofNull == 0 && members.size() == 2 ? 1 : 0;
      Part part = other == ofNull ? null : ofType((Schema) members.get(other), type, path);
      return new Member(part, ofNull < members.size() ? ofNull : -1, other, path, Reading.said((Schema) members.get(other)));
    }
    return new Member(ofType(kind, type, path), -1, -1, path, Reading.said(kind));
  }

  private static Part ofType(Schema kind, DataType type, String path) {
    String name = Reading.nameOf(kind);
    switch (kind.getType()) {
      case NULL:
        return new Constant(new byte[0]);
      case RECORD:
        if (type instanceof StructType) {
          return new Fields(kind, (StructType) type, path + ".");
        }
        break;
      case ARRAY:
        if (type instanceof ArrayType) {
          return new Items(null, partOf(kind.getElementType(), ((ArrayType) type).elementType(), path + "[]"));
        }
        break;
      case MAP:
        if (type instanceof MapType) {
          MapType map = (MapType) type;
          Part key = partOf(Schema.create(Schema.Type.STRING), map.keyType(), path + "'s key");
          return new Items(key, partOf(kind.getValueType(), map.valueType(), path + "{}"));
        }
        break;
      case BYTES:
      case FIXED:
        if (kind.getLogicalType() instanceof LogicalTypes.Decimal) {
          int scale = ((LogicalTypes.Decimal) kind.getLogicalType()).getScale();
          if (type instanceof DecimalType && ((DecimalType) type).scale() <= scale) {
            return new Exact(kind, (DecimalType) type, path);
          }
          break;
        }
        if (type.equals(Reading.typeOf(kind))) {
          return kind.getType() == Schema.Type.BYTES ? new Plain(kind, type, path) : new Fixed(kind, path);
        }
        break;
      case ENUM:
        if (type.equals(DataTypes.StringType)) {
          return new Symbols(kind, path);
        }
        break;
      default:
        if (type.equals(Reading.typeOf(kind)) || isPromoted(type, kind)) {
          return new Plain(kind, type, path);
        }
    }
    throw new IllegalArgumentException(path + " is " + type.simpleString() + ", which is not written as " + name);
  }

  private static boolean isPromoted(DataType type, Schema kind) {
    if (kind.getLogicalType() != null) {
      return false;
    }
    boolean isSmall = type.equals(DataTypes.ByteType) || type.equals(DataTypes.ShortType);
    switch (kind.getType()) {
      case INT:
        return isSmall;
      case LONG:
        return isSmall || type.equals(DataTypes.IntegerType);
      case DOUBLE:
        return type.equals(DataTypes.FloatType);
      default:
        return false;
    }
  }

  /** A value that may be null, as the type allows. */
  private static final class Member extends Part {
    private final Part part;
    // The members of a union; -1 if null is none of them, or if the type is no union.
    private final int ofNull;
    private final int other;
    private final String path;
    private final String wanted;

    Member(Part part, int ofNull, int other, String path, String wanted) {
      this.part = part;
      this.ofNull = ofNull;
      this.other = other;
      this.path = path;
      this.wanted = wanted;
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      if (!from.isNullAt(at)) {
        if (this.other >= 0) {
          out.putLong(this.other);
        }
        this.part.write(from, at, out);
      } else if (this.ofNull >= 0) {
        out.putLong(this.ofNull);
      } else if (!(this.part instanceof Constant)) {
        throw new Unfit(this.path, null, this.wanted);
      }
    }
  }

  private static final class Constant extends Part {
    private final byte[] data;

    Constant(byte[] data) {
      this.data = data;
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      out.put(this.data);
    }
  }

  /** A value that always fits, but for a time that nanoseconds cannot tell. */
  private static final class Plain extends Part {
    private final Schema.Type kind;
    private final DataType type;
    private final boolean isOfMillis;
    private final boolean isOfNanos;
    private final String path;

    Plain(Schema kind, DataType type, String path) {
      String name = Reading.nameOf(kind);
      boolean isTime = type.equals(DataTypes.TimestampType) || type.equals(DataTypes.TimestampNTZType);
      this.kind = kind.getType();
      this.type = type;
      this.isOfMillis = isTime && name.endsWith("millis");
      this.isOfNanos = isTime && name.endsWith("nanos");
      this.path = path;
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      switch (this.kind) {
        case BOOLEAN:
          out.putByte(from.getBoolean(at) ? 1 : 0);
          break;
        case INT:
          out.putLong(this.integer(from, at));
          break;
        case LONG:
          out.putLong(this.time(this.integer(from, at)));
          break;
        case FLOAT:
          out.putLittleEndian(Float.floatToRawIntBits(from.getFloat(at)), 4);
          break;
        case DOUBLE:
          double number = this.type.equals(DataTypes.FloatType) ? (double) from.getFloat(at) : from.getDouble(at);
          out.putLittleEndian(Double.doubleToRawLongBits(number), 8);
          break;
        case STRING:
          out.putSized(from.getUTF8String(at).getBytes());
          break;
        default:
          out.putSized(from.getBinary(at));
      }
    }

    private long integer(SpecializedGetters from, int at) {
      if (this.type.equals(DataTypes.ByteType)) {
        return from.getByte(at);
      }
      if (this.type.equals(DataTypes.ShortType)) {
        return from.getShort(at);
      }
      if (this.type.equals(DataTypes.IntegerType) || this.type.equals(DataTypes.DateType)) {
        return from.getInt(at);
      }
      return from.getLong(at);
    }

    private long time(long micros) {
      if (this.isOfMillis) {
        return Math.floorDiv(micros, 1000L);
      }
      if (this.isOfNanos && (micros > Long.MAX_VALUE / 1000 || micros < Long.MIN_VALUE / 1000)) {
        throw new Unfit(this.path, Long.valueOf(micros) + " microseconds", "a time in nanoseconds");
      }
      return this.isOfNanos ? micros * 1000 : micros;
    }
  }

  private static final class Fixed extends Part {
    private final int size;
    private final boolean isUuid;
    private final String path;

    Fixed(Schema kind, String path) {
      this.size = kind.getFixedSize();
      this.isUuid = Reading.isUuid(kind);
      this.path = path;
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      if (this.isUuid) {
        String text = from.getUTF8String(at).toString();
        UUID value;
        try {
          value = UUID.fromString(text);
        } catch (IllegalArgumentException e) {
          throw new Unfit(this.path, text, "uuid");
        }
        out.putLittleEndian(Long.reverseBytes(value.getMostSignificantBits()), 8);
        out.putLittleEndian(Long.reverseBytes(value.getLeastSignificantBits()), 8);
        return;
      }
      byte[] data = from.getBinary(at);
      if (data.length != this.size) {
        throw new Unfit(this.path, data.length + " bytes", "fixed of " + this.size);
      }
      out.put(data);
    }
  }

  private static final class Exact extends Part {
    private final int precision;
    private final int scale;
    private final BigInteger most;
    // The digits that the wanted scale has more, and as a factor.
    private final BigInteger factor;
    // Of a fixed; -1 of bytes.
    private final int size;
    private final String path;
    private final String wanted;

    Exact(Schema kind, DecimalType type, String path) {
      LogicalTypes.Decimal decimal = (LogicalTypes.Decimal) kind.getLogicalType();
      this.precision = type.precision();
      this.scale = type.scale();
      this.most = BigInteger.TEN.pow(decimal.getPrecision());
      this.factor = BigInteger.TEN.pow(decimal.getScale() - this.scale);
      this.size = kind.getType() == Schema.Type.FIXED ? kind.getFixedSize() : -1;
      this.path = path;
      this.wanted = "decimal(" + decimal.getPrecision() + "," + decimal.getScale() + ")";
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      BigDecimal value = from.getDecimal(at, this.precision, this.scale).toJavaBigDecimal();
      BigInteger number = value.setScale(this.scale).unscaledValue().multiply(this.factor);
      if (number.abs().compareTo(this.most) >= 0) {
        throw new Unfit(this.path, value.toPlainString(), this.wanted);
      }
      byte[] digits = number.toByteArray();
      // fastavro's bytes have room for the sign of the positive number.
      int size = this.size < 0 ? number.abs().bitLength() / 8 + 1 : this.size;
      if (digits.length > size) {
        throw new Unfit(this.path, value.toPlainString(), "fixed of " + size);
      }
      if (this.size < 0) {
        out.putLong(size);
      }
      for (int i = digits.length; i < size; i++) {
        out.putByte(number.signum() < 0 ? -1 : 0);
      }
      out.put(digits);
    }
  }

  private static final class Symbols extends Part {
    private final Map numbers = new HashMap();
    private final String path;
    private final String wanted;

    Symbols(Schema kind, String path) {
      this.path = path;
      this.wanted = kind.getName() + kind.getEnumSymbols();
      for (Object symbol : kind.getEnumSymbols()) {
        this.numbers.put(UTF8String.fromString((String) symbol), Long.valueOf(this.numbers.size()));
      }
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      UTF8String symbol = from.getUTF8String(at);
      Long number = (Long) this.numbers.get(symbol);
      if (number == null) {
        throw new Unfit(this.path, symbol, this.wanted);
      }
      out.putLong(number.longValue());
    }
  }

  /** An array; or a map, which has keys. */
  private static final class Items extends Part {
    private final Part key;
    private final Part item;

    Items(Part key, Part item) {
      this.key = key;
      this.item = item;
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      MapData map = this.key == null ? null : from.getMap(at);
      ArrayData keys = map == null ? null : map.keyArray();
      ArrayData items = map == null ? from.getArray(at) : map.valueArray();
      int count = items.numElements();
      if (count > 0) {
        out.putLong(count);
      }
      for (int i = 0; i < count; i++) {
        if (keys != null) {
          this.key.write(keys, i, out);
        }
        this.item.write(items, i, out);
      }
      out.putLong(0);
    }
  }

  private static final class Fields extends Part {
    private final Part[] parts;
    private final int[] columns;
    private final int width;

    /** @param prefix of the paths of its fields */
    Fields(Schema kind, StructType type, String prefix) {
      this.parts = new Part[kind.getFields().size()];
      this.columns = new int[this.parts.length];
      this.width = type.length();
      List names = Arrays.asList(type.fieldNames());
      for (int i = 0; i < this.parts.length; i++) {
        Schema.Field field = (Schema.Field) kind.getFields().get(i);
        String path = prefix + field.name();
        this.columns[i] = names.indexOf(field.name());
        this.parts[i] = this.columns[i] < 0 ? new Constant(defaultOf(field, path))
          : partOf(field.schema(), type.fields()[this.columns[i]].dataType(), path);
      }
    }

    private static byte[] defaultOf(Schema.Field field, String path) {
      if (!field.hasDefaultValue()) {
        throw new IllegalArgumentException(path + " has neither a column nor a default");
      }
      try {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        BinaryEncoder out = EncoderFactory.get().directBinaryEncoder(bytes, null);
        new GenericDatumWriter(field.schema()).write(GenericData.get().getDefaultValue(field), out);
        out.flush();
        return bytes.toByteArray();
      } catch (IOException e) {
        throw new IllegalArgumentException(path + " has a default that cannot be used: " + e);
      }
    }

    void write(SpecializedGetters from, int at, Bytes out) {
      this.put(from.getStruct(at, this.width), out);
    }

    void put(InternalRow row, Bytes out) {
      for (int i = 0; i < this.parts.length; i++) {
        this.parts[i].write(row, this.columns[i], out);
      }
    }
  }
}
