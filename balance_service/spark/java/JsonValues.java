package parts.code.balance;

import com.fasterxml.jackson.core.JsonToken;
import java.io.IOException;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.time.DateTimeException;
import java.time.LocalDate;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.avro.LogicalTypes;
import org.apache.avro.Schema;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.catalyst.util.ArrayBasedMapData;
import org.apache.spark.sql.catalyst.util.GenericArrayData;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Reads JSON values as those of a wanted type, in Spark's form: exactly, or not at all. Any thread may use it.
 *
 * `formats/json_values.py` reads the same, and says the same of what it refuses.
 */
abstract class JsonValues {
  static final String MISFIT = "json-misfit";
  private static final int DIGITS = 38;
  private static final int LONG_DIGITS = 18;
  // No decimal of 38 digits has more.
  private static final int MOST_BITS = 127;
  // Further away, every number is too large or too small for any type.
  private static final int MOST_EXPONENT = 100000;
  // Of a time up to its seconds.
  private static final int SECONDS = 19;
  private static final long SECOND = 1000000L, DAY = 86400L * SECOND;
  // The years 1 to 9999, in microseconds since 1970.
  private static final long FIRST = -719162 * DAY, END = 2932897 * DAY;
  private static final long FARTHEST_DAY = 10000000;
  private static final Pattern NUMBER = Pattern.compile("(-?[0-9]{1,1000}(?:\\.[0-9]{1,1000})?)(?:[eE]([+-]?[0-9]{1,1000}))?");
  private static final Pattern DATE = Pattern.compile("([0-9]{4})-([0-9]{2})-([0-9]{2})");
  private static final Pattern TIME = Pattern.compile(
    DATE.pattern() + "[Tt ]([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]{1,30}))?)?([Zz]|[+-][0-9]{2}(?::?[0-9]{2})?)?");
  private static final Pattern UUID = Pattern.compile("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}");

  final String path;

  JsonValues(String path) {
    this.path = path;
  }

  /** @param token the first of the value. */
  abstract Object read(Json in, JsonToken token) throws IOException;

  static JsonValues of(Schema wanted, String path) {
    if (wanted.getType() == Schema.Type.UNION) {
      return new Nullable(of(Reading.nonNull(wanted), path), path);
    }
    switch (wanted.getType()) {
      case ARRAY:
        return new Items(of(wanted.getElementType(), path + "[]"), path);
      case MAP:
        return new Entries(of(wanted.getValueType(), path + "{}"), path);
      case RECORD:
        return new Fields(wanted, path);
      default:
        return new Single(wanted, path);
    }
  }

  Reading.Unreadable misfit(JsonToken token, String wanted) {
    if (token == JsonToken.VALUE_NULL) {
      return new Reading.Unreadable("field-null", this.path + " is null");
    }
    return new Reading.Unreadable(MISFIT, this.path + " is " + said(token) + ", and " + wanted + " is expected");
  }

  private static String said(JsonToken token) {
    switch (token) {
      case START_OBJECT:
        return "an object";
      case START_ARRAY:
        return "an array";
      case VALUE_STRING:
        return "a string";
      case VALUE_TRUE:
      case VALUE_FALSE:
        return "a boolean";
      case VALUE_NULL:
        return "null";
      default:
        return "a number";
    }
  }

  private static final class Nullable extends JsonValues {
    private final JsonValues other;

    Nullable(JsonValues other, String path) {
      super(path);
      this.other = other;
    }

    Object read(Json in, JsonToken token) throws IOException {
      return token == JsonToken.VALUE_NULL ? null : this.other.read(in, token);
    }
  }

  private static final class Items extends JsonValues {
    private final JsonValues item;

    Items(JsonValues item, String path) {
      super(path);
      this.item = item;
    }

    Object read(Json in, JsonToken token) throws IOException {
      if (token != JsonToken.START_ARRAY) {
        throw this.misfit(token, "an array");
      }
      List items = new ArrayList();
      for (JsonToken next = in.needed(); next != JsonToken.END_ARRAY; next = in.needed()) {
        items.add(this.item.read(in, next));
      }
      return new GenericArrayData(items.toArray());
    }
  }

  private static final class Entries extends JsonValues {
    private final JsonValues value;

    Entries(JsonValues value, String path) {
      super(path);
      this.value = value;
    }

