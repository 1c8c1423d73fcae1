"""Structured logs: one JSON line per event, on stderr. The last warnings and errors are kept for operators."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, TextIO

import structlog

from balance_service.process.runtime import without_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

_REPEAT_SECONDS = 10.0
# If the disk is full or file descriptors run out, every task fails repeatedly, each with a traceback.
_MOST_WARNINGS, _WARNINGS_SECONDS = 100, 60.0
_MOST_KINDS = 1_000
_MOST_KEPT, _MOST_KEPT_CHARACTERS = 50, 2_000
_LEFT_OUT = re.compile(', "left_out": [0-9]+')


class KeptLine(NamedTuple):
    """A line of the log. It may quote events, and be cut.

    `times` is how often it was logged, counting lines that differ in numbers only; `at` and `line` are of the last.
    """

    at: datetime
    level: str
    line: str
    times: int
    kind: tuple[str, str]
    """Logger and event; a library's lines have no event."""


# By what they say, the one that was logged last at the end. Handlers write one line at a time.
_kept: dict[str, KeptLine] = {}


def last_warnings() -> list[KeptLine]:
    """Returns the last warnings and errors that this process has logged, the newest first; at most 50."""
    return [*reversed(_kept.copy().values())]


def _keep(record: logging.LogRecord, line: str) -> None:
    fields = record.msg if isinstance(record.msg, dict) else {}
    says = without_numbers(_LEFT_OUT.sub("", line))
    before = _kept.pop(says, None)
    _kept[says] = KeptLine(
        datetime.fromtimestamp(record.created, UTC),
        record.levelname.lower(),
        line[:_MOST_KEPT_CHARACTERS],
        1 + (0 if before is None else before.times),
        (record.name, str(fields.get("event", ""))),
    )
    if len(_kept) > _MOST_KEPT:
        ((most, _),) = Counter(kept.kind for kept in _kept.values()).most_common(1)
        del _kept[next(says for says, kept in _kept.items() if kept.kind == most)]


def configure_logging(level: str) -> None:
    """Log events of the service, and of libraries that use the standard logging, to stderr as JSON."""
    _kept.clear()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = _KeepingHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(BoundedWarnings(_MOST_WARNINGS, _WARNINGS_SECONDS))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "httpx2", "httpcore", "aiohttp.access", "librdkafka", "opentelemetry.trace"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    # Each client logs every attempt to connect.
    for insistent in ("librdkafka", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        logging.getLogger(insistent).addFilter(_OncePerInterval(_REPEAT_SECONDS))
    # It logs a traceback when a query is stopped during a batch; the service logs failures itself.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # It logs a traceback for bytes that are not HTTP, which any client can send; the service logs failures itself.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.add_logger_name,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def quiet_logging() -> None:
    """Configure logging of a command, whose error message would be hidden among attempts to connect."""
    configure_logging("WARNING")
    logging.getLogger("librdkafka").setLevel(logging.CRITICAL)


class _KeepingHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a stream, and keeps those of warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        if record.levelno >= logging.WARNING:
            _keep(record, line)
        return line


class BoundedWarnings(logging.Filter):
    """Limits the warnings and errors of each event in an interval.

    The first record of the next interval has the number of suppressed records as `left_out`.
    """

    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._counted: dict[tuple[str, str], tuple[float, int]] = {}
        """Logger and event → start of the interval, and number of records in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        event = record.msg.get("event") if isinstance(record.msg, dict) else record.msg
        kind, now = (record.name, str(event)), self._clock()
        with self._lock:
            if len(self._counted) > _MOST_KINDS:
                self._counted.clear()
            began, count = self._counted.get(kind, (now, 0))
            left_out = max(0, count - self._most)
            if now - began >= self._seconds:
                began, count = now, 0
            self._counted[kind] = began, count + 1
        if count == 0 and left_out and isinstance(record.msg, dict):
            record.msg["left_out"] = left_out
        return count < self._most


class _OncePerInterval(logging.Filter):
    """Passes one message per interval of each kind; the first word of a message is its kind."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._passed: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = record.getMessage().partition(" ")[0], time.monotonic()
        if now - self._passed.get(kind, float("-inf")) < self._seconds:
            return False
        self._passed[kind] = now
        return True
