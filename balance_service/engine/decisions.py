"""Operators' decisions about dead letters: which are allowed, and the topic that keeps them permanently.

The task that owns a dead letter writes the decision in the transaction that carries it out, so the topic contains
exactly the decisions that took effect. A read model that is rebuilt after the loss of its changelog therefore still
skips discarded records.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from balance_service.avro.schemas import load_schema
from balance_service.engine.dead_letter import SET_ASIDE, Letter, Status, is_final, kept_key
from balance_service.engine.records import BY_KEY, MISPLACED, DeadLetter, Output
from balance_service.errors import InvalidInputError, PoisonRecordError, UnreadableRecordError
from balance_service.kafka.log_reader import reader_to_end
from balance_service.kafka.messages import offset_of
from balance_service.kafka.signing import ControlRecord, ControlRecords
from balance_service.model.keys import CONTROL_CHARACTERS
from balance_service.process.runtime import now_ms
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from confluent_kafka import Message

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.own_schemas import OwnSchemas
    from balance_service.kafka.topics import Topic, Topics
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings


TRY_AGAIN = "; try again"
"""The end of a refusal that passes by itself."""
NO_LETTER = "there is no such dead letter, or it was closed more than seven days ago"
STAGE_PATTERN = "[a-zA-Z0-9._-]{1,249}"
_ID = re.compile(f"({STAGE_PATTERN})/([0-9]{{1,10}}):([0-9]{{1,18}})")
LETTER_ID_PATTERN = f"^{_ID.pattern}$"
MAX_REASON_CHARACTERS = 200
# Per request.
MAX_IDS = 500
REASON_PATTERN = rf"^[^\s{CONTROL_CHARACTERS}][^{CONTROL_CHARACTERS}]{{0,{MAX_REASON_CHARACTERS - 1}}}$"
# JSON can contain an unpaired surrogate. Not every regular expression dialect can match one in REASON_PATTERN.
_SURROGATE = re.compile("[\ud800-\udfff]")


class LetterId(NamedTuple):
    """Names a dead letter by stage, partition and offset of its record in the stage's source: `balance/1:42`."""

    stage: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.partition}:{self.offset}"

    @staticmethod
    def parse(text: str) -> LetterId:
        """Raises InvalidInputError for any other text."""
        match = _ID.fullmatch(text)
        if match is None:
            raise InvalidInputError(f"{text[:100]!r} is not the id of a dead letter; an id is stage/partition:offset")
        return LetterId(match[1], int(match[2]), int(match[3]))


def reason_of(given: object) -> str:
    """Returns the reason of a decision. Raises InvalidInputError if it is not a text that can be stored."""
    if type(given) is not str or not re.fullmatch(REASON_PATTERN, given) or _SURROGATE.search(given):
        raise InvalidInputError(
            f"reason must be a text of 1 to {MAX_REASON_CHARACTERS} characters that does not begin with white space "
            "and contains no control characters"
        )
    return given


NO_PARTITION = "its topic has no such partition"
IS_LETTER = "it is a dead letter already: redrive or discard it"


def closed_already(status: Status) -> str:
    """Returns why a dead letter that is closed with this status cannot be decided about."""
    return f"it is {status.value} already"


class Decision(Enum):
    REDRIVE = "redrive"
    """Retries the record at once."""
    DISCARD = "discard"
    """Closes the dead letter; its record is never applied."""
    SET_ASIDE = "setAside"
    """Makes a dead letter of the record at a position that does not move."""

    @property
    def status(self) -> Status:
        """The status of the dead letter once the decision is written."""
        return {
            Decision.REDRIVE: Status.SCHEDULED,
            Decision.DISCARD: Status.DISCARDED,
            Decision.SET_ASIDE: Status.WAITING,
        }[self]

    @property
    def leaves(self) -> Status:
        """The status of the dead letter after the decision took effect: a redriven record is applied shortly after."""
        return Status.APPLIED if self is Decision.REDRIVE else self.status

    @property
    def done_already(self) -> str:
        """Why the decision is refused if it was carried out before."""
        return IS_LETTER if self is Decision.SET_ASIDE else closed_already(self.leaves)


def discard_warning(cause: str, status: Status) -> str:
    """Returns the condition under which a dead letter may be discarded; empty if it has none, or is closed."""
    if cause != MISPLACED or not status.is_open:
        return ""
    return (
        "discard it only if its event was produced again by a producer with the right partitioner; otherwise a rebuild "
        "with the partitioner of its producer applies it"
    )


class Verdict(NamedTuple):
    """A decision, the client that made it, and its reason."""

    decision: Decision
    by: str
    reason: str

    def refusal(self, letter: Letter | None) -> str | None:
        """Returns why the decision is not possible for a dead letter, or None if it is."""
        if letter is not None and not letter.status.is_open:
            return closed_already(letter.status)
        if self.decision is Decision.SET_ASIDE:
            return None if letter is None else IS_LETTER
        if letter is None:
            return NO_LETTER
        if self.decision is Decision.DISCARD:
            return None
        if letter.status is Status.BEHIND:
            return "it waits behind an earlier record of its key: redrive or discard that record"
        if letter.cause == MISPLACED:
            return (
                f"only a rebuild with another partitioner can apply it ({letter.detail}); if the present one is right, "
                "discard it"
            )
        if is_final(letter.cause):
            return f"its cause, {letter.cause}, never goes away: discard it"
        return None

    def set_aside(self, message: Message) -> DeadLetter:
        """Returns a record of the source as the dead letter that the decision makes of it."""
        detail = f"{self.by} set it aside: {self.reason}"
        key, value = message.key(), message.value()
        return DeadLetter(offset_of(message), message.timestamp()[1], key, value, SET_ASIDE, detail)


