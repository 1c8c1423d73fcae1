"""Tracing by OpenTelemetry: the tracer, spans, and their propagation to other processes.

Tracing is off unless `BALANCE_TRACING_ENDPOINT` is set. While it is off, the tracer is the API's no-op, the SDK is not
imported, and requests, records and Spark's plan are unchanged. Any thread or event loop can open a span.

Spans are exported by OTLP over HTTP. The SDK reads all other options from OpenTelemetry's own `OTEL_*` variables:
sampler, headers, certificates, batches, resource. One of its threads exports spans; if the collector does not answer,
spans are lost, and the service is not affected.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import Link, NoOpTracer, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from balance_service.errors import ConfigurationError
from balance_service.kafka.messages import TRACEPARENT_HEADER
from balance_service.process.package import __version__, with_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanKind, Tracer

    from balance_service.settings import Settings

UNTRACED: Tracer = NoOpTracer()
"""The tracer while tracing is off. A no-op span takes some microseconds, so hot paths do not open spans with it."""

W3C = TraceContextTextMapPropagator()
"""Reads the header `traceparent`, and writes it for the current span."""


def start_tracing(settings: Settings) -> tuple[Tracer, Callable[[float], None]]:
    """The tracer of these settings, and a function that exports the remaining spans within a timeout and stops.

    The tracer's provider is not registered globally, so a process can have several.

    Raises:
        ConfigurationError: the SDK is not installed, or rejects one of its own variables.
    """
    if settings.tracing_endpoint is None:
        return UNTRACED, lambda _timeout_seconds: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            "BALANCE_TRACING_ENDPOINT is set, but OpenTelemetry's SDK is not installed; "
            f"install {with_extra('tracing')}, or unset it"
        ) from error
    ours = {
        "service.name": settings.application_id,
        "service.instance.id": settings.application_server,
        "service.version": __version__,
    }
    endpoint = f"{settings.tracing_endpoint.rstrip('/')}/v1/traces"
    try:
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override our attributes.
        resource = Resource.create().merge(Resource(ours)).merge(OTELResourceDetector().detect())
        # The provider's own shutdown at exit would wait for a collector that does not answer.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    except ValueError as error:
        raise ConfigurationError(f"OpenTelemetry rejects one of its OTEL_* variables: {error}") from error

    def stop(timeout_seconds: float) -> None:
        # The timeout of the SDK exceeds the time that an instance has to stop.
        stopping = threading.Thread(target=provider.shutdown, name="tracing-stop", daemon=True)
        stopping.start()
        stopping.join(timeout_seconds)

    return provider.get_tracer("balance_service", __version__), stop


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
    """Open a span as the current span; an exception that leaves the context fails it.

    Args:
        attributes: with OpenTelemetry's names, if it defines them; never keys or amounts.
        parent: the context of the parent span; None for the current context.
    """
    # Messages and tracebacks can contain data of a request, so OpenTelemetry must not record them.
    with tracer.start_as_current_span(
        name, parent, kind, attributes, links, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            fail(span, type(error).__name__)
            raise


def fail(span: Span, error_type: str) -> None:
    """Mark a span as failed, with the type of the error only."""
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


def links_to(traceparents: Sequence[str]) -> list[Link]:
    """Links to the spans that these headers name; invalid headers are skipped."""
    contexts = (W3C.extract({TRACEPARENT_HEADER: traceparent}) for traceparent in traceparents)
    spans = (get_current_span(context).get_span_context() for context in contexts)
    return [Link(span) for span in spans if span.is_valid]
