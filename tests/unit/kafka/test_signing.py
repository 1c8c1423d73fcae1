"""Records of control topics: which of them count, with and without signatures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from balance_service.errors import ConfigurationError, NotAuthorizedError
from balance_service.kafka import signing
from balance_service.kafka.signing import (
    HEADER,
    REFUSED_BEFORE,
    REPEATED,
    UNSIGNED,
    WRONGLY_SIGNED,
    ControlRecord,
    ControlRecords,
    SharedSecret,
)
from balance_service.kafka.topics import Topic
from balance_service.settings import load_settings

NOW, FORMER, FOREIGN = (SharedSecret(f"{name} secret of all") for name in ("present", "former", "foreign"))


def record(key: bytes, value: bytes, signature: bytes | None, offset: int, partition: int = 0) -> ControlRecord:
    return ControlRecord(partition, offset, key, value, signature)


def signed(secret: SharedSecret | None, key: bytes, value: bytes, topic: str = "t") -> bytes | None:
    return ControlRecords(topic, secret).headers(key, value).get(HEADER)


def judged(records: ControlRecords, *given: ControlRecord) -> list[str]:
    return [reason for _, reason in records.judged(given)]


class Refusing:
    """A producer whose records the broker refuses, one by one."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def produce(self, *_: object, on_delivery: Any, **__: object) -> None:
        self.reports.append(on_delivery)

    def poll(self, _seconds: float) -> None:
        self.reports.pop()(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED), None)

    def __len__(self) -> int:
        return len(self.reports)


