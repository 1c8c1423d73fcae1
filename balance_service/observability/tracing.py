"""Spans by OpenTelemetry's API: which tracer there is, how a span is opened, how other processes learn of it.

Off unless `BALANCE_TRACING_ENDPOINT` is set. While off, the tracer is the API's no-op, the SDK is not imported, and
nothing is added to a request, a record or Spark's plan. Any thread or event loop may open a span.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import Link, NoOpTracer, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, Tracer

    from balance_service.settings import Settings

UNTRACED: Tracer = NoOpTracer()
"""The tracer while tracing is off. A no-op span costs some microseconds, so hot paths open none with this one."""

TRACEPARENT_HEADER = "traceparent"
"""Header of a request, and of a record in Kafka, that names the span it comes from. Source: W3C Trace Context."""

W3C = TraceContextTextMapPropagator()
"""Reads that header, and writes it for the current span."""


def start_tracing(settings: Settings) -> tuple[Tracer, Callable[[float], None]]:
    """The tracer that the settings ask for, and what stops it: sends the spans left, for at most so many seconds.

    Raises:
        ConfigurationError: traces are wanted, and the SDK is not installed or refuses one of its own variables.
    """
    if settings.tracing_endpoint is None:
        return UNTRACED, lambda _timeout_seconds: None
    try:
        from balance_service.observability.otlp_tracing import otlp_tracer
    except ImportError as error:
        raise ConfigurationError(
            "BALANCE_TRACING_ENDPOINT asks for traces, and OpenTelemetry's SDK is not installed; "
            "run pip install 'balance-service[tracing]', or unset it"
        ) from error
    try:
        return otlp_tracer(settings.tracing_endpoint, settings.application_id, settings.application_server)
    except ValueError as error:
        raise ConfigurationError(f"OpenTelemetry refuses one of its OTEL_* variables: {error}") from error


@contextmanager
def open_span(
    tracer: Tracer,
    name: str,
    kind: SpanKind,
    attributes: Mapping[str, str | int],
    *,
    parent: Context | None = None,
    links: Sequence[Link] = (),
) -> Iterator[Span]:
    """The current span while the context is open; an exception that leaves it fails the span.

    Args:
        attributes: named as OpenTelemetry names them where it does; never a key or an amount.
        parent: the context that the span continues; without it, the current one.
    """
    # OpenTelemetry would record messages and tracebacks, which may quote a request.
    with tracer.start_as_current_span(
        name, parent, kind, attributes, links, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            fail(span, type(error).__name__)
            raise


def fail(span: Span, error_type: str) -> None:
    """Mark a span as failed, by a kind of error, not a message."""
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


def links_to(traceparents: Sequence[str]) -> list[Link]:
    """Links to the spans that these headers name; a header that names none is left out."""
    contexts = (W3C.extract({TRACEPARENT_HEADER: traceparent}) for traceparent in traceparents)
    spans = (get_current_span(context).get_span_context() for context in contexts)
    return [Link(span) for span in spans if span.is_valid]