    Object read(Json in, JsonToken token) throws IOException {
      if (token != JsonToken.START_OBJECT) {
        throw this.misfit(token, "an object");
      }
      Map entries = new LinkedHashMap();
      for (JsonToken next = in.needed(); next != JsonToken.END_OBJECT; next = in.needed()) {
        UTF8String name = UTF8String.fromString(in.name());
        entries.put(name, this.value.read(in, in.needed()));
      }
      return new ArrayBasedMapData(
        new GenericArrayData(entries.keySet().toArray()), new GenericArrayData(entries.values().toArray()));
    }
  }

  static final class Fields extends JsonValues {
    private final HashMap columns = new HashMap();
    private final JsonValues[] values;
    private final Object[] defaults;

    Fields(Schema wanted, String path) {
      super(path.isEmpty() ? "it" : path);
      String inside = path.isEmpty() ? "" : path + ".";
      int count = wanted.getFields().size();
      this.values = new JsonValues[count];
      this.defaults = new Object[count];
      for (int i = 0; i < count; i++) {
        Schema.Field field = (Schema.Field) wanted.getFields().get(i);
        String name = inside + field.name();
        this.columns.put(field.name(), Integer.valueOf(i));
        this.values[i] = of(field.schema(), name);
        try {
          this.defaults[i] = field.hasDefaultValue() ? new Reading.Resolution().defaultOf(field, name)
            : new Reading.Unreadable("field-missing", name + " is missing, and has no default");
        } catch (Reading.Unreadable e) {
          this.defaults[i] = e;
        }
      }
    }

    Object read(Json in, JsonToken token) throws IOException {
      if (token != JsonToken.START_OBJECT) {
        throw this.misfit(token, "an object");
      }
      in.spend(2 + this.defaults.length);
      Object[] row = (Object[]) this.defaults.clone();
      for (JsonToken next = in.needed(); next != JsonToken.END_OBJECT; next = in.needed()) {
        Integer column = (Integer) this.columns.get(in.name());
        next = in.needed();
        if (column == null) {
          in.skip(next);
        } else {
          row[column.intValue()] = this.values[column.intValue()].read(in, next);
        }
      }
      for (int i = 0; i < row.length; i++) {
        if (row[i] instanceof Reading.Unreadable) {
          throw (Reading.Unreadable) row[i];
        }
      }
      return new GenericInternalRow(row);
    }
  }

  /** A value of a type that is not nested. */
  private static final class Single extends JsonValues {
    private final Schema wanted;
    private final String name;
    // The property `json`: another form than the default of the type; empty if it has none.
    private final String form;
    // How many microseconds one of a time's number is; 0 if it is text.
    private final long micros;
    private final int precision;
    private final int scale;
    private final HashMap symbols = new HashMap();

    Single(Schema wanted, String path) {
      super(path);
      this.wanted = wanted;
      this.name = Reading.nameOf(wanted);
      this.form = wanted.getProp("json") == null ? "" : wanted.getProp("json");
      this.micros = this.form.equals("epoch-millis") ? 1000 : this.form.equals("epoch-micros") ? 1 : 0;
      boolean isDecimal = wanted.getLogicalType() instanceof LogicalTypes.Decimal;
      this.precision = isDecimal ? ((LogicalTypes.Decimal) wanted.getLogicalType()).getPrecision() : 0;
      this.scale = isDecimal ? ((LogicalTypes.Decimal) wanted.getLogicalType()).getScale() : 0;
      if (wanted.getType() == Schema.Type.ENUM) {
        for (Object symbol : wanted.getEnumSymbols()) {
          this.symbols.put(symbol, UTF8String.fromString((String) symbol));
        }
      }
    }

