"""Spans by OpenTelemetry, sent by OTLP over HTTP.

All but the address is configured by OpenTelemetry's own `OTEL_*` variables, which its SDK reads: sampler, headers,
certificates, batches, resource. A thread of the SDK sends; a collector that does not answer costs spans, nothing else.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from balance_service import __version__
from balance_service.tracing import TRACEPARENT_HEADER, SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_W3C = TraceContextTextMapPropagator()
_KINDS = {kind: trace.SpanKind[kind.value] for kind in SpanKind}


class OtlpTracing:
    """Spans that go to a collector. Owns the provider; nothing global, so that a process can have many."""

    is_on = True

    def __init__(self, endpoint: str, application_id: str, application_server: str) -> None:
        """Args:
        endpoint: of a collector; OTLP's path for traces is appended.

        Raises:
            ValueError: one of OpenTelemetry's own variables is wrong.
        """
        ours = {
            "service.name": application_id,
            "service.instance.id": application_server,
            "service.version": __version__,
        }
        # What an operator says of the resource counts more than what we do.
        resource = Resource.create().merge(Resource(ours)).merge(OTELResourceDetector().detect())
        # Not at exit, which would wait for a collector that does not answer.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("balance_service", __version__)

    @contextmanager
    def span(
        self,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, str | int],
        came_with: Mapping[str, str] | None = None,
        links: Sequence[str] = (),
    ) -> Iterator[OtlpSpan]:
        """See `Tracing.span`."""
        with self._tracer.start_as_current_span(
            name,
            # None would stand for the context that is open here.
            None if came_with is None else _W3C.extract(came_with),
            _KINDS[kind],
            attributes,
            [trace.Link(context) for link in links if (context := _named(link)).is_valid],
            # Messages and tracebacks may tell what is in a request.
            record_exception=False,
            set_status_on_exception=False,
        ) as current:
            span = OtlpSpan(current)
            try:
                yield span
            except BaseException as error:
                span.fail(type(error).__name__)
                raise

    def stop(self, timeout_seconds: float) -> None:
        """See `Tracing.stop`."""
        stopping = threading.Thread(target=self._provider.shutdown, name="tracing-stop", daemon=True)
        stopping.start()
        stopping.join(timeout_seconds)


class OtlpSpan:
    """A span of OpenTelemetry; the current one of its thread or task while it is open."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def context(self) -> Mapping[str, str]:
        """See `Span.context`."""
        headers: dict[str, str] = {}
        _W3C.inject(headers, trace.set_span_in_context(self._span))
        return headers

    def tell(self, name: str, value: str | int) -> None:
        """See `Span.tell`."""
        self._span.set_attribute(name, value)

    def fail(self, why: str) -> None:
        """See `Span.fail`."""
        self._span.set_attribute("error.type", why)
        self._span.set_status(trace.StatusCode.ERROR)


def _named(traceparent: str) -> trace.SpanContext:
    return trace.get_current_span(_W3C.extract({TRACEPARENT_HEADER: traceparent})).get_span_context()
