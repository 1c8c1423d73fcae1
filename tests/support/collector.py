"""A collector of traces: takes what is sent to it by OTLP over HTTP, and keeps it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

_KINDS = {2: "server", 3: "client", 4: "producer", 5: "consumer"}


@dataclass(frozen=True)
class Collected:
    """A span as it was sent; ids in hexadecimal."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    links: Sequence[tuple[str, str]]
    attributes: Mapping[str, str | int]
    failed: bool
    remarks: str
    """The message of its status, and its events: where exceptions would be quoted."""


class Collector:
    """Listens while it is entered."""

    def __init__(self) -> None:
        collected = self.spans = list[Collected]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                collected.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (as the base class has it)
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def trace(self, trace_id: str) -> list[Collected]:
        """The spans of one trace that have come so far."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]


def _spans(request: ExportTraceServiceRequest) -> list[Collected]:
    return [
        _collected(str(_plain(resource.resource.attributes)["service.instance.id"]), span)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _collected(service: str, span: Span) -> Collected:
    return Collected(
        service,
        span.name,
        _KINDS.get(span.kind, "internal"),
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        _plain(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.status.message + "".join(str(event) for event in span.events),
    )


def _plain(attributes: Sequence[KeyValue]) -> dict[str, str | int]:
    return {
        pair.key: pair.value.int_value if pair.value.HasField("int_value") else pair.value.string_value
        for pair in attributes
    }
