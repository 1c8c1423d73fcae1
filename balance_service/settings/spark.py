"""Spark's own settings: what the service sets in each session, and what `spark-defaults.conf` may add.

Settings that can change a value are set here, so that all instances, redrives and tests compute the same states from
the same events. The file may have anything else: memory, logging, the user interface, Hadoop.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

VALUE_SETTINGS: Mapping[str, str] = {
    # An overflow, a division by zero or a cast that fails is an error, not null.
    "spark.sql.ansi.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # The others have Spark's defaults. Expressions and their text:
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.caseSensitive": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.legacy.consecutiveStringLiterals.enabled": "false",
    "spark.sql.legacy.exponentLiteralAsDecimal.enabled": "false",
    "spark.sql.legacy.literal.pickMinimumPrecision": "true",
    # Types.
    "spark.sql.decimalOperations.allowPrecisionLoss": "true",
    "spark.sql.preserveCharVarcharTypeInfo": "false",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.legacy.allowNegativeScaleOfDecimal": "false",
    "spark.sql.legacy.charVarcharAsString": "false",
    "spark.sql.legacy.createEmptyCollectionUsingStringType": "false",
    "spark.sql.legacy.decimal.retainFractionDigitsOnTruncate": "false",
    "spark.sql.legacy.interval.enabled": "false",
    # Functions of text and times.
    "spark.sql.chunkBase64String.enabled": "true",
    "spark.sql.function.concatBinaryAsString": "false",
    "spark.sql.function.eltOutputAsString": "false",
    "spark.sql.icu.caseMappings.enabled": "true",
    "spark.sql.legacy.castComplexTypesToString.enabled": "false",
    "spark.sql.legacy.codingErrorAction": "false",
    "spark.sql.legacy.collationAwareHashFunctions": "false",
    "spark.sql.legacy.fromDayTimeString.enabled": "false",
    "spark.sql.legacy.javaCharsets": "false",
    "spark.sql.legacy.lpadRpadAlwaysReturnString": "false",
    "spark.sql.legacy.timeParserPolicy": "CORRECTED",
    "spark.sql.legacy.truncateForEmptyRegexSplit": "false",
    # Functions of arrays and maps.
    "spark.sql.mapKeyDedupPolicy": "EXCEPTION",
    "spark.sql.legacy.allowNullComparisonResultInArraySort": "false",
    "spark.sql.legacy.disableMapKeyNormalization": "false",
    "spark.sql.legacy.followThreeValuedLogicInArrayExists": "true",
    "spark.sql.legacy.negativeIndexInArrayInsert": "false",
    "spark.sql.legacy.sizeOfNull": "true",
    # Functions of JSON, CSV and XML.
    "spark.sql.columnNameOfCorruptRecord": "_corrupt_record",
    "spark.sql.json.enableExactStringParsing": "true",
    "spark.sql.json.enablePartialResults": "true",
    "spark.sql.jsonGenerator.ignoreNullFields": "true",
    "spark.sql.variant.allowDuplicateKeys": "false",
    "spark.sql.legacy.json.allowEmptyString.enabled": "false",
}
"""Each setting of Spark SQL that can change a value. Generations of a model with a `transform` keep a record of them.

