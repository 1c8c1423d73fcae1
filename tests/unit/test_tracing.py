"""Tracing: off unless wanted; spans that know what they are part of, sent to a real receiver."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from balance_service.errors import ConfigurationError, RetriableError
from balance_service.events.combine import by_partition
from balance_service.http.problems import PROBLEM_JSON
from balance_service.http.proxy import Proxy
from balance_service.http.queries import PATH
from balance_service.http.traced import traced
from balance_service.otlp_tracing import OtlpTracing
from balance_service.settings import load_settings
from balance_service.tracing import TRACEPARENT_HEADER, UNTRACED, SpanKind, start_tracing
from tests.collector import Collector
from tests.unit.decoded import row, table

if TYPE_CHECKING:
    from collections.abc import Iterator

_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
_OTHER = f"00-{_TRACE[::-1]}-{_SPAN[::-1]}-01"
_STOP_SECONDS = 30.0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


@pytest.fixture
def tracing(collector: Collector) -> Iterator[OtlpTracing]:
    tracing = OtlpTracing(collector.endpoint, "balances", "here:1")
    yield tracing
    tracing.stop(_STOP_SECONDS)


def came_with(flags: str = "01") -> dict[str, str]:
    return {TRACEPARENT_HEADER: f"00-{_TRACE}-{_SPAN}-{flags}"}


def test_it_is_off_by_default() -> None:
    tracing = start_tracing(load_settings())

    assert tracing is UNTRACED
    assert not tracing.is_on
    with tracing.span("s", SpanKind.SERVER, {}) as span:
        assert span.context() == {}


def test_wanted_without_its_packages_it_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "balance_service.otlp_tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(ConfigurationError, match=r"BALANCE_TRACING_ENDPOINT .*'balance-service\[tracing\]"):
        start_tracing(load_settings(tracing_endpoint="http://localhost:4318"))


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost", "http://user:secret@localhost:4318"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="BALANCE_TRACING_ENDPOINT"):
        load_settings(tracing_endpoint=endpoint)


def test_a_refused_variable_of_opentelemetry_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")

    with pytest.raises(ConfigurationError, match="OTEL_"):
        start_tracing(load_settings(tracing_endpoint="http://localhost:4318"))


def test_a_span_is_part_of_what_it_came_with_and_of_the_one_around_it(
    tracing: OtlpTracing, collector: Collector
) -> None:
    with tracing.span("outer", SpanKind.SERVER, {"n": 1}, came_with()), tracing.span("inner", SpanKind.CLIENT, {}):
        pass
    with tracing.span("commit", SpanKind.CONSUMER, {}, came_with(), [_OTHER, "nonsense"]) as span:
        context = dict(span.context())
        span.tell("balance.batch.applied", 2)
    tracing.stop(_STOP_SECONDS)

    inner, outer, commit = (next(s for s in collector.spans if s.name == n) for n in ("inner", "outer", "commit"))
    assert {span.trace_id for span in collector.spans} == {_TRACE}
    assert (outer.parent_id, inner.parent_id, commit.parent_id) == (_SPAN, outer.span_id, _SPAN)
    assert (outer.kind, inner.kind, commit.kind) == ("server", "client", "consumer")
    assert commit.links == [(_TRACE[::-1], _SPAN[::-1])]
    assert (outer.attributes, commit.attributes) == ({"n": 1}, {"balance.batch.applied": 2})
    assert context == {TRACEPARENT_HEADER: f"00-{_TRACE}-{commit.span_id}-01"}
    assert outer.service == "here:1"


def test_a_span_that_an_error_leaves_is_a_failed_one_and_does_not_quote_it(
    tracing: OtlpTracing, collector: Collector
) -> None:
    with pytest.raises(RetriableError), tracing.span("s", SpanKind.CLIENT, {}):
        raise RetriableError("of customer zoe")
    tracing.stop(_STOP_SECONDS)

    (span,) = collector.spans
    assert span.failed
    assert span.attributes == {"error.type": "RetriableError"}
    assert "zoe" not in str(span)


def test_a_trace_that_is_not_kept_is_handed_on_as_such_and_not_sent(tracing: OtlpTracing, collector: Collector) -> None:
    with tracing.span("s", SpanKind.SERVER, {}, came_with("00")) as span:
        assert span.context()[TRACEPARENT_HEADER].endswith("-00")
    tracing.stop(_STOP_SECONDS)

    assert collector.spans == []


def test_a_collector_that_does_not_answer_does_not_hold_up_the_end() -> None:
    tracing = OtlpTracing("http://127.0.0.1:9", "balances", "here:1")
    with tracing.span("s", SpanKind.SERVER, {}):
        pass

    began = time.monotonic()
    tracing.stop(0.2)

    assert time.monotonic() - began < 5


def test_a_trace_goes_with_a_query_to_the_peer(tracing: OtlpTracing, collector: Collector) -> None:
    async def owner(_request: web.Request) -> web.Response:
        return web.Response(status=503, text="{}", content_type=PROBLEM_JSON)

    async def run() -> None:
        peer = web.Application(middlewares=[traced(tracing)])
        peer.router.add_get(PATH, owner)
        peer.router.add_get("/health/live", owner)
        proxy = Proxy(tracing=tracing)
        async with TestServer(peer) as server, ClientSession() as client:
            await client.get(server.make_url("/health/live"))
            with tracing.span("asked", SpanKind.SERVER, {}, came_with()):
                await proxy.get(f"{server.host}:{server.port}", PATH, {"customerId": "zoe"}, "here:1", 30)
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


def test_a_bounded_number_of_events_is_named() -> None:
    rows = [row(n, traceparent=parent) for n, parent in enumerate(["a", None, "c", "d"])]
    other = row(9, partition=1)

    split = by_partition(table([*rows, other]))

    assert split[0].traceparents(2) == ["a", "c"]
    assert split[1].traceparents(2) == []