def test_a_checkpoint_that_the_broker_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator who takes it for written leaves the former secret out."""
    monkeypatch.setattr(signing, "new_client", lambda *_: Refusing())
    monkeypatch.setattr(signing, "_read", lambda *_: [])
    topics: Any = SimpleNamespace(find=lambda name: Topic(name, "id", 1))

    with pytest.raises(NotAuthorizedError, match="Write on topic 'decisions'"):
        signing.vouch(load_settings(peer_secret="a secret of all instances"), topics, "decisions")


def test_a_signed_record_counts_and_one_of_a_former_secret_too() -> None:
    records = ControlRecords("t", NOW, [FORMER])
    messages = [record(b"k", b"%d" % n, signed(s, b"k", b"%d" % n), n) for n, s in enumerate((FORMER, NOW, FORMER))]

    assert judged(records, *messages) == ["", "", ""]


@pytest.mark.parametrize(
    "message",
    [
        record(b"k", b"v", signed(FOREIGN, b"k", b"v"), 0),
        record(b"other", b"v", signed(NOW, b"k", b"v"), 0),
        record(b"k", b"other", signed(NOW, b"k", b"v"), 0),
        record(b"k", b"v", signed(NOW, b"k", b"v", topic="other"), 0),
        record(b"k", b"v", b"\xff", 0),
    ],
    ids=["another secret", "another key", "another value", "another topic", "no text"],
)
def test_a_record_that_no_known_secret_has_signed_does_not_count(message: ControlRecord) -> None:
    assert judged(ControlRecords("t", NOW, [FORMER]), message) == [WRONGLY_SIGNED]


def test_an_unsigned_record_counts_only_before_the_first_signed_one_of_its_partition() -> None:
    def unsigned(offset: int, partition: int = 0) -> ControlRecord:
        return record(b"k", b"%d" % offset, None, offset, partition)

    first = record(b"k", b"v", signed(NOW, b"k", b"v"), 1)

    assert judged(ControlRecords("t", NOW), unsigned(0), first, unsigned(2), unsigned(0, 1)) == ["", "", UNSIGNED, ""]


def test_a_wrongly_signed_record_does_not_end_the_time_of_unsigned_ones() -> None:
    wrong = record(b"k", b"v", signed(FOREIGN, b"k", b"v"), 0)

    assert judged(ControlRecords("t", NOW), wrong, record(b"k", b"v", None, 1)) == [WRONGLY_SIGNED, ""]


def test_a_repeated_record_does_not_count() -> None:
    message = record(b"k", b"v", signed(NOW, b"k", b"v"), 0)

    assert judged(ControlRecords("t", NOW), message, message) == ["", REPEATED]


def test_without_a_secret_every_record_counts_and_none_is_signed() -> None:
    records = ControlRecords("t")

    assert judged(records, record(b"k", b"v", signed(FOREIGN, b"k", b"v"), 0), record(b"k", b"v", None, 1)) == [
        "",
        "",
    ]
    assert records.headers(b"k", b"v") == {}


def test_a_refused_record_is_logged_once_with_its_place() -> None:
    records = ControlRecords("t", NOW)
    message = record(b"k", b"v", None, 7)

    records.refuse(message, "it is unsigned")
    records.refuse(message, "it is unsigned")

    assert records.problems == ["the record at offset 7 of partition 0 of topic 't' does not count: it is unsigned"]


def with_checkpoint(records: ControlRecords, *given: ControlRecord) -> list[ControlRecord]:
    """Returns the records, and behind them the checkpoint that an operator writes."""
    return [*given, *(one._replace(offset=len(given)) for one in records.checkpoints(given, 1))]


def test_behind_a_checkpoint_a_former_secret_may_be_forgotten() -> None:
    forged = record(b"k", b"forged", signed(FOREIGN, b"k", b"forged"), 1)
    given = [record(b"k", b"0", signed(FORMER, b"k", b"0"), 0), forged, record(b"k", b"2", signed(NOW, b"k", b"2"), 2)]
    written = with_checkpoint(ControlRecords("t", NOW, [FORMER]), *given)
    late = record(b"k", b"4", signed(FORMER, b"k", b"4"), 4)

    assert judged(ControlRecords("t", NOW), *written, late) == ["", REFUSED_BEFORE, "", WRONGLY_SIGNED]


@pytest.mark.parametrize("spoil", ["another record", "another secret", "a record less"])
def test_a_checkpoint_vouches_only_for_the_records_that_it_was_written_behind(spoil: str) -> None:
    given = [record(b"k", b"%d" % at, signed(FORMER, b"k", b"%d" % at), at) for at in range(2)]
    written = with_checkpoint(ControlRecords("t", FOREIGN if spoil == "another secret" else NOW, [FORMER]), *given)
    if spoil == "another record":
        written[1] = written[1]._replace(value=b"other")
    elif spoil == "a record less":
        del written[1]

    assert {*judged(ControlRecords("t", NOW), *written)} == {WRONGLY_SIGNED}


def test_a_record_from_before_a_checkpoint_is_not_repeated_behind_it() -> None:
    given = record(b"k", b"v", signed(NOW, b"k", b"v"), 0)
    written = with_checkpoint(ControlRecords("t", NOW), given)

    assert judged(ControlRecords("t", NOW), *written, given._replace(offset=2)) == ["", REPEATED]


def test_an_older_checkpoint_that_is_repeated_takes_nothing_back() -> None:
    records = ControlRecords("t", NOW, [FORMER])
    first = record(b"k", b"0", signed(FORMER, b"k", b"0"), 0)
    early = with_checkpoint(records, first)
    late = with_checkpoint(records, *early, record(b"k", b"2", signed(FORMER, b"k", b"2"), 2))
    repeated = early[1]._replace(offset=4)

    assert judged(ControlRecords("t", NOW), *late, repeated) == ["", ""]


def test_no_unsigned_record_counts_behind_the_checkpoint_of_an_empty_topic() -> None:
    (checkpoint,) = ControlRecords("t", NOW).checkpoints([], 1)

    assert judged(ControlRecords("t", NOW), checkpoint._replace(offset=0), record(b"k", b"v", None, 1)) == [UNSIGNED]


def test_a_process_without_the_secret_of_the_others_says_so() -> None:
    records = ControlRecords("t")
    records.require_secret()
    judged(records, record(b"k", b"v", signed(NOW, b"k", b"v"), 0))

    with pytest.raises(ConfigurationError, match="topic 't' has signed records: set BALANCE_PEER_SECRET"):
        records.require_secret()


def test_a_fold_from_the_beginning_needs_every_record_that_may_be_of_its_application() -> None:
    records = ControlRecords("t", NOW)
    judged(records, record(b"k", b"v", signed(NOW, b"k", b"v"), 0))
    records.require_all()
    for one, reason in records.judged([record(b"k", b"w", signed(FOREIGN, b"k", b"w"), 1)]):
        records.refuse(one, reason)

    with pytest.raises(
        ConfigurationError, match="offset 1 of partition 0 of topic 't' does not count: no known secret"
    ):
        records.require_all()
    unsigned = ControlRecords("t")
    judged(unsigned, record(b"k", b"v", signed(NOW, b"k", b"v"), 0))
    with pytest.raises(ConfigurationError, match="set BALANCE_PEER_SECRET"):
        unsigned.require_all()


def test_several_tasks_may_write_the_text_of_one_schema_and_only_if_they_sign_it() -> None:
    key, text = b"\xffschema/0011223344556677", b"{}"
    ours = record(key, text, signed(NOW, key, text), 0)

    written = [ours, ours._replace(offset=1), ours._replace(offset=2, signature=None)]

    assert judged(ControlRecords("t", NOW), *written) == ["", "", UNSIGNED]
