"""Tracing: off by default; spans, their parents and links, sent to a real receiver."""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from opentelemetry.trace import SpanKind

from balance_service.engine.batch import PartitionUpdates, TaskBatch
from balance_service.engine.commit import Committed
from balance_service.engine.records import TaskId
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.http.answer import PROBLEM_JSON
from balance_service.http.app import traced
from balance_service.http.peers.proxy import Proxy
from balance_service.http.peers.trust import Peer
from balance_service.kafka.messages import TRACEPARENT_HEADER
from balance_service.observability.tracing import (
    UNTRACED,
    W3C,
    links_to,
    open_span,
    start_tracing,
)
from balance_service.settings import load_settings
from balance_service.spark.combine import PartitionRows
from balance_service.spark.task_runner import commit_traced
from tests.support.api import GET_BALANCE as PATH
from tests.support.observability import Collector
from tests.support.shipped import ROUTES
from tests.unit.spark.decoded import row, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_OTHER = f"00-{_TRACE[::-1]}-{_SPAN[::-1]}-01"
_STOP_SECONDS = 30.0


def start(endpoint: str) -> tuple[Tracer, Callable[[float], None]]:
    return start_tracing(
        load_settings(tracing_endpoint=endpoint, application_id="balances", application_server="here:1")
    )


class Tracing(NamedTuple):
    tracer: Tracer
    stop: Callable[[float], None]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


@pytest.fixture
def tracing(collector: Collector) -> Iterator[Tracing]:
    tracing = Tracing(*start(collector.endpoint))
    yield tracing
    tracing.stop(_STOP_SECONDS)


@pytest.fixture
def no_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = ("opentelemetry.sdk", "opentelemetry.exporter")
    for name in {*packages, *(name for name in sys.modules if name.startswith(packages))}:
        monkeypatch.setitem(sys.modules, name, None)


def caller(flags: str = "01") -> Context:
    return W3C.extract({TRACEPARENT_HEADER: f"00-{_TRACE}-{_SPAN}-{flags}"})


def handed_on() -> dict[str, str]:
    headers: dict[str, str] = {}
    W3C.inject(headers)
    return headers


@pytest.mark.usefixtures("no_sdk")
def test_tracing_is_off_by_default_and_needs_no_sdk() -> None:
    tracer, stop = start_tracing(load_settings())

    assert tracer is UNTRACED
    with open_span(tracer, "s", SpanKind.SERVER, {}) as span:
        assert not span.is_recording()
        assert handed_on() == {}
    stop(_STOP_SECONDS)


@pytest.mark.usefixtures("no_sdk")
def test_tracing_without_the_sdk_is_rejected_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match=r"BALANCE_TRACING_ENDPOINT .* install balance-read-models\[tracing\]"):
        start_tracing(load_settings(tracing_endpoint="http://localhost:4318"))


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost", "http://user:secret@localhost:4318"])
def test_an_invalid_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="BALANCE_TRACING_ENDPOINT"):
        load_settings(tracing_endpoint=endpoint)


def test_an_error_in_a_variable_of_opentelemetry_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")

    with pytest.raises(ConfigurationError, match="OTEL_"):
        start_tracing(load_settings(tracing_endpoint="http://localhost:4318"))


def test_a_span_has_the_given_parent_or_the_current_span(tracing: Tracing, collector: Collector) -> None:
    tracer, links = tracing.tracer, links_to([_OTHER, "nonsense"])
    with (
        open_span(tracer, "outer", SpanKind.SERVER, {"n": 1}, parent=caller()),
        open_span(tracer, "inner", SpanKind.CLIENT, {}),
    ):
        pass
    with open_span(tracer, "commit", SpanKind.CONSUMER, {}, parent=caller(), links=links) as span:
        headers = handed_on()
        span.set_attribute("balance.batch.applied", 2)
    tracing.stop(_STOP_SECONDS)

    inner, outer, commit = (next(s for s in collector.spans if s.name == n) for n in ("inner", "outer", "commit"))
    assert {span.trace_id for span in collector.spans} == {_TRACE}
    assert (outer.parent_id, inner.parent_id, commit.parent_id) == (_SPAN, outer.span_id, _SPAN)
    assert (outer.kind, inner.kind, commit.kind) == ("server", "client", "consumer")
    assert commit.links == [(_TRACE[::-1], _SPAN[::-1])]
    assert (outer.attributes, commit.attributes) == ({"n": 1}, {"balance.batch.applied": 2})
    assert headers == {TRACEPARENT_HEADER: f"00-{_TRACE}-{commit.span_id}-01"}
    assert outer.service == "here:1"


