"""Two traced instances: traces from a command to its commit, and the documented metrics."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import httpx
import pytest

from balance_service.avro.schemas import load_schema
from balance_service.kafka.messages import TRACEPARENT_HEADER
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.kafka import Writer, read_topic
from tests.support.observability import JOIN_METRICS_PREFIX, Collector, documented, exported
from tests.support.service import (
    PARTITIONS,
    add,
    address,
    application,
    ask,
    customers_of,
    new_instance,
    owned,
    running,
    wait_until_spread,
    warm_up,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from tests.support.observability import Collected

    Pair = tuple[LocalInstance, LocalInstance]

_CALLER = "00f067aa0ba902b7"
_PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


@pytest.fixture(scope="module")
def pair(stack: LocalStack, collector: Collector) -> Iterator[Pair]:
    """Two instances; each owns a partition and is standby for the other one."""
    settings = application(BALANCE_TRACING_ENDPOINT=collector.endpoint, BALANCE_NUM_STANDBY_REPLICAS="1")
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        warm_up(first.url)
        yield first, second


def test_a_trace_covers_a_command_its_event_and_the_commit(pair: Pair, collector: Collector) -> None:
    asked = pair[0]
    for partition in range(PARTITIONS):
        (customer,) = customers_of(partition, 1)
        trace = secrets.token_hex(16)

        added = httpx.post(
            asked.url + ADD_FUNDS,
            json={"customerId": customer, "amount": "1.50"},
            headers=_caller(trace),
            timeout=60,
        )

        assert added.status_code == 202
        spans = _collected(collector, trace, 3)
        post, send, commit = (_of(spans, kind) for kind in ("server", "producer", "consumer"))
        assert (post.name, post.service, post.parent_id) == (f"POST {ADD_FUNDS}", address(asked), _CALLER)
        assert (send.parent_id, send.service) == (post.span_id, address(asked))
        assert (commit.parent_id, commit.service) == (send.span_id, address(_owner(pair, partition)))
        assert commit.links == [(trace, send.span_id)]
        offset = int(added.headers["Balance-Position"].split(":")[1]) - 1
        assert send.attributes["messaging.kafka.offset"] == offset
        assert int(commit.attributes["balance.batch.start"]) <= offset < int(commit.attributes["balance.batch.end"])
        assert not any(span.failed for span in spans)
        assert customer not in str(spans)


def test_a_trace_covers_a_forwarded_query(pair: Pair, collector: Collector) -> None:
    (customer,) = customers_of(0, 1)
    position = add(pair[0].url, customer, "1")
    owner = _owner(pair, 0)
    (asked,) = (instance for instance in pair if instance is not owner)
    trace = secrets.token_hex(16)

    # A forwarded query gets the answer of the owner only.
    assert ask(owner.url, customer, position).status_code == 200
    answer = httpx.get(asked.url + GET_BALANCE, params={"customerId": customer}, headers=_caller(trace), timeout=60)

    assert answer.headers["Balance-Application-Server"] == address(owner)
    spans = _collected(collector, trace, 3)
    hop = _of(spans, "client")
    servers = {span.service: span for span in spans if span.kind == "server"}
    assert servers[address(asked)].parent_id == _CALLER
    assert (hop.parent_id, hop.service) == (servers[address(asked)].span_id, address(asked))
    assert servers[address(owner)].parent_id == hop.span_id


def test_an_unsampled_trace_is_not_exported(pair: Pair, collector: Collector) -> None:
    unsampled, sampled = secrets.token_hex(16), secrets.token_hex(16)
    (customer,) = customers_of(0, 1)
    for trace, flags in ((unsampled, "00"), (sampled, "01")):
        headers = {TRACEPARENT_HEADER: f"00-{trace}-{_CALLER}-{flags}"}
        body = {"customerId": customer, "amount": "1"}
        assert httpx.post(pair[0].url + ADD_FUNDS, json=body, headers=headers, timeout=60).status_code == 202

    _collected(collector, sampled, 3)

    assert collector.trace(unsampled) == []


def test_records_have_no_trace_header_without_tracing(stack: LocalStack, warm_instance: LocalInstance) -> None:
    headers = _caller(secrets.token_hex(16))
    body = {"customerId": "untraced", "amount": "1"}

    answer = httpx.post(warm_instance.url + ADD_FUNDS, json=body, headers=headers, timeout=60)

    assert answer.status_code == 202
    records = read_topic(stack, warm_instance.environment["BALANCE_TOPIC"])
    (record,) = (record for record in records if record.key() == b"untraced")
    assert not record.headers()


def test_the_documented_metrics_equal_the_exported_ones(stack: LocalStack, pair: Pair) -> None:
    with Writer(stack, pair[0].environment["BALANCE_TOPIC"]) as writer:
        writer.send("bad", b"no frame")
        # `balance_records_ignored_total` begins with the first record of another type.
        other = {**load_schema("FundsAdded"), "name": "FundsReserved"}
        writer.send("other", writer.frame("other", "1.00", other))
    (customer,) = customers_of(0, 1)
    for instance in pair:
        ask(instance.url, customer)

    def sampled() -> bool:
        found = exported(pair)
        # The JVM heap is sampled every five seconds.
        return (
            documented().keys() <= found.keys() and {n for n, (_, labels) in found.items() if labels is None} <= others
        )

    # Nothing is joined or rebuilt here.
    others = {name for name in documented() if name.startswith((JOIN_METRICS_PREFIX, "balance_generation_"))}
    eventually(sampled, "every documented metric has a sample", 60)

    assert exported(pair) == {
        name: (kind, None if name in others else labels) for name, (kind, labels) in documented().items()
    }


def _caller(trace_id: str) -> dict[str, str]:
    return {TRACEPARENT_HEADER: f"00-{trace_id}-{_CALLER}-01"}


def _owner(pair: Pair, partition: int) -> LocalInstance:
    (owner,) = (instance for instance in pair if partition in owned(instance))
    return owner


def _collected(collector: Collector, trace_id: str, spans: int) -> list[Collected]:
    eventually(lambda: len(collector.trace(trace_id)) >= spans, f"{spans} spans of a trace", _PATIENCE_SECONDS)
    found = collector.trace(trace_id)
    assert len(found) == spans, found
    return found


def _of(spans: list[Collected], kind: str) -> Collected:
    (span,) = (span for span in spans if span.kind == kind)
    return span
