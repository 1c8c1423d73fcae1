"""Structured logs: one JSON line an event, on stderr."""

from __future__ import annotations

import logging
import sys
import time

import structlog

_REPEAT_SECONDS = 10.0


def configure_logging(level: str) -> None:
    """Send our events, and those of the libraries that use the standard library's logging, to stderr as JSON."""
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
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "httpx2", "httpcore", "aiohttp.access", "librdkafka", "opentelemetry.trace"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    # Each client repeats itself at each attempt to connect.
    for insistent in ("librdkafka", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        logging.getLogger(insistent).addFilter(_OncePerInterval(_REPEAT_SECONDS))
    # It logs with a traceback that a query was stopped in the middle of a batch; what matters of that we log.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    # It logs with a traceback what any client can send: bytes that are no HTTP. Our own failures we log ourselves.
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
        cache_logger_on_first_use=True,
    )


def quiet_logging() -> None:
    """For a command that says itself, in one sentence, what went wrong: each attempt to connect would bury that."""
    configure_logging("WARNING")
    logging.getLogger("librdkafka").setLevel(logging.CRITICAL)


class _OncePerInterval(logging.Filter):
    """Lets a kind of message, told by its first word, pass once an interval."""

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
