package parts.code.balance;

import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.IdentityHashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.avro.AvroRuntimeException;
import org.apache.avro.LogicalType;
import org.apache.avro.LogicalTypes;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.io.BinaryDecoder;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.DecoderFactory;
import org.apache.avro.io.EncoderFactory;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.util.ArrayBasedMapData;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Reads the values of a written type as those of a wanted type, in Spark's form. Has no state, so any thread may use it.
 *
 * Types resolve as Avro's specification and its Java library do, except that a decimal of any scale is read exactly;
 * that a logical type of the writer is never ignored; and that a value which does not resolve concerns its record only.
 * Fields that the reader lacks are read too, because damage in them may be damage of the next field.
 */
abstract class Reading {
  static final String INCOMPATIBLE = "schema-incompatible";
  private static final String BODY = "body-undecodable";
  private static final int DIGITS = 38;
  private static final int LONG_DIGITS = 18;
  // Bounds the time that a forged decimal takes; those with more digits do not fit.
  private static final int MOST_BYTES = 512;
  private static final int MOST_DIGITS = 1234;
  // The years 1 to 9999, which Python's times have, in microseconds since 1970.
  private static final long DAY = 86400000000L, FIRST = -719162 * DAY, END = 2932897 * DAY;
  // A time that is not checked may be any number.
  private static final long FARTHEST = 1000000000000000000L;
  private static final int MOST_LEVELS = 500;
  private static final int MOST_SAID = 400;
  private static final Reading NOTHING = new Fields(new Reading[0], new int[0], null);

  /** @param level how many values this one is nested in. */
  abstract Object read(BinaryDecoder in, int level) throws IOException;

  /** Returns Spark's type for the values of a wanted type. */
  static DataType typeOf(Schema wanted) {
    String name = nameOf(nonNull(wanted));
    Schema kind = nonNull(wanted);
    if (kind.getLogicalType() instanceof LogicalTypes.Decimal) {
      return DataTypes.createDecimalType(DIGITS, ((LogicalTypes.Decimal) kind.getLogicalType()).getScale());
    }
    switch (kind.getType()) {
      case BOOLEAN:
        return DataTypes.BooleanType;
      case INT:
        return name.equals("date") ? DataTypes.DateType : DataTypes.IntegerType;
      case LONG:
        return name.equals("long") ? DataTypes.LongType
          : name.startsWith("local-") ? DataTypes.TimestampNTZType : DataTypes.TimestampType;
      case FLOAT:
        return DataTypes.FloatType;
      case DOUBLE:
        return DataTypes.DoubleType;
      case BYTES:
      case FIXED:
        return DataTypes.BinaryType;
      case ARRAY:
        return DataTypes.createArrayType(typeOf(kind.getElementType()));
      case MAP:
        return DataTypes.createMapType(DataTypes.StringType, typeOf(kind.getValueType()));
      case RECORD:
        StructType type = new StructType();
        for (Object field : kind.getFields()) {
          type = type.add(((Schema.Field) field).name(), typeOf(((Schema.Field) field).schema()));
        }
        return type;
      default:
        return DataTypes.StringType;
    }
  }

  static int index(BinaryDecoder in, int count, String of) throws IOException {
    long index = in.readLong();
    if (index < 0 || index >= count) {
      throw new Unreadable(BODY, of + " has no member " + index);
    }
    return (int) index;
  }

  private static Schema nonNull(Schema kind) {
    boolean isNullable = kind.getType() == Schema.Type.UNION;
    int other = isNullable && ((Schema) kind.getTypes().get(0)).getType() == Schema.Type.NULL ? 1 : 0;
    return isNullable ? (Schema) kind.getTypes().get(other) : kind;
  }

  /** Returns the logical type, if Avro knows it and it is valid, else the type. A UUID is its text or its bytes. */
  private static String nameOf(Schema kind) {
    LogicalType logical = kind.getLogicalType();
    return logical == null || logical.getName().equals("uuid") ? kind.getType().getName() : logical.getName();
  }

  private static String said(Schema kind) {
    return kind.getLogicalType() == null ? kind.getFullName() : kind.getLogicalType().getName();
  }

  private static byte[] bytes(BinaryDecoder in) throws IOException {
    ByteBuffer read = in.readBytes(null);
    return read.array();
  }

  private static UTF8String text(BinaryDecoder in, String malformed, String path) throws IOException {
    byte[] data = bytes(in);
    UTF8String text = UTF8String.fromBytes(data);
    if (malformed != null) {
      for (int i = 0; i < data.length; i++) {
        if (data[i] < 0) {
          if (!text.isValid()) {
            throw new Unreadable(malformed, path + " is not UTF-8");
          }
          break;
        }
      }
    }
    return text;
  }