    Object read(Json in, JsonToken token) throws IOException {
      switch (this.wanted.getType()) {
        case BOOLEAN:
          if (token != JsonToken.VALUE_TRUE && token != JsonToken.VALUE_FALSE) {
            throw this.misfit(token, "a boolean");
          }
          return Boolean.valueOf(token == JsonToken.VALUE_TRUE);
        case INT:
          if (this.name.equals("date") && this.form.equals("epoch-days")) {
            long number = this.integer(in, token, 32);
            // A product of all days of 32 bits would not fit into 64.
            this.inRange(Math.max(-FARTHEST_DAY, Math.min(number, FARTHEST_DAY)) * DAY);
            return Integer.valueOf((int) number);
          }
          if (this.name.equals("date")) {
            return Integer.valueOf(this.day(this.text(in, token, "a date such as 2026-02-28")));
          }
          return Integer.valueOf((int) this.integer(in, token, 32));
        case LONG:
          if (this.name.equals("long") || this.name.startsWith("time-")) {
            return Long.valueOf(this.integer(in, token, 64));
          }
          return Long.valueOf(this.micros > 0 ? this.inRange(this.epoch(in, token)) : this.time(in, token));
        case FLOAT:
        case DOUBLE:
          return this.floating(in, token);
        case ENUM:
          Object symbol = this.symbols.get(this.text(in, token, "a symbol"));
          if (symbol == null && this.wanted.getEnumDefault() != null) {
            symbol = this.symbols.get(this.wanted.getEnumDefault());
          }
          if (symbol == null) {
            throw new Reading.Unreadable(MISFIT, this.path + " is none of its symbols");
          }
          return symbol;
        case BYTES:
        case FIXED:
          if (this.precision > 0) {
            return this.decimal(in, token);
          }
          return this.bytes(in, token);
        default:
          return UTF8String.fromString(this.text(in, token, "a string"));
      }
    }

    private String text(Json in, JsonToken token, String wanted) throws IOException {
      if (token != JsonToken.VALUE_STRING) {
        throw this.misfit(token, wanted);
      }
      return in.text();
    }

    private String number(Json in, JsonToken token) throws IOException {
      if (token != JsonToken.VALUE_NUMBER_INT && token != JsonToken.VALUE_NUMBER_FLOAT) {
        throw this.misfit(token, "a number");
      }
      return in.text();
    }

    private long integer(Json in, JsonToken token, int bits) throws IOException {
      String text = this.number(in, token);
      if (token == JsonToken.VALUE_NUMBER_INT && text.length() <= LONG_DIGITS) {
        long number = Long.parseLong(text);
        if (bits == 64 || number == (int) number) {
          return number;
        }
      }
      BigDecimal exact = exactOf(text);
      if (exact.scale() > 0 || exact.precision() - exact.scale() > 19 || exact.toBigInteger().bitLength() >= bits) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no whole number of " + bits + " bits");
      }
      return exact.longValue();
    }