One that a later release adds must have the value that Spark had by default.
"""
OWN_SETTINGS: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Its ports require a secret, which Spark makes for each session and keeps in memory.
    "spark.authenticate": "true",
    # By default as many threads as slots.
    "spark.rpc.netty.dispatcher.numThreads": "2",
    "spark.ui.showConsoleProgress": "false",
    # Pages of other sites can make a browser send requests to loopback.
    "spark.ui.killEnabled": "false",
    # By default as many as slots, for the few records that are read again.
    "spark.sql.leafNodeDefaultParallelism": "1",
    # The first would decode records in a thread of the driver, which cannot be cancelled as a job can. The second would
    # take the conditions of a transform out of what guards them.
    "spark.sql.optimizer.excludedRules": (
        "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation,"
        "org.apache.spark.sql.catalyst.optimizer.PushFoldableIntoBranches"
    ),
    # No plan of this service shuffles, so there is nothing to adapt.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "1",
    # By default, the stop of a query waits for a thread that hangs, without a limit.
    "spark.sql.streaming.stopTimeout": "10s",
    # A consumer belongs to one query; afterwards, a cached one would hold its connections and what it has fetched.
    "spark.kafka.consumer.cache.timeout": "1s",
    "spark.kafka.consumer.cache.evictorThreadRunInterval": "1s",
    # Spark's checkpoint is not used, but is written: Hadoop's local file system sets permissions by a chmod process
    # for each file, and only Spark's older checkpoint file manager allows another file system.
    "spark.hadoop.fs.permissions.umask-mode": "077",
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
"""What the service depends on otherwise."""
PREFERRED_SETTINGS: Mapping[str, str] = {"spark.log.level": "ERROR"}
"""Defaults that the file may change."""
SETTINGS_WITHOUT_UI: Mapping[str, str] = {
    # Without updates of tasks that are running, which only the user interface shows.
    "spark.ui.liveUpdate.period": "-1",
    # The default keeps a thousand queries.
    "spark.ui.retainedJobs": "10",
    "spark.ui.retainedStages": "10",
    "spark.sql.ui.retainedExecutions": "10",
}
"""Further ones, while the user interface is disabled."""

JAVA_OPTIONS = "JAVA_TOOL_OPTIONS or JDK_JAVA_OPTIONS"
"""Where settings of Spark can be, other than in the file: as system properties of the JVM."""

_FILE = "spark-defaults.conf"
# Where Spark looks for it, first to last, by a variable and a folder below.
_FOLDERS = (("SPARK_CONF_DIR", "."), ("SPARK_HOME", "conf"))
# Made at each start from the service's own settings, or read by Spark's launcher alone, which does not run.
_INSTEAD = {
    "spark.app.name": "set BALANCE_APPLICATION_ID instead",
    "spark.driver.extraClassPath": "set BALANCE_SPARK_JARS instead",
    "spark.driver.extraJavaOptions": "set JAVA_TOOL_OPTIONS instead",
    "spark.driver.memory": "set BALANCE_SPARK_DRIVER_MEMORY instead",
    "spark.jars.packages": "set BALANCE_SPARK_JARS instead",
    "spark.local.dir": "set BALANCE_STATE_DIR instead",
    "spark.master": "each instance runs a Spark of its own, in its JVM",
    "spark.ui.enabled": "set BALANCE_SPARK_UI instead",
}
_SQL = "spark.sql."
_HARMLESS_SQL = ("spark.sql.ui.", "spark.sql.streaming.ui.", "spark.sql.redaction.")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ENTRY = re.compile(r"((?:[^\\=: \t\f]|\\.)*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)


def spark_defaults() -> dict[str, str]:
    """Returns the settings of `spark-defaults.conf` in SPARK_CONF_DIR, else in `conf` of SPARK_HOME, as Spark does.

    Raises:
        ConfigurationError: the file cannot be read, or has a setting that only the service sets.
    """
    variable, folder = next(
        ((name, Path(given, below)) for name, below in _FOLDERS if (given := os.environ.get(name))), ("", None)
    )
    if folder is None or not (file := folder / _FILE).is_file():
        return {}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"{file} ({variable}) cannot be read: {reason}; correct it") from error
    # Others are passed over, as by Spark.
    found = {name: value.strip() for name, value in _entries(text) if name.startswith("spark.")}
    refuse_settings(found, f"{file} ({variable})", f", or name a folder without {_FILE} in SPARK_CONF_DIR")
    return found


def refuse_settings(names: Iterable[str], place: str, otherwise: str = "") -> None:
    """Refuses the settings of Spark that only the service sets.

    Args:
        place: where they were found.
        otherwise: an alternative to their removal, for the message.

    Raises:
        ConfigurationError: it names each of them.
    """
    wrong = [f"{name} {why}" for name in sorted(names) if (why := _why_not(name))]
    if wrong:
        it = "it" if len(wrong) == 1 else "them"
        raise ConfigurationError(f"{place}: {'; '.join(wrong)}: remove {it}{otherwise}")


def _why_not(name: str) -> str:
    """Returns why a setting is refused; empty if it is not."""
    if name in _INSTEAD:
        return f"has no effect ({_INSTEAD[name]})"
    if name in VALUE_SETTINGS or name in OWN_SETTINGS:
        return "is set by the service"
    if name.startswith(_SQL) and not name.startswith(_HARMLESS_SQL):
        return (
            f"could change values (of {_SQL}*, only {', '.join(f'{harmless}*' for harmless in _HARMLESS_SQL)} can not)"
        )
    return ""


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Reads lines as `java.util.Properties` does."""
    lines = iter(re.split(r"\r\n|\r|\n", text))
    for line in lines:
        entry = line.lstrip(" \t\f")
        if entry[:1] in ("", "#", "!"):
            continue
        # An odd number of backslashes at the end: the next line belongs to the entry.
        while (len(entry) - len(entry.rstrip("\\"))) % 2:
            entry = entry[:-1] + next(lines, "").lstrip(" \t\f")
        match = _ENTRY.fullmatch(entry)
        if match is not None:
            name, value = (_ESCAPE.sub(_unescaped, part) for part in match.groups())
            yield name, value


def _unescaped(escape: re.Match[str]) -> str:
    code, character = escape.groups()
    return chr(int(code, 16)) if code else _ESCAPED.get(character, character)