@dataclass(frozen=True, slots=True)
class DeadLetterDecision(Struct):
    """A decision about the dead letter with an id, as the topic has it."""

    id: str
    decision: Decision
    cause: str
    decided_at: datetime
    by: str
    reason: str
    source_topic_id: str
    key: bytes | None = None

    @property
    def letter_id(self) -> LetterId:
        """Raises InvalidInputError if the id is none."""
        return LetterId.parse(self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLog:
    """The decisions about one stage's dead letters. All stages share the topic."""

    records: ControlRecords
    codec: AvroCodec
    stage: str
    source_topic_id: str

    def output(self, partition: int, letter: Letter | DeadLetter, verdict: Verdict, now_ms: int) -> Output:
        """Returns the record of a decision."""
        letter_id = str(LetterId(self.stage, partition, letter.offset))
        at = datetime.fromtimestamp(now_ms / 1000, UTC)
        decided = DeadLetterDecision(
            letter_id,
            verdict.decision,
            letter.cause,
            at,
            verdict.by,
            verdict.reason,
            self.source_topic_id,
            kept_key(letter.key),
        )
        key, frame = letter_id.encode(), self.codec.encode(decided.record())
        headers: list[tuple[str, bytes | None]] = [*self.records.headers(key, frame).items()]
        return Output(letter.offset, self.records.topic, BY_KEY, key, frame, now_ms, headers)

    def decided_letters(
        self, settings: Settings, topics: Topics, partitions: Iterable[int], now_ms: int
    ) -> dict[int, dict[int, Letter]]:
        """Returns the dead letters with decisions, by partition and offset, for a fold from the source's beginning.

        Discarded ones, and those that were set aside and not redriven: the fold skips their records. Applied ones: a
        record that was redriven was applied out of order; if it fails in its place in the source, its dead letter is
        retried at once.

        Raises:
            RetriableError: the broker does not respond.
        """
        found: dict[int, dict[int, Letter]] = {partition: {} for partition in partitions}
        for decided in self.read(settings, topics):
            letter_id = decided.letter_id
            is_ours = letter_id.stage == self.stage and decided.source_topic_id == self.source_topic_id
            if is_ours and letter_id.partition in found:
                status = decided.decision.leaves
                letter = Letter(letter_id.offset, decided.cause, Status.WAITING, 0, now_ms, -1, decided.key)
                found[letter_id.partition][letter_id.offset] = (
                    letter if status.is_open else letter.closed(status, now_ms)
                )
        return found

    def end(self, topics: Topics) -> tuple[str, tuple[int, ...]] | None:
        """Returns the topic's id and the ends of its partitions, which change with its records; None without a topic.

        Raises:
            RetriableError: the broker does not respond.
        """
        if (topic := topics.find(self.records.topic)) is None:
            return None
        ends = topics.offsets(topic.name, range(topic.partitions))
        return topic.topic_id, tuple(end for _, end in sorted(ends.items()))

    def read(self, settings: Settings, topics: Topics) -> Iterator[DeadLetterDecision]:
        """Yields the decisions that count, of all stages, in the order of the topic's partitions.

        Raises:
            RetriableError: the broker does not respond.
        """
        topic = topics.find(self.records.topic)
        if topic is None:
            return
        # Decisions of this stage may follow another task's open transaction.
        with reader_to_end(settings, topics, topic, waits_for_open=True) as reader:
            read = [ControlRecord.of(message) for message in reader]
        for one, reason in self.records.judged(read):
            if reason:
                self.records.refuse(one, reason)
                continue
            if self.codec.learn(one.key, one.value):
                continue
            try:
                decided = DeadLetterDecision.of(self.codec.decode_foreign(one.value))
                LetterId.parse(decided.id)
            except (PoisonRecordError, UnreadableRecordError, InvalidInputError, ValueError) as error:
                self.records.refuse(one, f"it cannot be read: {error}")
                continue
            yield decided


def letters_for_a_fold(
    settings: Settings, topics: Topics, schemas: OwnSchemas, stage: Stage, source: Topic
) -> dict[int, dict[int, Letter]]:
    """Returns `DecisionLog.decided_letters` of all partitions, for a fold outside of an instance.

    Raises:
        ConfigurationError: a decision may be of this application, and cannot be verified here. Without it, a discarded
            record would count.
        RetriableError: the broker or the registry does not respond.
    """
    topic = settings.dead_letter_decisions_topic
    records, codec = ControlRecords.of(settings, topic), schemas.codec(topic, load_schema("DeadLetterDecision"))
    decisions = DecisionLog(records=records, codec=codec, stage=stage.identity, source_topic_id=source.topic_id)
    found = decisions.decided_letters(settings, topics, range(source.partitions), now_ms())
    records.require_all()
    return found
