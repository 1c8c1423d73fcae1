"""What operators decide about dead letters: what makes sense, and the record that is kept of it for ever.

The task that owns a letter writes that record, in the transaction in which the decision takes effect. So what the topic
says was done was done, and a read model that is folded anew, whatever became of its changelog, does not count what was
discarded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from balance_service.engine.dead_letter import Letter, Status, is_final
from balance_service.engine.outputs import OF_THE_KEY
from balance_service.engine.records import Output
from balance_service.errors import InvalidInputError
from balance_service.kafka.log_reader import reader_to_end
from balance_service.model.keys import CONTROL_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from balance_service.avro.codec import AvroCodec
    from balance_service.kafka.topics import Topics
    from balance_service.settings import Settings


NO_LETTER = "there is no such dead letter, or it was closed more than seven days ago"
STAGE_PATTERN = "[a-zA-Z0-9._-]{1,249}"
_ID = re.compile(f"({STAGE_PATTERN})/([0-9]{{1,10}}):([0-9]{{1,18}})")
LETTER_ID_PATTERN = f"^{_ID.pattern}$"
MOST_REASON = 200
# Of one request.
MOST_IDS = 500
REASON_PATTERN = rf"^[^\s{CONTROL_CHARACTERS}][^{CONTROL_CHARACTERS}]{{0,{MOST_REASON - 1}}}$"
# JSON can say half of a character alone, which is no text. Not every dialect of patterns can.
_SURROGATE = re.compile("[\ud800-\udfff]")


class LetterId(NamedTuple):
    """Which record of which stage's source: `balance/1:42`."""

    stage: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.stage}/{self.partition}:{self.offset}"

    @staticmethod
    def parse(text: str) -> LetterId:
        """Raises InvalidInputError: it is no such id."""
        match = _ID.fullmatch(text)
        if match is None:
            raise InvalidInputError(f"{text[:100]!r} is no dead letter's id; an id is stage/partition:offset")
        return LetterId(match[1], int(match[2]), int(match[3]))


def reason_of(given: object) -> str:
    """The reason of a decision. Raises InvalidInputError: it is no text that can be kept."""
    if type(given) is not str or not re.fullmatch(REASON_PATTERN, given) or _SURROGATE.search(given):
        raise InvalidInputError(
            f"reason must be a text of 1 to {MOST_REASON} characters that begins with no blank and has no control "
            "character: it is kept with the decision"
        )
    return given


def closed_already(status: Status) -> str:
    """Why no decision makes sense about a letter that is closed with this status."""
    return f"it is {status.value} already"


class Decision(Enum):
    """What becomes of a letter by an operator's word."""

    REDRIVE = "redrive"
    """Its record is tried again at once."""
    DISCARD = "discard"
    """Its record is never applied."""

    @property
    def status(self) -> Status:
        """Of the letter afterwards."""
        return Status.SCHEDULED if self is Decision.REDRIVE else Status.DISCARDED

    @property
    def closes_as(self) -> Status:
        """The status of the letter once the decision has closed it; a redriven one is applied a moment later."""
        return Status.APPLIED if self is Decision.REDRIVE else Status.DISCARDED


class Verdict(NamedTuple):
    """A decision, who made it, and why."""

    decision: Decision
    by: str
    reason: str

    def refusal(self, letter: Letter | None) -> str | None:
        """Why it makes no sense about a letter; None if it does."""
        if letter is None:
            return NO_LETTER
        if not letter.status.is_open:
            return closed_already(letter.status)
        if self.decision is Decision.DISCARD:
            return None
        if letter.status is Status.BEHIND:
            return "it waits behind an earlier record of its key: redrive or discard that"
        if is_final(letter.cause):
            return f"its cause, {letter.cause}, never goes away: discard it"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """The decisions about one stage's letters, in the topic that has those of all stages."""

    topic: str
    codec: AvroCodec
    stage: str
    source_topic_id: str

    def output(self, partition: int, letter: Letter, verdict: Verdict, now_ms: int) -> Output:
        """The record of one."""
        letter_id = str(LetterId(self.stage, partition, letter.offset))
        record = {
            "id": letter_id,
            "decision": verdict.decision.value,
            "cause": letter.cause,
            "decidedAt": datetime.fromtimestamp(now_ms / 1000, UTC),
            "by": verdict.by,
            "reason": verdict.reason,
            "sourceTopicId": self.source_topic_id,
        }
        frame = self.codec.encode(record)
        return Output(letter.offset, self.topic, OF_THE_KEY, letter_id.encode(), frame, now_ms, [])

    def letters_before(
        self, settings: Settings, topics: Topics, partitions: Iterable[int], now_ms: int
    ) -> dict[int, dict[int, Letter]]:
        """By partition and offset, the letters that were decided about, as a fold from the beginning is to know them.

        What was discarded is not applied. What was redriven was applied later than it came: where it cannot be applied
        as it comes, it is to be tried again.

        Raises:
            RetriableError: the broker does not answer.
        """
        found: dict[int, dict[int, Letter]] = {partition: {} for partition in partitions}
        topic = topics.find(self.topic)
        if topic is None:
            return found
        # Behind what another task has open, there may be a decision of ours.
        with reader_to_end(settings, topics, topic, waits_for_open=True) as reader:
            for message in reader:
                record = self.codec.decode(message.value() or b"")
                letter_id = LetterId.parse(record["id"])
                is_ours = letter_id.stage == self.stage and record["sourceTopicId"] == self.source_topic_id
                if is_ours and letter_id.partition in found:
                    status = Decision(record["decision"]).closes_as
                    letter = Letter(letter_id.offset, record["cause"], Status.WAITING, 0, now_ms, -1, None)
                    found[letter_id.partition][letter_id.offset] = letter.closed(status, now_ms)
        return found
