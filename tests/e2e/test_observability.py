"""Two traced instances: a trace leads from a command to its commit; each documented metric is exported."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from balance_service.http import commands, queries
from balance_service.tracing import TRACEPARENT_HEADER
from tests.collector import Collector
from tests.e2e.service import (
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
from tests.integration.engines import Writer, eventually, read_topic
from tests.observed import documented

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.local.instances import LocalInstance
    from balance_service.local.stack import LocalStack
    from tests.collector import Collected

    Pair = tuple[LocalInstance, LocalInstance]
    Exported = dict[str, tuple[str, frozenset[str] | None]]

_CALLER = "00f067aa0ba902b7"
_PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as listening:
        yield listening


@pytest.fixture(scope="module")
def pair(stack: LocalStack, collector: Collector) -> Iterator[Pair]:
    """Each owns a partition, and stands by for the other's."""
    settings = application(BALANCE_TRACING_ENDPOINT=collector.endpoint, BALANCE_NUM_STANDBY_REPLICAS="1")
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        warm_up(first.url)
        yield first, second


def test_one_trace_leads_from_a_command_through_its_event_to_the_commit(pair: Pair, collector: Collector) -> None:
    asked = pair[0]
    for partition in range(PARTITIONS):
        (customer,) = customers_of(partition, 1)
        trace = secrets.token_hex(16)

        added = httpx.post(
            asked.url + commands.PATH,
            json={"customerId": customer, "amount": "1.50"},
            headers=_caller(trace),
            timeout=60,
        )

        assert added.status_code == 202
        spans = _collected(collector, trace, 3)
        post, send, commit = (_of(spans, kind) for kind in ("server", "producer", "consumer"))
        assert (post.name, post.service, post.parent_id) == (f"POST {commands.PATH}", address(asked), _CALLER)
        assert (send.parent_id, send.service) == (post.span_id, address(asked))
        assert (commit.parent_id, commit.service) == (send.span_id, address(_owner(pair, partition)))
        assert commit.links == [(trace, send.span_id)]
        offset = int(added.headers["Balance-Position"].split(":")[1]) - 1
        assert send.attributes["messaging.kafka.offset"] == offset
        assert int(commit.attributes["balance.batch.start"]) <= offset < int(commit.attributes["balance.batch.end"])
        assert not any(span.failed for span in spans)
        assert customer not in str(spans)


def test_a_trace_goes_with_a_query_over_its_hop(pair: Pair, collector: Collector) -> None:
    (customer,) = customers_of(0, 1)
    position = add(pair[0].url, customer, "1")
    owner = _owner(pair, 0)
    (asked,) = (instance for instance in pair if instance is not owner)
    trace = secrets.token_hex(16)

    # As the owner's answer alone is taken, it comes from there.
    assert ask(owner.url, customer, position).status_code == 200
    answer = httpx.get(asked.url + queries.PATH, params={"customerId": customer}, headers=_caller(trace), timeout=60)

    assert answer.headers["Balance-Application-Server"] == address(owner)
    spans = _collected(collector, trace, 3)
    hop = _of(spans, "client")
    servers = {span.service: span for span in spans if span.kind == "server"}
    assert servers[address(asked)].parent_id == _CALLER
    assert (hop.parent_id, hop.service) == (servers[address(asked)].span_id, address(asked))
    assert servers[address(owner)].parent_id == hop.span_id


def test_a_trace_that_is_not_kept_is_not_sent(pair: Pair, collector: Collector) -> None:
    unsampled, sampled = secrets.token_hex(16), secrets.token_hex(16)
    (customer,) = customers_of(0, 1)
    for trace, flags in ((unsampled, "00"), (sampled, "01")):
        headers = {TRACEPARENT_HEADER: f"00-{trace}-{_CALLER}-{flags}"}
        body = {"customerId": customer, "amount": "1"}
        assert httpx.post(pair[0].url + commands.PATH, json=body, headers=headers, timeout=60).status_code == 202

    _collected(collector, sampled, 3)

    assert collector.trace(unsampled) == []


def test_without_tracing_records_have_no_header(stack: LocalStack, warm_instance: LocalInstance) -> None:
    headers = _caller(secrets.token_hex(16))
    body = {"customerId": "untraced", "amount": "1"}

    answer = httpx.post(warm_instance.url + commands.PATH, json=body, headers=headers, timeout=60)

    assert answer.status_code == 202
    records = read_topic(stack, warm_instance.environment["BALANCE_TOPIC"])
    (record,) = (record for record in records if record.key() == b"untraced")
    assert not record.headers()


def test_the_documented_metrics_are_those_that_are_exported(stack: LocalStack, pair: Pair) -> None:
    with Writer(stack, pair[0].environment["BALANCE_TOPIC"]) as writer:
        writer.send("bad", b"no frame")
    (customer,) = customers_of(0, 1)
    for instance in pair:
        ask(instance.url, customer)

    def sampled() -> bool:
        found = _exported(pair)
        # What Spark says of a query is sampled every five seconds, and is not there before its first micro-batch.
        return documented().keys() <= found.keys() and None not in {labels for _, labels in found.values()}

    eventually(sampled, "a sample of each", 60)

    assert _exported(pair) == documented()


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


def _exported(pair: Pair) -> Exported:
    """Metric → type and labels, as either instance has it; no labels at all where there is no sample of it yet."""
    found: Exported = {}
    for instance in pair:
        for family in text_string_to_metric_families(httpx.get(f"{instance.url}/metrics", timeout=60).text):
            if family.name.endswith("_created"):
                continue
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = [frozenset(sample.labels) - {"le"} for sample in family.samples]
            if labels or name not in found:
                found[name] = (family.type, labels[0] if labels else None)
    return found