  /** A record that cannot be read. Has no stack trace, because many records may be so. */
  static final class Unreadable extends RuntimeException {
    final UTF8String cause;

    Unreadable(String cause, String detail) {
      // A message of Avro may contain the schema.
      super(detail == null || detail.length() <= MOST_SAID ? detail : detail.substring(0, MOST_SAID), null, false, false);
      this.cause = UTF8String.fromString(cause);
    }

    static Unreadable of(Throwable e) {
      if (e instanceof Unreadable) {
        return (Unreadable) e;
      }
      if (e instanceof EOFException) {
        return new Unreadable(BODY, "the record ends within a value");
      }
      // Avro refuses lengths that no array of Java has by an UnsupportedOperationException.
      boolean isOfBody = e instanceof IOException || e instanceof AvroRuntimeException
        || e instanceof UnsupportedOperationException || e instanceof StackOverflowError;
      return new Unreadable(isOfBody ? BODY : "decoder-failed", e.toString());
    }
  }

  /** Makes the readings of one schema. */
  static final class Resolution {
    // Readings of skipped records by type. They may contain themselves.
    private final IdentityHashMap skipped = new IdentityHashMap();

    /**
     * @param malformed as for `Resolving`; null if neither text nor times are checked.
     * @throws Unreadable if no value resolves
     */
    Reading of(Schema written, Schema wanted, String path, String malformed) {
      if (written.getType() == Schema.Type.UNION) {
        return this.ofUnion(written, wanted, path, malformed);
      }
      if (written.getType() == Schema.Type.NULL && wanted.getType() == Schema.Type.UNION) {
        return NOTHING;
      }
      Schema ours = nonNull(wanted);
      String theirName = nameOf(written), ourName = nameOf(ours);
      Schema.Type their = written.getType();
      // Only a type that says nothing else is read as what the reader says.
      boolean isPlain = theirName.equals(ourName) || theirName.equals(their.getName());
      switch (ours.getType()) {
        case LONG:
          if (their == Schema.Type.LONG && theirName.replace("micros", "millis").equals(ourName.replace("micros", "millis"))) {
            return new Single(their, ours.getType(), theirName, malformed, path);
          }
          // As for the other numbers.
        case BOOLEAN:
        case INT:
        case FLOAT:
        case DOUBLE:
          if (isPlain && isPromoted(their, ours.getType())) {
            return new Single(their, ours.getType(), ourName, malformed, path);
          }
          break;
        case STRING:
          if (isPlain && (their == Schema.Type.STRING || their == Schema.Type.BYTES)) {
            return new Single(their, ours.getType(), ourName, malformed, path);
          }
          break;
        case BYTES:
        case FIXED:
          if (ourName.equals("decimal")) {
            if (theirName.equals("decimal") || theirName.equals("int") || theirName.equals("long")) {
              return new Exact(written, ((LogicalTypes.Decimal) ours.getLogicalType()).getScale(), path);
            }
          } else if (isPlain && ours.getType() == Schema.Type.BYTES && (their == Schema.Type.STRING || their == ours.getType())) {
            return new Single(their, ours.getType(), ourName, malformed, path);
          } else if (isPlain && isNamedSo(written, ours) && written.getFixedSize() == ours.getFixedSize()) {
            return new Fixed(written.getFixedSize());
          }
          break;
        case ENUM:
          if (isNamedSo(written, ours)) {
            return new Symbols(written, ours, path);
          }
          break;
        case ARRAY:
          if (their == Schema.Type.ARRAY) {
            Reading item = this.of(written.getElementType(), ours.getElementType(), path + "[]", malformed);
            return new Items(false, item, true, malformed, path);
          }
          break;
        case MAP:
          if (their == Schema.Type.MAP) {
            Reading value = this.of(written.getValueType(), ours.getValueType(), path + "{}", malformed);
            return new Items(true, value, true, malformed, path);
          }
          break;
        default:
          if (their == Schema.Type.RECORD) {
            return this.ofRecord(written, ours, path, malformed);
          }
      }
      throw new Unreadable(INCOMPATIBLE, path + " is written as " + said(written) + ", which is not read as " + said(ours));
    }

    private static boolean isNamedSo(Schema written, Schema wanted) {
      return written.getType() == wanted.getType() && written.getName().equals(wanted.getName());
    }

