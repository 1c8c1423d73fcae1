"""Three brokers: restarted in turn under load; and once with unclean elections, which lose acknowledged records.

The other runs of the suite have three brokers with `CHAOS_BROKERS=3`, and play other faults.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from confluent_kafka.admin import NewTopic

from balance_service.devtools.local.stack import LocalStack
from tests.chaos.audit import Audit
from tests.chaos.brokers import in_sync
from tests.chaos.checks import Violation, check_answers, check_promises, check_staleness, check_told, is_behind
from tests.chaos.clients import Commands, Enquiry, Readers
from tests.chaos.cluster import IDEMPOTENCY_WINDOW_SECONDS, Cluster, stood_by, wait_until_applied
from tests.chaos.listeners import Listeners
from tests.chaos.recount import Recount
from tests.chaos.report import Journal
from tests.chaos.workload import Customers, Frames, Workload
from tests.support.kafka import admin
from tests.support.service import add, application, ask_again, new_instance, running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

_PARTITIONS = 4
_CUSTOMERS = 200
_SEED = 3
_RATE, _READS = 100.0, 120.0
_CATCH_UP_SECONDS = 120.0
_AT_REST_SECONDS = 5.0
_MOST_REFUSED = 0.01


@pytest.mark.timeout(1_200)
def test_brokers_restarted_in_turn_lose_nothing_and_hardly_a_query_is_refused(tmp_path: Path) -> None:
    journal = Journal()
    with ExitStack() as resources:
        enter = resources.enter_context
        cluster = enter(Cluster(tmp_path / "stack", _PARTITIONS, 1, _SEED, brokers=3))
        stack = cluster.stack
        customers = Customers(_CUSTOMERS, _CUSTOMERS // 8)
        frames = Frames(stack.schema_registry_url, cluster.topic)
        workload = Workload(stack.bootstrap_servers, cluster.topic, _PARTITIONS, frames, customers, _SEED)
        workload.seed_customers()
        workload.burst(2_000)
        for member in cluster.members:
            member.launch()
        for member in cluster.members:
            member.wait_ready()
        recount = Recount(
            stack.bootstrap_servers,
            stack.schema_registry_url,
            cluster.topic,
            _PARTITIONS,
            customers.homes,
            round(IDEMPOTENCY_WINDOW_SECONDS * 1000),
        )
        wait_until_applied(cluster.members, recount, _CATCH_UP_SECONDS)
        eventually(
            lambda: stood_by(cluster.members) == {*range(_PARTITIONS)},
            "every partition has a standby",
            _CATCH_UP_SECONDS,
        )
        addresses = [(member.host, member.port) for member in cluster.members]
        readers = enter(Readers(addresses, customers, workload.acked, _SEED, _READS))
        commands = enter(Commands(addresses, customers, _SEED))
        listeners = enter(Listeners(addresses, customers, _SEED))
        workload.start(_RATE)
        time.sleep(_AT_REST_SECONDS)
        readers.take()
        journal.say("the brokers are restarted in turn")
        for broker in stack.brokers:
            journal.fault("restart-broker", detail=broker.name)
            broker.stop()
            broker.start()
            # An operator goes on when every partition has all its replicas again.
            eventually(partial(_is_whole, stack, cluster.topic), f"all replicas after {broker.name}", _CATCH_UP_SECONDS)
            time.sleep(_AT_REST_SECONDS)
        answers, acks = readers.take(), list(workload.acks)
        workload.stop()
        wait_until_applied(cluster.members, recount, _CATCH_UP_SECONDS)
        ends = [count.end for count in recount.partitions]
        enquiry = Enquiry(addresses, readers, customers, ends, _CATCH_UP_SECONDS)
        resources.callback(enquiry.close)
        found = list(enquiry.standbys_answer())
        commands.stop()
        wait_until_applied(cluster.members, recount, _CATCH_UP_SECONDS)
        audit = Audit(
            stack.bootstrap_servers, stack.schema_registry_url, cluster.topic, cluster.application_id, _PARTITIONS
        )
        found += check_answers(answers, recount)
        found += check_staleness(answers, acks)
        found += check_promises(commands.promises, recount)
        found += check_told(listeners.take(), recount)
        found += listeners.take_violations()
        found += audit.balances(recount)
        found += audit.dead_letters(recount)
        found += [Violation("status", refusal) for refusal in commands.take_refusals()]
    refused = [answer for answer in answers if not answer.speaks]
    # Such a query asks to be refused while that many events are not applied: with `maxLag=0` or 2, that is at any time;
    # with 20, for as long as the leaders change.
    behind = [answer for answer in refused if is_behind(answer)]
    refused = [answer for answer in refused if not is_behind(answer)]
    journal.say(
        f"refused: {len(refused)} of {len(answers)} queries, and {len(behind)} by their own `maxLag`; "
        f"no answer: {sum(readers.silences.values())}; commands: {dict(commands.statuses)}"
    )
    assert not found, found[:10]
    assert len(commands.promises) > 10
    assert len(refused) <= _MOST_REFUSED * len(answers), refused[:10]


@pytest.mark.timeout(600)
def test_a_task_halts_and_says_so_if_an_unclean_election_loses_acknowledged_events(tmp_path: Path) -> None:
    settings = application(BALANCE_PARTITIONS="1")
    with LocalStack(tmp_path / "stack", brokers=3) as stack:
        _, behind, _ = stack.brokers
        leader = stack.brokers[0]
        source = settings["BALANCE_TOPIC"]
        # Such a topic promises nothing: it acknowledges what one broker has, and any other may lead it afterwards.
        _create(stack, source, [leader.number, behind.number])
        with running(new_instance(stack, settings)) as (instance,):
            ask_again(instance.url, "alice", add(instance.url, "alice", "1.00"))
            behind.kill()
            eventually(lambda: in_sync(stack, source) == [1], "one broker has all records", _CATCH_UP_SECONDS)
            lost = [_added(instance.url, f"customer-{number}") for number in range(5)]
            assert ask_again(instance.url, "customer-4", lost[-1]).status_code == 200
            leader.kill()
            behind.start()

            def halted() -> bool:
                return [task["state"] for task in status(instance)["tasks"]] == ["HALTED"]

            eventually(halted, lambda: str(status(instance)), _CATCH_UP_SECONDS)
            assert "beyond the end" in str(status(instance))
            leader.start()
            refused = httpx.get(f"{instance.url}/api/customers.getBalance", params={"customerId": "alice"})
            assert refused.status_code == 503, refused.text


def _is_whole(stack: LocalStack, topic: str) -> bool:
    topics = (topic, "__consumer_offsets", "__transaction_state")
    return all(count == len(stack.brokers) for name in topics for count in in_sync(stack, name))


def _create(stack: LocalStack, topic: str, replicas: list[int]) -> None:
    config = {
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "min.insync.replicas": "1",
        "unclean.leader.election.enable": "true",
    }
    wanted: Any = NewTopic(topic, num_partitions=1, replica_assignment=[replicas], config=config)
    admin(stack).create_topics([wanted])[topic].result(20)


def _added(url: str, customer: str) -> str:
    """Adds funds, and asks again while the service has no leader to send them to; returns the position."""
    found: list[str] = []

    def accepted() -> bool:
        answer = httpx.post(f"{url}/api/balance.addFunds", json={"customerId": customer, "amount": "1.00"}, timeout=30)
        found.append(answer.headers.get("Balance-Position", ""))
        return answer.status_code == 202

    eventually(accepted, f"{customer} gets funds", _CATCH_UP_SECONDS)
    return found[-1]