def test_an_exception_fails_its_span_which_does_not_contain_the_message(tracing: Tracing, collector: Collector) -> None:
    with pytest.raises(RetriableError), open_span(tracing.tracer, "s", SpanKind.CLIENT, {}):
        raise RetriableError("of customer zoe")
    tracing.stop(_STOP_SECONDS)

    (span,) = collector.spans
    assert span.failed
    assert span.attributes == {"error.type": "RetriableError"}
    assert span.remarks == ""
    assert "zoe" not in str(span)


def test_an_unsampled_trace_is_propagated_and_not_exported(tracing: Tracing, collector: Collector) -> None:
    with open_span(tracing.tracer, "s", SpanKind.SERVER, {}, parent=caller("00")):
        assert handed_on()[TRACEPARENT_HEADER].endswith("-00")
    tracing.stop(_STOP_SECONDS)

    assert collector.spans == []


def test_stop_returns_in_time_although_the_collector_does_not_answer() -> None:
    tracer, stop = start("http://127.0.0.1:9")
    with open_span(tracer, "s", SpanKind.SERVER, {}):
        pass

    began = time.monotonic()
    stop(0.2)

    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("route", "path", "parameters"),
    [(PATH, PATH, {"customerId": "zoe"}), ("/api/models/{model}/keys/{key}", "/api/models/balance/keys/zoe", {})],
)
def test_a_forwarded_query_propagates_its_trace_to_the_peer(
    tracing: Tracing, collector: Collector, route: str, path: str, parameters: dict[str, str]
) -> None:
    async def owner(_request: web.Request) -> web.Response:
        return web.Response(status=503, text="{}", content_type=PROBLEM_JSON)

    async def run() -> None:
        peer = web.Application(middlewares=[traced(tracing.tracer, ROUTES)])
        peer.router.add_get(route, owner)
        peer.router.add_get("/health/live", owner)
        proxy = Proxy(tracer=tracing.tracer)
        async with TestServer(peer) as server, ClientSession() as client:
            await client.get(server.make_url("/health/live"))
            with open_span(tracing.tracer, "asked", SpanKind.SERVER, {}, parent=caller()):
                await proxy.get(Peer(f"{server.host}:{server.port}", "i"), path, parameters, "here:1", 30)
        await proxy.close()

    asyncio.run(run())
    tracing.stop(_STOP_SECONDS)

    asked = next(span for span in collector.spans if span.name == "asked")
    hop = next(span for span in collector.spans if span.kind == "client")
    (answered,) = (span for span in collector.spans if span.kind == "server" and span is not asked)
    assert len(collector.spans) == 3
    assert {span.trace_id for span in collector.spans} == {_TRACE}
    assert (hop.parent_id, answered.parent_id) == (asked.span_id, hop.span_id)
    assert (hop.attributes["http.response.status_code"], answered.attributes["http.response.status_code"]) == (503, 503)
    assert answered.failed
    assert "zoe" not in str(collector.spans)


def test_a_commit_continues_the_trace_of_its_first_event_and_links_to_all(
    tracing: Tracing, collector: Collector
) -> None:
    done = Committed(applied=2, ignored=0, duplicates=0, dead_lettered=1)
    task: Any = SimpleNamespace(task_id=TaskId("balance", 1), process=lambda _batch: done)
    first = f"00-{_TRACE}-{_SPAN}-01"

    updates = PartitionUpdates(10, applied=2, traces=[first, _OTHER])
    assert commit_traced(tracing.tracer, task, TaskBatch(7, updates)) is done
    tracing.stop(_STOP_SECONDS)

    (span,) = collector.spans
    assert (span.name, span.kind, span.trace_id, span.parent_id) == ("commit balance_1", "consumer", _TRACE, _SPAN)
    assert span.links == [(_TRACE, _SPAN), (_TRACE[::-1], _SPAN[::-1])]
    assert span.attributes == {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "commit",
        "messaging.destination.partition.id": "1",
        "messaging.batch.message_count": 2,
        "balance.batch.start": 7,
        "balance.batch.end": 10,
        "balance.batch.applied": 2,
        "balance.batch.dead_lettered": 1,
    }


def test_the_number_of_linked_events_is_bounded() -> None:
    some = PartitionRows(table([row(n, traceparent=parent) for n, parent in enumerate(["a", None, "c"])]))
    many = PartitionRows(table([row(n, traceparent=str(n)) for n in range(100)]))
    none = PartitionRows(table([row(0)]))

    assert some.traceparents() == ["a", "c"]
    assert many.traceparents() == [str(n) for n in range(32)]
    assert none.traceparents() == []