    // Source: Avro 1.12 specification, "Schema Resolution".
    private static boolean isPromoted(Schema.Type written, Schema.Type wanted) {
      int from = "int long float double".indexOf(written.getName());
      int to = "int long float double".indexOf(wanted.getName());
      return written == wanted || 0 <= from && from < to;
    }

    private Reading ofUnion(Schema written, Schema wanted, String path, String malformed) {
      Reading[] members = new Reading[written.getTypes().size()];
      Unreadable problem = null;
      boolean isReadable = false;
      for (int i = 0; i < members.length; i++) {
        Schema member = (Schema) written.getTypes().get(i);
        try {
          if (member.getType() == Schema.Type.NULL && wanted.getType() != Schema.Type.UNION) {
            members[i] = new Refused(new Unreadable("field-null", path + " is null"));
          } else {
            members[i] = this.of(member, wanted, path, malformed);
            isReadable = true;
          }
        } catch (Unreadable e) {
          problem = e;
          members[i] = new Refused(e);
        }
      }
      if (problem != null && !isReadable) {
        throw problem;
      }
      return new Union(members, path);
    }

    private Reading ofRecord(Schema written, Schema wanted, String path, String malformed) {
      Object[] defaults = new Object[wanted.getFields().size()];
      for (int i = 0; i < defaults.length; i++) {
        Schema.Field field = (Schema.Field) wanted.getFields().get(i);
        if (written.getField(field.name()) == null) {
          defaults[i] = this.defaultOf(field, path + "." + field.name());
        }
      }
      Reading[] parts = new Reading[written.getFields().size()];
      int[] columns = new int[parts.length];
      for (int i = 0; i < parts.length; i++) {
        Schema.Field theirs = (Schema.Field) written.getFields().get(i);
        Schema.Field ours = wanted.getField(theirs.name());
        columns[i] = ours == null ? -1 : ours.pos();
        if (ours == null) {
          parts[i] = this.skipped(theirs.schema());
        } else {
          String cause = malformed == null ? ours.getProp("malformed") : malformed;
          parts[i] = this.of(theirs.schema(), ours.schema(), path + "." + ours.name(), cause);
        }
      }
      return new Fields(parts, columns, defaults);
    }

    private Object defaultOf(Schema.Field field, String path) {
      if (!field.hasDefaultValue()) {
        throw new Unreadable(INCOMPATIBLE, path + " is missing, and has no default");
      }
      try {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        BinaryEncoder out = EncoderFactory.get().directBinaryEncoder(bytes, null);
        new GenericDatumWriter(field.schema()).write(GenericData.get().getDefaultValue(field), out);
        BinaryDecoder in = DecoderFactory.get().binaryDecoder(bytes.toByteArray(), null);
        return this.of(field.schema(), field.schema(), path, null).read(in, 0);
      } catch (IOException e) {
        throw new IllegalStateException(e);
      }
    }

    private Reading skipped(Schema kind) {
      switch (kind.getType()) {
        case NULL:
          return NOTHING;
        case FIXED:
          return new Fixed(kind.getFixedSize());
        case ENUM:
          return new Symbols(kind, kind, kind.getName());
        case ARRAY:
          return new Items(false, this.skipped(kind.getElementType()), false, null, null);
        case MAP:
          return new Items(true, this.skipped(kind.getValueType()), false, null, null);
        case UNION:
          Reading[] members = new Reading[kind.getTypes().size()];
          for (int i = 0; i < members.length; i++) {
            members[i] = this.skipped((Schema) kind.getTypes().get(i));
          }
          return new Union(members, "a union");
        case RECORD:
          return this.skippedRecord(kind);
        default:
          return new Single(kind.getType(), kind.getType(), kind.getType().getName(), null, null);
      }
    }

    private Reading skippedRecord(Schema kind) {
      if (this.skipped.containsKey(kind)) {
        return (Reading) this.skipped.get(kind);
      }
      Reading[] parts = new Reading[kind.getFields().size()];
      int[] columns = new int[parts.length];
      this.skipped.put(kind, new Fields(parts, columns, null));
      boolean isEmpty = true;
      for (int i = 0; i < parts.length; i++) {
        columns[i] = -1;
        parts[i] = this.skipped(((Schema.Field) kind.getFields().get(i)).schema());
        isEmpty = isEmpty && parts[i] == NOTHING;
      }
      if (isEmpty) {
        // Nested twice in each other, such records would be more than can be counted, in no bytes.
        this.skipped.put(kind, NOTHING);
      }
      return (Reading) this.skipped.get(kind);
    }
  }

