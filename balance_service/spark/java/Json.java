package parts.code.balance;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonFactoryBuilder;
import com.fasterxml.jackson.core.JsonParseException;
import com.fasterxml.jackson.core.JsonParser;
import com.fasterxml.jackson.core.JsonStreamContext;
import com.fasterxml.jackson.core.JsonToken;
import com.fasterxml.jackson.core.StreamReadConstraints;
import com.fasterxml.jackson.core.StreamReadFeature;
import com.fasterxml.jackson.core.exc.StreamConstraintsException;
import java.io.IOException;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * Reads the tokens of one JSON document from its start to its end, for one thread.
 *
 * A document is refused as a whole if it is not JSON, not UTF-8, too long or nested too deeply, or if it has a name twice
 * in one object, half of a surrogate pair, or a number of too many characters; `formats/json_document.py` refuses the same.
 */
final class Json {
  static final String MALFORMED = "json-malformed";
  private static final int MOST_BYTES = 16 << 20;
  private static final int MOST_LEVELS = 64;
  private static final int MOST_CHARACTERS = 1000;
  private static final long VALUES = 250000, VALUES_PER_BYTE = 4;
  private static final String HALF = " has half of a surrogate pair";
  private static final JsonFactory FACTORY = factory();

  private final JsonParser parser;
  private final int start;
  // Whether a text may have half of a surrogate pair: UTF-8 cannot, but an escape can.
  private final boolean hasSurrogates;
  private long values;

  Json(byte[] data) throws IOException {
    // Confluent's serializers put the id of a schema before the document.
    int start = data.length > 5 && data[0] == 0 ? 5 : 0;
    if (data.length - start > MOST_BYTES) {
      throw new Reading.Unreadable(MALFORMED, "it has more than 16 MiB");
    }
    boolean isAscii = true;
    boolean hasSurrogates = false;
    for (int i = start; i < data.length; i++) {
      isAscii = isAscii && data[i] >= 0;
      hasSurrogates = hasSurrogates || data[i] == 'u' && i > start && data[i - 1] == '\\' && i + 1 < data.length && (data[i + 1] | 32) == 'd';
    }
    if (!isAscii && !UTF8String.fromBytes(data, start, data.length - start).isValid()) {
      throw new Reading.Unreadable(MALFORMED, "it is not UTF-8");
    }
    this.hasSurrogates = hasSurrogates;
    this.values = VALUES + VALUES_PER_BYTE * (data.length - start);
    this.start = start;
    this.parser = FACTORY.createParser(data, start, data.length - start);
  }

  private static JsonFactory factory() {
    StreamReadConstraints limits = StreamReadConstraints.builder().maxNestingDepth(MOST_LEVELS)
      .maxStringLength(MOST_BYTES).maxNameLength(MOST_BYTES).maxNumberLength(MOST_BYTES).build();
    JsonFactoryBuilder builder = new JsonFactoryBuilder();
    builder.streamReadConstraints(limits);
    builder.enable(StreamReadFeature.STRICT_DUPLICATE_DETECTION);
    // It would read other encodings than UTF-8.
    builder.disable(JsonFactory.Feature.CHARSET_DETECTION);
    // Names of untrusted producers must neither remain in memory nor fail because their hashes are alike.
    builder.disable(JsonFactory.Feature.INTERN_FIELD_NAMES);
    builder.disable(JsonFactory.Feature.FAIL_ON_SYMBOL_HASH_OVERFLOW);
    return builder.build();
  }

  /** Spends some of the budget of values, as `Body` does. */
  void spend(long count) {
    this.values -= count;
    if (this.values < 0) {
      throw new Reading.Unreadable(
        "values-too-many",
        "it holds more than " + VALUES + " values and " + VALUES_PER_BYTE + " more for each of its bytes");
    }
  }

  /** Returns the next token; null after the end of the document. */
  JsonToken next() throws IOException {
    try {
      JsonToken token = this.parser.nextToken();
      if (token == null) {
        return null;
      }
      switch (token) {
        case VALUE_NUMBER_INT:
        case VALUE_NUMBER_FLOAT:
          if (this.parser.getTextLength() > MOST_CHARACTERS) {
            throw new Reading.Unreadable(MALFORMED, this.path() + " is a number of more than 1,000 characters");
          }
          break;
        case FIELD_NAME:
        case VALUE_STRING:
          if (this.hasSurrogates) {
            this.checkSurrogates(this.parser.getText(), token == JsonToken.FIELD_NAME);
          } else if (token == JsonToken.VALUE_STRING) {
            // Otherwise it would be passed over with fewer checks.
            this.parser.getTextLength();
          }
          break;
        default:
      }
      return token;
    } catch (StreamConstraintsException e) {
      throw new Reading.Unreadable(MALFORMED, "its values are nested more than " + MOST_LEVELS + " levels deep");
    } catch (JsonParseException e) {
      String why = e.getOriginalMessage();
      throw new Reading.Unreadable(
        MALFORMED, why.startsWith("Duplicate") ? this.path() + " is there twice"
          : why.contains("surrogate") ? "a name" + HALF : "it is not JSON: " + why);
    }
  }

  private void checkSurrogates(String text, boolean isName) {
    for (int i = 0; i < text.length(); i++) {
      char one = text.charAt(i);
      if (Character.isHighSurrogate(one) && i + 1 < text.length() && Character.isLowSurrogate(text.charAt(i + 1))) {
        i++;
      } else if (Character.isSurrogate(one)) {
        throw new Reading.Unreadable(MALFORMED, (isName ? "a name" : this.path()) + HALF);
      }
    }
  }

  String name() throws IOException {
    return this.parser.currentName();
  }

  String text() throws IOException {
    return this.parser.getText();
  }

  /** Returns where the token begins, in the data. */
  int tokenStart() {
    return this.start + (int) this.parser.currentTokenLocation().getByteOffset();
  }

  /** Returns where the token ends, in the data. */
  int tokenEnd() {
    return this.start + (int) this.parser.currentLocation().getByteOffset();
  }

  /** Passes over the value that begins with a token. */
  void skip(JsonToken token) throws IOException {
    int level = 0;
    while (true) {
      if (token.isStructStart()) {
        level++;
      } else if (token.isStructEnd()) {
        level--;
      }
      if (level == 0) {
        return;
      }
      token = this.needed();
    }
  }

  /** Returns the next token of a value that has begun. */
  JsonToken needed() throws IOException {
    JsonToken token = this.next();
    if (token == null) {
      throw new Reading.Unreadable(MALFORMED, "it is not JSON: it ends within a value");
    }
    return token;
  }

  /** Reads the rest of the document, and checks it. */
  void finish() throws IOException {
    boolean hasEnded = this.parser.getParsingContext().inRoot();
    while (this.next() != null) {
      if (hasEnded) {
        throw new Reading.Unreadable(MALFORMED, "it is not JSON: more follows the document");
      }
      hasEnded = this.parser.getParsingContext().inRoot();
    }
  }

  /** Returns where the parser is, such as `items[].price`. */
  String path() {
    StringBuilder path = new StringBuilder();
    for (JsonStreamContext at = this.parser.getParsingContext(); at != null; at = at.getParent()) {
      if (at.inArray()) {
        path.insert(0, "[]");
      } else if (at.inObject() && at.getCurrentName() != null) {
        path.insert(0, "." + at.getCurrentName());
      }
    }
    return path.length() == 0 ? "it" : path.charAt(0) == '.' ? path.substring(1) : path.toString();
  }
}
