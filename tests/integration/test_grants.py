"""Each grant of docs/how-to/secure.md in turn is missing: one error line names the resource and the grant."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.cluster.directory import Directory, ServerTable
from balance_service.cluster.generations import GenerationLog
from balance_service.cluster.membership import Guard, Membership, consumer_config, group_of
from balance_service.cluster.signatures import RecordSignatures
from balance_service.devtools.topic_comparison import compare
from balance_service.devtools.topic_copy import copy_topic
from balance_service.engine.changelog_reader import ChangelogReader
from balance_service.engine.changelog_writer import ChangelogWriter, Envelope
from balance_service.engine.records import BY_KEY, POSITION_KEY, DeadLetter, Output, TaskId
from balance_service.errors import BalanceServiceError, NotAuthorizedError
from balance_service.kafka.clients import common_config, producer_config, reader_config, transactional_config
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.topics import Topics
from balance_service.model.generations import Switch
from balance_service.read_models.add_funds import FundsAddedPublisher
from balance_service.settings import Settings, load_settings
from tests.integration.engines import balance_stage, prepare
from tests.integration.secured import Grant, listed
from tests.support.fakes import DECLARED, GUARDED, IgnoringListener
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from balance_service.devtools.local.stack import LocalStack
    from tests.integration.secured import SecuredStack

_LISTED = listed()
_CREATING = "creating what is missing"
_COPYING = "`topics copy`"


def new_names() -> dict[str, str]:
    suffix = uuid.uuid4().hex[:8]
    topic = f"t-{suffix}"
    copied = {"from": topic, "to": f"copy-{suffix}"}
    return {"topic": topic, "stage": "balance", "application id": f"a-{suffix}", **copied}


def settings_of(secured: SecuredStack, stack: LocalStack, names: dict[str, str], **overrides: Any) -> Settings:
    given = {
        "bootstrap_servers": secured.sasl,
        "schema_registry_url": stack.schema_registry_url,
        "kafka_config": secured.sasl_properties("SCRAM-SHA-512"),
        "topic": names["topic"],
        "application_id": names["application id"],
        "session_timeout_ms": 6000,
    }
    return load_settings(**(given | overrides))


@pytest.fixture(scope="module")
def existing(secured: SecuredStack, stack: LocalStack) -> dict[str, str]:
    """Names whose topics exist and for which everything is granted."""
    names = new_names()
    settings = settings_of(secured, stack, names, bootstrap_servers=secured.bootstrap_servers, kafka_config={})
    prepare(Topics(settings), settings)
    secured.grant(grant.binding(names) for grant in _LISTED if grant.needed_for != _COPYING)
    return names


# Operations that need a grant. Each raises, or returns the reason, if it is denied.


def prepare_all(settings: Settings) -> None:
    prepare(Topics(settings), settings)


def delete_changelog(settings: Settings) -> None:
    Topics(settings).delete(balance_stage(settings).changelog)


def delete_directory(settings: Settings) -> None:
    Topics(settings).delete(settings.application_servers_topic)


def read_changelog(settings: Settings) -> None:
    reader = ChangelogReader(reader_config(settings), balance_stage(settings).changelog, 0, 0)
    try:
        [*reader.replay(1, lambda: False)]
    finally:
        reader.close()


def commit(settings: Settings, dead_letters: int = 0, outputs: Sequence[Output] = ()) -> None:
    writer = ChangelogWriter(
        transactional_config(settings, f"{settings.application_id}-balance-0"),
        TaskId("balance", 0),
        balance_stage(settings).changelog,
        balance_stage(settings).dead_letters,
        Envelope("balance", settings.topic, 0, settings.application_id, 1 << 20),
    )
    try:
        writer.fence()
        letters = [DeadLetter(0, 0, b"k", b"v", "key-null")] * dead_letters
        writer.commit([(POSITION_KEY, b"p")], letters, b"p", 0, outputs)
    finally:
        writer.close()


def decide(settings: Settings) -> None:
    decision = Output(0, settings.dead_letter_decisions_topic, BY_KEY, b"balance/0:0", b"d", 0, [])
    commit(settings, outputs=[decision])


def read_decisions(settings: Settings) -> None:
    decide(settings)
    topics = Topics(settings)
    topic = topics.find(settings.dead_letter_decisions_topic)
    assert topic is not None
    # A commit returns before the broker has written its marker, which a read-committed reader waits for.
    with reader_to_end(settings, topics, topic, waits_for_open=True) as reader:
        list(reader)


def follow_generations(settings: Settings) -> None:
    # Reading an empty topic needs no grant.
    begin_rebuild(settings)
    registry = SchemaRegistry.from_settings(settings)
    try:
        GenerationLog(settings, Topics(settings), OwnSchemas(registry))
    finally:
        registry.close()


def begin_rebuild(settings: Settings) -> None:
    registry = SchemaRegistry.from_settings(settings)
    try:
        log = GenerationLog(settings, Topics(settings), OwnSchemas(registry))
        log.write(
            uuid.uuid4().hex, lambda now: now.begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 0, None, "", "a test")
        )
    finally:
        registry.close()


def add_funds(settings: Settings) -> None:
    registry = SchemaRegistry.from_settings(settings)
    publisher = FundsAddedPublisher(producer_config(settings), registry, settings.topic, 30.0)
    try:
        publisher.publish_and_wait("c1", Decimal(1))
    finally:
        publisher.close()
        registry.close()


def follow_and_publish(settings: Settings) -> str:
    registry = SchemaRegistry.from_settings(settings)
    topic, schema = settings.application_servers_topic, load_schema("ApplicationServer")
    codec = AvroCodec(registry, f"{topic}-parts.code.balance.cluster.ApplicationServer", schema)
    directory = Directory(
        consumer_config=reader_config(settings),
        producer_config=producer_config(settings),
        topic=topic,
        address="h:1",
        incarnation="i",
        codec=codec,
        signatures=RecordSignatures(None, topic),
        models=list,
        tasks=list,
        table=ServerTable(),
    )
    directory.start()
    try:
        return _problem(lambda: directory.problem)
    finally:
        directory.stop(5.0)
        registry.close()


def take_part(settings: Settings) -> str:
    member = Membership(
        config=consumer_config(
            common_config(settings), group_of(settings.application_id, settings.topic), settings.session_timeout_ms
        ),
        topic=settings.topic,
        session_timeout_ms=settings.session_timeout_ms,
        listener=IgnoringListener(),
        positions=lambda _topic: {0: 0, 1: 0},
        guarded=GUARDED,
    )
    member.start()
    try:
        return _problem(lambda: member.problem)
    finally:
        member.stop()


def keep_guard(settings: Settings) -> str:
    member = Guard(settings)
    member.start()
    try:
        return _problem(lambda: member.problem)
    finally:
        member.stop()


def _problem(told: Callable[[], str]) -> str:
    eventually(lambda: bool(told()), "the client reports what is denied")
    return told()


_APPLICATION = "<application id>"
_NEEDED_BY: dict[tuple[str, str], Callable[[Settings], str | None]] = {
    ("<topic>", "Read"): take_part,
    ("<topic>", "DescribeConfigs"): prepare_all,
    ("<topic>", "Write"): add_funds,
    ("<topic>-dead-letters", "Write"): partial(commit, dead_letters=1),
    ("<topic>-dead-letters", "DescribeConfigs"): prepare_all,
    (f"{_APPLICATION}-<stage>-changelog", "Read"): read_changelog,
    (f"{_APPLICATION}-<stage>-changelog", "Write"): commit,
    (f"{_APPLICATION}-<stage>-changelog", "DescribeConfigs"): prepare_all,
    (f"{_APPLICATION}-<stage>-changelog", "Delete"): delete_changelog,
    (f"{_APPLICATION}-application-servers", "Read"): follow_and_publish,
    (f"{_APPLICATION}-application-servers", "Write"): follow_and_publish,
    (f"{_APPLICATION}-application-servers", "Delete"): delete_directory,
    (f"{_APPLICATION}-dead-letter-decisions", "Read"): read_decisions,
    (f"{_APPLICATION}-dead-letter-decisions", "Write"): decide,
    (f"{_APPLICATION}-dead-letter-decisions", "DescribeConfigs"): prepare_all,
    (f"{_APPLICATION}-generations", "Read"): follow_generations,
    (f"{_APPLICATION}-generations", "DescribeConfigs"): follow_generations,
    (f"{_APPLICATION}-generations", "Write"): begin_rebuild,
    (_APPLICATION, "Read"): keep_guard,
    (f"{_APPLICATION}/", "Read"): take_part,
    (f"{_APPLICATION}-<stage>-", "Write"): commit,
}


@contextmanager
def missing(secured: SecuredStack, binding: Any) -> Iterator[None]:
    """Revokes a grant for the duration of the context."""
    secured.revoke(binding)
    try:
        yield
    finally:
        secured.grant([binding])


def said_by(attempt: Callable[[], str | None]) -> str:
    """Returns the error text of a denied operation."""
    try:
        said = attempt()
    except BalanceServiceError as error:
        said = str(error)
    assert said, "the operation was allowed"
    return said


@pytest.mark.parametrize(
    "grant", [g for g in _LISTED if g.needed_for not in (_CREATING, _COPYING)], ids=lambda g: str(g)
)
def test_an_operation_without_its_grant_names_the_grant(
    secured: SecuredStack, stack: LocalStack, existing: dict[str, str], grant: Grant
) -> None:
    settings = settings_of(secured, stack, existing)
    attempt = _NEEDED_BY[grant.name, grant.operation]

    with missing(secured, grant.binding(existing)):
        said = said_by(lambda: attempt(settings))

    assert "the brokers do not allow" in said
    assert f"{grant.operation} on " in said
    assert grant.filled(existing) in said
    assert "\n" not in said


@pytest.mark.parametrize("grant", [g for g in _LISTED if g.needed_for == _CREATING], ids=lambda g: g.name)
def test_a_missing_topic_without_its_create_grant_is_named_with_the_grant(
    secured: SecuredStack, stack: LocalStack, grant: Grant
) -> None:
    names = new_names()
    secured.grant(g.binding(names) for g in _LISTED if g.needed_for != _COPYING and g != grant)

    with pytest.raises(NotAuthorizedError) as caught:
        prepare_all(settings_of(secured, stack, names))

    assert f"grant this user Create on topic '{grant.filled(names)}', or create it beforehand" in str(caught.value)


def test_a_copy_needs_exactly_the_grants_for_copies(
    secured: SecuredStack, stack: LocalStack, existing: dict[str, str]
) -> None:
    names = existing | {"to": new_names()["to"]}
    settings = settings_of(secured, stack, names)
    grants = [grant for grant in _LISTED if grant.needed_for == _COPYING]
    add_funds(settings)
    secured.revoke(*(grant.binding(existing) for grant in _LISTED if grant.needed_for != _COPYING))

    def copy() -> str | None:
        copied = copy_topic(settings, names["from"], names["to"], None, lambda *_: None)
        compare(settings, copied, lambda *_: None)
        return None

    try:
        # Revokes first what only a new copy needs, then what only an incomplete copy needs.
        order = ["Create", "Write", "Read", "DescribeConfigs"]
        for grant in sorted(grants, key=lambda grant: order.index(grant.operation)):
            secured.grant(g.binding(names) for g in grants)
            with missing(secured, grant.binding(names)):
                said = said_by(copy)
            assert grant.operation in said, said
            assert grant.filled(names) in said, said
        copy()
    finally:
        secured.grant(grant.binding(existing) for grant in _LISTED if grant.needed_for != _COPYING)