    private Object floating(Json in, JsonToken token) throws IOException {
      double number = Double.parseDouble(this.number(in, token));
      boolean isFloat = this.wanted.getType() == Schema.Type.FLOAT;
      if (Double.isInfinite(number) || isFloat && Float.isInfinite((float) number)) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no number that a " + this.name + " holds");
      }
      return isFloat ? (Object) Float.valueOf((float) number) : (Object) Double.valueOf(number);
    }

    private Object bytes(Json in, JsonToken token) throws IOException {
      if (Reading.isUuid(this.wanted)) {
        String text = this.text(in, token, "a UUID");
        if (!UUID.matcher(text).matches()) {
          throw new Reading.Unreadable(MISFIT, this.path + " is no UUID");
        }
        return UTF8String.fromString(text.toLowerCase(java.util.Locale.ROOT));
      }
      byte[] data = this.ofBase64(this.text(in, token, "base64"));
      if (this.wanted.getType() == Schema.Type.FIXED && data.length != this.wanted.getFixedSize()) {
        throw new Reading.Unreadable(MISFIT, this.path + " has not " + this.wanted.getFixedSize() + " bytes");
      }
      return data;
    }

    private byte[] ofBase64(String text) {
      byte[] data = null;
      try {
        data = Base64.getDecoder().decode(text);
      } catch (IllegalArgumentException e) {
        // As below.
      }
      if (data == null || !Base64.getEncoder().encodeToString(data).equals(text)) {
        throw new Reading.Unreadable(MISFIT, this.path + " is not base64");
      }
      return data;
    }

    private Object decimal(Json in, JsonToken token) throws IOException {
      if (this.form.equals("base64")) {
        return this.unscaled(this.text(in, token, "the base64 of a decimal"));
      }
      boolean isNumber = token == JsonToken.VALUE_NUMBER_INT || token == JsonToken.VALUE_NUMBER_FLOAT;
      boolean isText = token == JsonToken.VALUE_STRING;
      if (this.form.equals("digits") && !isText) {
        throw this.misfit(token, "a string of digits");
      } else if (this.form.equals("numeric") && !isNumber) {
        throw this.misfit(token, "a number");
      } else if (!isNumber && !isText) {
        throw this.misfit(token, "a number, or a string of digits,");
      }
      String text = in.text();
      boolean hasAllDigits = this.form.equals("numeric");
      Decimal small = hasAllDigits ? null : this.small(text);
      if (small != null) {
        return small;
      }
      Matcher found = NUMBER.matcher(text);
      if (!found.matches()) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no number");
      }
      if (hasAllDigits && new BigDecimal(found.group(1)).scale() - exponentOf(found) != this.scale) {
        throw new Reading.Unreadable(
          MISFIT,
          this.path + " has not " + this.scale + " digits after its point, so it may be a double, which loses digits");
      }
      BigDecimal exact = exactOf(text);
      if (exact.signum() == 0) {
        return new Decimal().set(0, DIGITS, this.scale);
      }
      if (exact.scale() > this.scale || exact.precision() - exact.scale() > this.precision - this.scale) {
        throw this.loses();
      }
      return Decimal.apply(exact.setScale(this.scale), DIGITS, this.scale);
    }

    private Decimal unscaled(String text) {
      byte[] data = this.ofBase64(text);
      if (data.length == 0) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no number");
      }
      BigInteger number = new BigInteger(data);
      if (number.bitLength() > MOST_BITS || new BigDecimal(number).precision() > this.precision) {
        throw this.loses();
      }
      return Decimal.apply(new BigDecimal(number, this.scale), DIGITS, this.scale);
    }

    private Reading.Unreadable loses() {
      return new Reading.Unreadable(
        "decimal-loses-digits", this.path + " has more digits than decimal(" + this.precision + "," + this.scale + ")");
    }

    /** Returns a number of few digits; null if it has many, an exponent, or is none. */
    private Decimal small(String text) {
      int length = text.length();
      int start = length > 0 && text.charAt(0) == '-' ? 1 : 0;
      int point = -1;
      long number = 0;
      if (length - start > LONG_DIGITS || length == start) {
        return null;
      }
      for (int i = start; i < length; i++) {
        char one = text.charAt(i);
        if (one >= '0' && one <= '9') {
          number = number * 10 + (one - '0');
        } else if (one == '.' && point < 0 && i > start && i + 1 < length) {
          point = i;
        } else {
          return null;
        }
      }
      int more = this.scale - (point < 0 ? 0 : length - point - 1);
      // Its digits and those that the scale has more.
      if (more < 0 || length - start + more > Math.min(this.precision, LONG_DIGITS)) {
        return null;
      }
      for (; more > 0; more--) {
        number *= 10;
      }
      return new Decimal().set(start == 1 ? -number : number, DIGITS, this.scale);
    }

    private int day(String text) {
      Matcher found = DATE.matcher(text);
      if (!found.matches()) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no date such as 2026-02-28");
      }
      return (int) this.dayOf(found, "date such as 2026-02-28");
    }

    private long dayOf(Matcher found, String wanted) {
      int year = Integer.parseInt(found.group(1));
      try {
        long day = LocalDate.of(year, Integer.parseInt(found.group(2)), Integer.parseInt(found.group(3))).toEpochDay();
        this.inRange(day * DAY);
        return day;
      } catch (DateTimeException e) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no " + wanted);
      }
    }

    private long epoch(Json in, JsonToken token) throws IOException {
      long number = this.integer(in, token, 64);
      return Math.max(FIRST / this.micros - 1, Math.min(END / this.micros, number)) * this.micros;
    }

    private long time(Json in, JsonToken token) throws IOException {
      boolean isLocal = this.name.startsWith("local-");
      String wanted = "time such as 2026-02-28T12:30:00.123" + (isLocal ? "" : "Z");
      String text = this.text(in, token, "a " + wanted);
      if (!isLocal && text.length() > SECONDS && text.charAt(text.length() - 1) == 'Z') {
        long plain = this.plain(text);
        if (plain >= FIRST) {
          return plain;
        }
      }
      Matcher found = TIME.matcher(text);
      if (!found.matches()) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no " + wanted);
      }
      String zone = found.group(8);
      if (isLocal != (zone == null)) {
        throw new Reading.Unreadable(MISFIT, this.path + (isLocal ? " has a zone" : " has no zone"));
      }
      long hour = Long.parseLong(found.group(4)), minute = Long.parseLong(found.group(5));
      long second = found.group(6) == null ? 0 : Long.parseLong(found.group(6));
      long offset = 0;
      boolean isRight = hour < 24 && minute < 60 && second < 60;
      if (zone != null && zone.length() > 1) {
        long hours = Long.parseLong(zone.substring(1, 3));
        long minutes = zone.length() == 3 ? 0 : Long.parseLong(zone.substring(zone.length() - 2));
        isRight = isRight && hours < 24 && minutes < 60;
        offset = (zone.charAt(0) == '-' ? -1 : 1) * (hours * 60 + minutes);
      }
      if (!isRight) {
        throw new Reading.Unreadable(MISFIT, this.path + " is no " + wanted);
      }
      long micros = found.group(7) == null ? 0 : this.micros(found.group(7));
      long seconds = hour * 3600 + (minute - offset) * 60 + second;
      return this.inRange(this.dayOf(found, wanted) * DAY + seconds * SECOND + micros);
    }

    /** Returns a time of the most common form, such as 2026-02-28T12:30:00.123Z; or of any other, a number below FIRST. */
    private long plain(String text) {
      int end = text.length() - 1;
      int most = this.name.endsWith("millis") ? 3 : 6;
      boolean hasMarks = text.charAt(4) == '-' && text.charAt(7) == '-' && text.charAt(10) == 'T' && text.charAt(13) == ':'
        && text.charAt(16) == ':' && (end == SECONDS || text.charAt(SECONDS) == '.' && end > SECONDS + 1);
      int year = digits(text, 0, 4), month = digits(text, 5, 7), day = digits(text, 8, 10);
      int hour = digits(text, 11, 13), minute = digits(text, 14, 16), second = digits(text, 17, 19);
      boolean isRight = year > 0 && month > 0 && month < 13 && day > 0 && day < 29 && hour >= 0 && hour < 24
        && minute >= 0 && minute < 60 && second >= 0 && second < 60;
      int micros = end == SECONDS ? 0 : digits(text, SECONDS + 1, Math.min(end, SECONDS + 1 + most));
      if (!hasMarks || !isRight || micros < 0 || end > SECONDS + 1 + most) {
        return FIRST - 1;
      }
      for (int i = end == SECONDS ? 6 : end - SECONDS - 1; i < 6; i++) {
        micros *= 10;
      }
      return LocalDate.of(year, month, day).toEpochDay() * DAY + (hour * 3600L + minute * 60 + second) * SECOND + micros;
    }

    /** Returns a number of some digits; -1 if it has other characters. */
    private static int digits(String text, int start, int end) {
      int number = 0;
      for (int i = start; i < end; i++) {
        int digit = text.charAt(i) - '0';
        if (digit < 0 || digit > 9) {
          return -1;
        }
        number = number * 10 + digit;
      }
      return number;
    }

    private long micros(String digits) {
      int most = this.name.endsWith("millis") ? 3 : this.name.endsWith("nanos") ? 9 : 6;
      for (int i = most; i < digits.length(); i++) {
        if (digits.charAt(i) != '0') {
          throw new Reading.Unreadable(MISFIT, this.path + " has more digits of a second than its type");
        }
      }
      return Long.parseLong((digits + "000000").substring(0, 6));
    }

    private long inRange(long micros) {
      if (micros < FIRST || micros >= END) {
        throw new Reading.Unreadable("time-out-of-range", this.path + " is not in the years 1 to 9999");
      }
      return micros;
    }

    /** Returns a number without zeros at its end; those that are far too large or too small remain so. */
    private static BigDecimal exactOf(String text) {
      Matcher found = NUMBER.matcher(text);
      if (!found.matches()) {
        throw new Reading.Unreadable(Json.MALFORMED, "it is not JSON: " + text);
      }
      BigDecimal digits = new BigDecimal(found.group(1));
      if (digits.signum() == 0) {
        return BigDecimal.ZERO;
      }
      return digits.scaleByPowerOfTen(exponentOf(found)).stripTrailingZeros();
    }

    private static int exponentOf(Matcher found) {
      String text = found.group(2);
      if (text == null) {
        return 0;
      }
      BigInteger most = BigInteger.valueOf(MOST_EXPONENT);
      return new BigInteger(text.charAt(0) == '+' ? text.substring(1) : text).min(most).max(most.negate()).intValue();
    }
  }
}