  static final class Refused extends Reading {
    private final Unreadable problem;

    Refused(Unreadable problem) {
      this.problem = problem;
    }

    Object read(BinaryDecoder in, int level) {
      throw this.problem;
    }
  }

  /** A value of a type that is not nested. */
  private static final class Single extends Reading {
    private final Schema.Type written;
    private final Schema.Type wanted;
    // In microseconds; 0 if the value is no time.
    private final long unit;
    private final String malformed;
    private final String path;

    Single(Schema.Type written, Schema.Type wanted, String name, String malformed, String path) {
      this.written = written;
      this.wanted = wanted;
      this.unit = name.endsWith("millis") ? 1000 : name.endsWith("micros") ? 1 : name.equals("date") ? DAY : 0;
      this.malformed = malformed;
      this.path = path;
    }

    Object read(BinaryDecoder in, int level) throws IOException {
      switch (this.wanted) {
        case BOOLEAN:
          return Boolean.valueOf(in.readBoolean());
        case INT:
          int day = in.readInt();
          this.check(day * this.unit);
          return Integer.valueOf(day);
        case LONG:
          long number = this.number(in);
          if (this.unit > 0) {
            number = Math.max(-FARTHEST / this.unit, Math.min(number, FARTHEST / this.unit)) * this.unit;
            this.check(number);
          }
          return Long.valueOf(number);
        case FLOAT:
          return Float.valueOf(this.written == Schema.Type.FLOAT ? in.readFloat() : (float) this.number(in));
        case DOUBLE:
          return Double.valueOf(
            this.written == Schema.Type.DOUBLE ? in.readDouble()
              : this.written == Schema.Type.FLOAT ? (double) in.readFloat() : (double) this.number(in));
        case STRING:
          return text(in, this.malformed, this.path);
        default:
          return bytes(in);
      }
    }

    private long number(BinaryDecoder in) throws IOException {
      return this.written == Schema.Type.INT ? in.readInt() : in.readLong();
    }

    private void check(long time) {
      if (this.malformed != null && (time < FIRST || time >= END)) {
        throw new Unreadable("time-out-of-range", this.path + " is not in the years 1 to 9999");
      }
    }
  }

  private static final class Fixed extends Reading {
    private final int size;

    Fixed(int size) {
      this.size = size;
    }

    Object read(BinaryDecoder in, int level) throws IOException {
      byte[] data = new byte[this.size];
      in.readFixed(data, 0, this.size);
      return data;
    }
  }

  /** A decimal, of a decimal of any scale and precision or of an integer. */
  private static final class Exact extends Reading {
    private static final BigInteger MOST = BigInteger.TEN.pow(DIGITS);
    private final Schema written;
    private final BigInteger writtenMost;
    private final long limit;
    private final int wantedScale;
    // The digits that the wanted scale has more.
    private final int more;
    private final BigInteger power;
    private final String path;

    Exact(Schema written, int wantedScale, String path) {
      LogicalType decimal = written.getLogicalType();
      this.written = written;
      int digits = decimal == null ? DIGITS : Math.min(((LogicalTypes.Decimal) decimal).getPrecision(), MOST_DIGITS);
      this.writtenMost = BigInteger.TEN.pow(digits);
      this.limit = BigInteger.TEN.pow(Math.min(digits, LONG_DIGITS)).longValue();
      this.wantedScale = wantedScale;
      this.more = wantedScale - (decimal == null ? 0 : ((LogicalTypes.Decimal) decimal).getScale());
      this.power = BigInteger.TEN.pow(Math.min(Math.abs(this.more), MOST_DIGITS));
      this.path = path;
    }

    Object read(BinaryDecoder in, int level) throws IOException {
      byte[] data;
      switch (this.written.getType()) {
        case BYTES:
          data = bytes(in);
          break;
        case FIXED:
          data = new byte[this.written.getFixedSize()];
          in.readFixed(data, 0, data.length);
          break;
        default:
          data = BigInteger.valueOf(in.readLong()).toByteArray();
      }
      if (data.length == 0) {
        throw new Unreadable(BODY, this.path + " is a decimal without digits");
      }
      if (data.length <= 8 && this.more == 0) {
        long number = data[0];
        for (int i = 1; i < data.length; i++) {
          number = number << 8 | data[i] & 255;
        }
        if (-this.limit < number && number < this.limit) {
          return new Decimal().set(number, DIGITS, this.wantedScale);
        }
      }
      BigDecimal exact = this.exact(data);
      if (exact == null) {
        String type = "decimal(" + DIGITS + "," + this.wantedScale + ")";
        throw new Unreadable("decimal-loses-digits", this.path + " has more digits than its type, or than " + type);
      }
      return Decimal.apply(exact, DIGITS, this.wantedScale);
    }

