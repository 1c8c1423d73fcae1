"""A switch looks at the generation that is to serve: what would be lost by it is named, and loses nothing unasked."""

from __future__ import annotations

import time
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic

from balance_service.client import Client, ClientError
from tests.support.commands import run
from tests.support.kafka import Writer, admin, ends_of
from tests.support.service import PARTITIONS, application, new_instance, on, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack


def _is(client: Client, status: str) -> bool:
    return bool(client.generations("balance")["generations"][-1]["status"] == status)


def _answers(client: Client, customer: str, amount: str) -> bool:
    return bool(client.get("balance", customer).value == {"amount": Decimal(amount)})


def _refusal(client: Client, **more: Any) -> str:
    with pytest.raises(ClientError) as caught:
        client.switch("balance", reason="a test", **more)
    return str(caught.value)


@pytest.mark.shows("looks-first", "lossy-topics")
def test_a_generation_of_what_retention_left_serves_only_anyway(stack: LocalStack) -> None:
    settings = application(BALANCE_ALLOW_FINITE_RETENTION="true")
    instance = new_instance(stack, settings)
    environment = on(stack, settings) | {"BALANCE_APPLICATION_SERVER": instance.url.removeprefix("http://")}
    topic = settings["BALANCE_TOPIC"]
    with running(instance), Client(instance.url) as client, Writer(stack, topic) as writer:
        writer.add("alice", "90.00")
        eventually(lambda: _answers(client, "alice", "90.00"), "it is folded", 60)
        gone = [TopicPartition(topic, partition, end) for partition, end in ends_of(stack, topic).items()]
        for future in admin(stack).delete_records(gone).values():
            future.result(10)
        writer.add("alice", "11.00")
        eventually(lambda: _answers(client, "alice", "101.00"), "it is folded", 60)

        client.rebuild("balance", switch="always", keep_old_seconds=600)
        eventually(partial(_is, client, "ready"), lambda: str(client.generations("balance")), 90)

        found = client.generations("balance")
        why = f"generation 2 begins at offset 1 of {topic}-"
        assert found["problem"].startswith(why)
        assert _answers(client, "alice", "101.00")
        assert why in _refusal(client)

        done = run(environment, "switch", "balance", "--anyway", "--reason", "the rest is enough")
        assert done.code == 0, done
        assert f"  the rest is enough (anyway: {why}" in done.stdout
        eventually(lambda: _answers(client, "alice", "11.00"), "generation 2 answers", 30)
        until = datetime.fromisoformat(client.generations("balance")["keptUntil"])
        time.sleep(2)

        eventually(lambda: _is_back(client), lambda: str(client.generations("balance")), 30)
        assert _answers(client, "alice", "101.00")
        assert datetime.fromisoformat(client.generations("balance")["keptUntil"]) > until
        assert why in _refusal(client)


def _is_back(client: Client) -> bool:
    """Switches back, once the former generation runs again."""
    try:
        client.switch("balance", to=1, reason="it was wrong")
    except ClientError:
        return False
    return True


@pytest.mark.shows("looks-first")
def test_a_generation_whose_changelog_was_recreated_while_it_was_idle_does_not_serve(stack: LocalStack) -> None:
    settings = application()
    instance = new_instance(stack, settings)
    with running(instance), Client(instance.url) as client, Writer(stack, settings["BALANCE_TOPIC"]) as writer:
        writer.add("alice", "1.00")
        client.rebuild("balance", switch="never", keep_old_seconds=600)
        eventually(partial(_is, client, "ready"), lambda: str(client.generations("balance")), 90)

        changelog = f"{settings['BALANCE_APPLICATION_ID']}-balance.g2-changelog"
        admin(stack).delete_topics([changelog])[changelog].result(10)
        assert f"the changelog '{changelog}' was deleted or recreated" in _refusal(client)
        eventually(partial(_is_created, stack, changelog), "it is created", 30)
        assert f"the changelog '{changelog}' was deleted or recreated" in _refusal(client)

        assert _answers(client, "alice", "1.00")


def _is_created(stack: LocalStack, changelog: str) -> bool:
    topic = NewTopic(changelog, PARTITIONS, 1, config={"cleanup.policy": "compact"})
    try:
        admin(stack).create_topics([topic])[changelog].result(10)
    except KafkaException:
        # It is being deleted.
        return False
    return True
