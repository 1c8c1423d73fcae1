"""HMAC signatures by the shared secret; directory records with and without a valid signature."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.cluster.signatures import (
    CLOCKS_AGREE_SECONDS,
    FAREWELL,
    RecordSignatures,
    UntrustedRecordError,
)
from balance_service.kafka.signing import HEADER, SharedSecret
from tests.support.fakes import Clock

SECRET = SharedSecret("a secret of all instances")
PARTS = st.lists(st.binary(max_size=12), max_size=4)
RECORD = b"\0\0\0\0\x07what an instance says"


@given(st.text(min_size=1), PARTS)
def test_a_signature_is_the_hmac_of_all_parts_with_their_lengths(secret: str, parts: list[bytes]) -> None:
    message = b"".join(b"%d:" % len(part) + part for part in [b"purpose", *parts])

    assert (
        SharedSecret(secret).sign(b"purpose", *parts) == hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()
    )


@given(PARTS, PARTS)
def test_different_parts_have_different_signatures(parts: list[bytes], others: list[bytes]) -> None:
    assert SECRET.has_signed(SECRET.sign(b"purpose", *parts), b"purpose", *others) == (parts == others)


def test_a_signature_is_valid_for_one_purpose_only() -> None:
    assert not SECRET.has_signed(SECRET.sign(b"one purpose", b"x"), b"another", b"x")


@given(st.text(st.characters(exclude_categories=[]), max_size=70))
def test_a_malformed_signature_is_invalid(signature: str) -> None:
    assert not SECRET.has_signed(signature, b"purpose", b"x")


class Instances:
    """One that writes and one that reads, and their clocks."""

    def __init__(self, secret: SharedSecret | None = SECRET, topic: str = "servers") -> None:
        self.writers_clock, self.readers_clock = Clock(1000.0), Clock(1000.0)
        self.writer = RecordSignatures(secret, topic, lambda: int(self.writers_clock() * 1000))
        self.reader = RecordSignatures(SECRET, "servers", lambda: int(self.readers_clock() * 1000))

    def write(self, value: bytes | None = RECORD, address: str = "a:1") -> bytes | None:
        return self.writer.sign(address, value).get(HEADER)

    def read(
        self, signature: str | bytes | None, value: bytes | None = RECORD, address: str = "a:1", run: str = "i1"
    ) -> None:
        signed_ms = self.reader.check(address, value, signature)
        self.reader.check_order(address, FAREWELL if value is None else run, signed_ms)

    def refusal(self, signature: str | bytes | None, value: bytes | None = RECORD) -> str:
        with pytest.raises(UntrustedRecordError) as caught:
            self.read(signature, value)
        return caught.value.reason


@pytest.mark.parametrize("value", [RECORD, None])
def test_a_record_and_a_farewell_of_an_instance_are_accepted(value: bytes | None) -> None:
    instances = Instances()

    instances.read(instances.write(value), value)


@pytest.mark.shows("peers")
@given(st.data())
def test_a_record_with_any_changed_byte_is_refused(data: st.DataObject) -> None:
    instances = Instances()
    signature = instances.write()
    assert signature is not None
    parts = [b"a:1", RECORD, signature]
    which = data.draw(st.integers(0, 2))
    at = data.draw(st.integers(0, len(parts[which]) - 1))
    changed = bytearray(parts[which])
    changed[at] ^= data.draw(st.integers(1, 255))
    forged = [*parts[:which], bytes(changed), *parts[which + 1 :]]

    with pytest.raises(UntrustedRecordError):
        instances.reader.check(forged[0].decode("latin-1"), forged[1], forged[2])
    instances.reader.check("a:1", RECORD, signature)


@given(st.none() | st.binary(max_size=100) | st.text(max_size=100))
def test_a_malformed_signature_is_refused_as_unsigned(signature: str | bytes | None) -> None:
    assert Instances().refusal(signature) == "unsigned"


def test_the_signature_of_a_record_does_not_sign_a_farewell() -> None:
    instances = Instances()

    assert instances.refusal(instances.write(), None) == "wrongly signed"


def test_a_record_of_another_secret_or_topic_is_refused_with_the_setting_to_correct() -> None:
    for other in (Instances(SharedSecret("another")), Instances(topic="servers-of-others")):
        with pytest.raises(UntrustedRecordError, match="BALANCE_PEER_SECRET") as caught:
            other.reader.check("a:1", RECORD, other.write())
        assert caught.value.reason == "wrongly signed"


def test_a_replayed_record_is_refused() -> None:
    instances = Instances()
    first, second = instances.write(), instances.write()

    instances.read(first)
    assert instances.refusal(first) == "repeated"
    instances.read(second)
    assert instances.refusal(first) == "repeated"
    instances.read(instances.write(address="b:1"), address="b:1")


def test_two_runs_under_one_address_are_both_accepted_although_one_clock_is_behind() -> None:
    instances = Instances()
    instances.read(instances.write(), run="ahead")
    behind = RecordSignatures(SECRET, "servers", lambda: int(instances.writers_clock() * 1000) - 5_000)
    said = behind.sign("a:1", RECORD)[HEADER]

    instances.read(said, run="behind")

    with pytest.raises(UntrustedRecordError, match="repeated"):
        instances.read(said, run="behind")


def test_an_older_record_is_refused_after_a_farewell() -> None:
    instances = Instances()
    before = instances.write()
    instances.read(instances.write(None), None)

    assert instances.refusal(before) == "repeated"


@pytest.mark.parametrize("late", [-CLOCKS_AGREE_SECONDS, 0, CLOCKS_AGREE_SECONDS])
def test_clocks_may_differ_by_seconds(late: float) -> None:
    instances = Instances()
    instances.readers_clock.now += late

    instances.read(instances.write())


@pytest.mark.parametrize("late", [-CLOCKS_AGREE_SECONDS - 0.1, CLOCKS_AGREE_SECONDS + 0.1, 1e9])
def test_an_outdated_or_future_record_is_refused(late: float) -> None:
    instances = Instances()
    instances.readers_clock.now += late

    assert instances.refusal(instances.write()) == "not of now"


def test_an_instance_whose_clock_was_an_hour_ahead_is_accepted_again_at_once() -> None:
    instances = Instances()
    instances.writers_clock.now += 3600
    instances.readers_clock.now += 3600
    instances.read(instances.write())

    instances.writers_clock.now -= 3600
    instances.readers_clock.now -= 3600

    instances.read(instances.write())


def test_an_instance_whose_clock_is_set_back_stays_accepted() -> None:
    instances = Instances()
    for _ in range(3):
        instances.read(instances.write())
        instances.writers_clock.now -= 5


def test_without_a_secret_no_record_is_signed_and_all_are_accepted() -> None:
    instances = Instances(secret=None)

    assert instances.write() is None
    for signature in (None, b"x"):
        instances.writer.check("a:1", RECORD, signature)


def test_the_text_of_a_schema_is_signed_for_its_key_and_topic_permanently() -> None:
    clock = Clock()
    ours = RecordSignatures(SECRET, "servers", lambda: int(clock.now * 1000))
    signature = ours.sign_text(b"key", b"text")[HEADER]
    clock.now += 10 * 365 * 86_400

    assert ours.has_signed_text(b"key", b"text", signature)
    assert not ours.has_signed_text(b"key", b"another text", signature)
    assert not ours.has_signed_text(b"another key", b"text", signature)
    assert not ours.has_signed_text(b"key", b"text", None)
    assert not RecordSignatures(SECRET, "others").has_signed_text(b"key", b"text", signature)
    assert not RecordSignatures(SharedSecret("another secret"), "servers").has_signed_text(b"key", b"text", signature)


def test_without_a_secret_every_text_is_believed() -> None:
    signatures = RecordSignatures(None, "servers")

    assert signatures.sign_text(b"key", b"text") == {}
    assert signatures.has_signed_text(b"key", b"text", None)