    /** Returns the value at the wanted scale; null if it does not fit. */
    private BigDecimal exact(byte[] data) {
      BigInteger number = new BigInteger(data);
      if (number.signum() == 0) {
        return BigDecimal.valueOf(0, this.wantedScale);
      }
      if (data.length > MOST_BYTES || -this.more > MOST_DIGITS || number.abs().compareTo(this.writtenMost) >= 0) {
        return null;
      }
      if (this.more < 0 && number.mod(this.power).signum() != 0) {
        return null;
      }
      number = this.more < 0 ? number.divide(this.power) : number.multiply(this.power);
      return number.abs().compareTo(MOST) < 0 ? new BigDecimal(number, this.wantedScale) : null;
    }
  }

  private static final class Symbols extends Reading {
    private final Object[] symbols;
    private final List written;
    private final String path;

    Symbols(Schema written, Schema wanted, String path) {
      this.written = written.getEnumSymbols();
      this.symbols = new Object[this.written.size()];
      this.path = path;
      for (int i = 0; i < this.symbols.length; i++) {
        String symbol = (String) this.written.get(i);
        String known = wanted.hasEnumSymbol(symbol) ? symbol : wanted.getEnumDefault();
        this.symbols[i] = known == null ? null : UTF8String.fromString(known);
      }
    }

    Object read(BinaryDecoder in, int level) throws IOException {
      int index = index(in, this.symbols.length, this.path);
      if (this.symbols[index] == null) {
        throw new Unreadable(INCOMPATIBLE, this.path + " is " + this.written.get(index) + ", a symbol that is not read");
      }
      return this.symbols[index];
    }
  }

  private static final class Union extends Reading {
    private final Reading[] members;
    private final String path;

    Union(Reading[] members, String path) {
      this.members = members;
      this.path = path;
    }

    Object read(BinaryDecoder in, int level) throws IOException {
      return this.members[index(in, this.members.length, this.path)].read(in, level);
    }
  }

  /** An array or a map. */
  private static final class Items extends Reading {
    private final boolean isMap;
    private final Reading item;
    private final boolean isWanted;
    private final String malformed;
    private final String path;

    Items(boolean isMap, Reading item, boolean isWanted, String malformed, String path) {
      this.isMap = isMap;
      this.item = item;
      this.isWanted = isWanted;
      this.malformed = malformed;
      this.path = path;
    }

    Object read(BinaryDecoder in, int level) throws IOException {
      List items = new ArrayList();
      // Of two entries with one key, the later holds.
      Map entries = new LinkedHashMap();
      long count = this.isMap ? in.readMapStart() : in.readArrayStart();
      while (count > 0) {
        for (long i = 0; i < count; i++) {
          UTF8String key = this.isMap ? text(in, this.malformed, this.path) : null;
          Object value = this.item.read(in, level + 1);
          if (this.isWanted && this.isMap) {
            entries.put(key, value);
          } else if (this.isWanted) {
            items.add(value);
          } else if (this.item == NOTHING && !this.isMap) {
            break;
          }
        }
        count = this.isMap ? in.mapNext() : in.arrayNext();
      }
      return !this.isMap ? new GenericArrayData(items.toArray()) : new ArrayBasedMapData(
        new GenericArrayData(entries.keySet().toArray()), new GenericArrayData(entries.values().toArray()));
    }
  }

  private static final class Fields extends Reading {
    private final Reading[] parts;
    // The column of each part; -1 if it is skipped.
    private final int[] columns;
    // Null if the record is skipped.
    private final Object[] defaults;

    Fields(Reading[] parts, int[] columns, Object[] defaults) {
      this.parts = parts;
      this.columns = columns;
      this.defaults = defaults;
    }

    Object read(BinaryDecoder in, int level) throws IOException {
      if (level > MOST_LEVELS) {
        throw new Unreadable(BODY, "its values are nested more than " + MOST_LEVELS + " levels deep");
      }
      Object[] row = this.defaults == null ? null : (Object[]) this.defaults.clone();
      for (int i = 0; i < this.parts.length; i++) {
        Object value = this.parts[i].read(in, level + 1);
        if (this.columns[i] >= 0) {
          row[this.columns[i]] = value;
        }
      }
      return row == null ? null : new GenericInternalRow(row);
    }
  }
}
