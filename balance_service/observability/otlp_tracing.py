"""OpenTelemetry's SDK, which sends spans by OTLP over HTTP; the one module that imports it, only if traces are wanted.

All but the address is configured by OpenTelemetry's own `OTEL_*` variables, which its SDK reads: sampler, headers,
certificates, batches, resource. A thread of the SDK sends; a collector that does not answer costs spans, nothing else.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from balance_service.process.package import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Tracer


def otlp_tracer(endpoint: str, application_id: str, application_server: str) -> tuple[Tracer, Callable[[float], None]]:
    """A tracer whose spans go to a collector, and what stops it, as `start_tracing` returns them.

    Its provider is not registered globally, so a process can have several.

    Args:
        endpoint: of the collector; OTLP's path for traces is appended.

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
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")))

    def stop(timeout_seconds: float) -> None:
        # The SDK's own bound is longer than a stop may take.
        stopping = threading.Thread(target=provider.shutdown, name="tracing-stop", daemon=True)
        stopping.start()
        stopping.join(timeout_seconds)

    return provider.get_tracer("balance_service", __version__), stop
