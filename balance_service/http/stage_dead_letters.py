"""Dead letters of one stage, on all instances: lists them, reads their records, and carries out decisions.

A peer answers with dead letters only. Records may be larger than an answer of a peer, so the instance that the client
asked reads them from the source topic.
"""

from __future__ import annotations

import asyncio
import base64
import heapq
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE

from balance_service import api
from balance_service.avro.codec import UndecodableError
from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import NO_LETTER, NO_PARTITION, Decision, LetterId, Verdict, discard_warning
from balance_service.errors import (
    BalanceServiceError,
    InvalidInputError,
    NotAuthorizedError,
    RetriableError,
    StoreFullError,
    TaskMigratedError,
)
from balance_service.formats.any_record import AnyRecordReader
from balance_service.http.answer import MALFORMED, compact_json, unavailable
from balance_service.http.peers.proxy import split_to_fit
from balance_service.http.scan import MAX_BYTES
from balance_service.http.scheduling import in_one_step
from balance_service.kafka.messages import readable_headers, shown_headers, text_or_base64
from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from confluent_kafka import Message

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import Letters
    from balance_service.http.peers.trust import Peer
    from balance_service.http.routing import LocalCopy
    from balance_service.http.scan import Steps, View
    from balance_service.http.scatter import Scatter
    from balance_service.http.scheduling import FairScheduler
    from balance_service.http.shares import Asker
    from balance_service.model.keys import KeyType

T = TypeVar("T")
UNREACHABLE = "no instance can be reached for its partition now; send the decision again"
_STEP = 200
_REDRIVE = Verdict(Decision.REDRIVE, "", "")
# A page ends here even if it is not full, because few dead letters have the cause or status: no page takes long.
_MOST_LOOKED_AT = 20_000
# A page whose records take longer to read ends early: the client's deadline may be near.
_PAGE_SECONDS = 0.3
_ATTEMPTS = 2
_AGAIN_SECONDS = 0.3
_MISDIRECTED = 421
# A decision waits for a commit, a minute at worst. asyncio's own threads, few of them, also reload certificates and
# look up names.
_DECIDING = ThreadPoolExecutor(16, "decisions")

Records = Callable[[int, Sequence[int], float, int], tuple[Sequence[int], Mapping[int, "Message"]]]
"""`records_left_at`: partition, offsets, seconds, bytes → the offsets that it looked up, and their records."""
Decide = Callable[[int, Sequence[int], Verdict], Mapping[int, str]]
"""Partition, offsets, verdict → the reasons for refusals by offset; carries out the rest. Blocks."""


class LettersPage(NamedTuple):
    """Dead letters as JSON objects, and the id after which the next page begins; None if there are no more."""

    letters: Sequence[Mapping[str, Any]]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterScan:
    """A `Scan` of the dead letters of a stage, by partition and offset, optionally of one cause or status.

    A body is `{"deadLetters": […], "next": …}`.
    """

    stage: str
    read_model: str
    key_type: KeyType
    """The type of the source's keys."""
    letters: Letters = field(repr=False)
    cause: str | None = None
    status: Status | None = None
    start: tuple[int, int] = (0, 0)
    """Partition and offset."""
    limit: int = 100

    def parameters(self) -> dict[str, str]:
        given = {"stage": self.stage, "limit": str(self.limit), "from": f"{self.start[0]}:{self.start[1]}"}
        if self.cause is not None:
            given["cause"] = self.cause
        if self.status is not None:
            given["status"] = self.status.value
        return given

    def read(self, copies: Sequence[LocalCopy], view: View) -> Steps[LettersPage]:  # noqa: ARG002
        shown: list[dict[str, Any]] = []
        last, size = "", 0
        for looked_at, (partition, letter) in enumerate(self._from(copies)):
            if looked_at % _STEP == 0:
                yield
            if len(shown) == self.limit or looked_at == _MOST_LOOKED_AT:
                return LettersPage(shown, last)
            name = str(LetterId(self.stage, partition, letter.offset))
            if self.cause in (None, letter.cause) and self.status in (None, letter.status):
                one = self._shown(name, letter)
                # A control character of a key becomes six bytes of JSON.
                size += len(compact_json(one))
                if shown and size > MAX_BYTES:
                    return LettersPage(shown, last)
                shown.append(one)
            last = name
        return LettersPage(shown, None)

    def parse(self, body: str) -> LettersPage:
        page = json.loads(body)
        return LettersPage(page["deadLetters"], page["next"])

    def merge(self, parts: Sequence[LettersPage]) -> LettersPage:
        # An instance whose page is cut short may have dead letters that precede those of other pages.
        known_up_to = min((LetterId.parse(page.next) for page in parts if page.next), default=None)
        ordered = heapq.merge(*(page.letters for page in parts), key=_id_of)
        # Parses every id, so a page without one raises an error here.
        by_id = ((_id_of(letter), letter) for letter in ordered)
        known = [letter for its_id, letter in by_id if known_up_to is None or its_id <= known_up_to]
        is_all = known_up_to is None and len(known) <= self.limit
        last = known[: self.limit][-1]["id"] if len(known) > self.limit else known_up_to
        return LettersPage(known[: self.limit], None if is_all else str(last))

    def encode(self, part: LettersPage) -> str:
        return compact_json({"deadLetters": part.letters, "next": part.next})

    def _from(self, copies: Sequence[LocalCopy]) -> Iterator[tuple[int, Letter]]:
        for copy in sorted(copies, key=lambda copy: copy.partition):
            if copy.partition < self.start[0]:
                continue
            start = self.start[1] if copy.partition == self.start[0] else 0
            while True:
                some = self.letters.page(copy.view, start, _STEP)
                yield from ((copy.partition, letter) for letter in some)
                if len(some) < _STEP:
                    break
                start = some[-1].offset + 1

    def _shown(self, name: str, letter: Letter) -> dict[str, Any]:
        return {
            "id": name,
            "model": self.read_model,
            "cause": letter.cause,
            "detail": letter.detail,
            "status": letter.status.value,
            "attempt": letter.attempt,
            "failedAt": iso_time(letter.written_ms),
            "dueAt": iso_time(letter.due_ms) if letter.status is Status.SCHEDULED else None,
            "redriveRefused": _REDRIVE.refusal(letter) or "",
            "discardWarning": discard_warning(letter.cause, letter.status),
            "key": None,
            **self._key(letter.key),
        }

    def _key(self, key: bytes | None) -> dict[str, Any]:
        with suppress(InvalidInputError):
            return shown_key(None if key is None else self.key_type.stored(key), self.key_type)
        return text_or_base64("key", key)


def shown_key(key: bytes | None, key_type: KeyType) -> dict[str, Any]:
    """Returns a state's key as an answer shows it: as text, or under another name if it is none."""
    if key is not None and not key_type.is_text:
        with suppress(InvalidInputError):
            return {"key": key_type.text(key)}
    return text_or_base64("key", key)


def _id_of(letter: Mapping[str, Any]) -> LetterId:
    return LetterId.parse(letter["id"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecords:
    """Reads the records of one stage's dead letters from the source topic."""

    records: Records = field(repr=False)
    registry: SchemaRegistry
    scheduler: FairScheduler
    timeout_seconds: float

    async def added_to(self, letters: Sequence[Mapping[str, Any]], asker: Asker) -> list[dict[str, Any]]:
        """Returns the first of the dead letters with `headers` and `valueBase64`: as many as fit a page, at least one.

        Raises:
            Problem: 503, the broker does not respond, or the client has used up its share.
        """
        return await self._run(asker, self._read, letters) if letters else []

    async def decoded(self, letter: Mapping[str, Any], asker: Asker) -> Mapping[str, Any]:
        """Returns a dead letter, which has its record, with `decoded` and `problem`.

        Raises:
            Problem: 503, the client has used up its share.
        """
        return {**letter, **await self._run(asker, self._decode, letter)}

    async def _run(self, asker: Asker, work: Callable[..., T], *arguments: object) -> T:
        try:
            async with (
                asyncio.timeout(self.timeout_seconds),
                self.scheduler.admitted(asker, self.timeout_seconds / 2),
            ):
                return await self.scheduler.run(asker, in_one_step(work, *arguments))
        except TimeoutError as error:
            raise unavailable(f"the records of dead letters were not read within {self.timeout_seconds:g} s") from error
        except RetriableError as error:
            raise unavailable(f"the records of dead letters cannot be read now: {error}") from error

    def _read(self, letters: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        shown: list[dict[str, Any]] = []
        size, until = 0, time.monotonic() + _PAGE_SECONDS
        for partition, of_it in groupby(letters, key=lambda letter: _id_of(letter).partition):
            if shown and time.monotonic() > until:
                return shown
            by_offset = {_id_of(letter).offset: letter for letter in of_it}
            looked_for, records = self.records(partition, [*by_offset], until - time.monotonic(), MAX_BYTES)
            for offset in looked_for:
                one = {**by_offset[offset], **_content_of(records.get(offset))}
                size += len(compact_json(one))
                if shown and size > MAX_BYTES:
                    return shown
                shown.append(one)
            if len(looked_for) < len(by_offset):
                return shown
        return shown

    def _decode(self, letter: Mapping[str, Any]) -> dict[str, Any]:
        if letter["valueBase64"] is None:
            return {"decoded": None, "problem": ""}
        headers = [(header["name"], _bytes_of(header)) for header in letter["headers"] or ()]
        # Another time, the registry may know a schema that it does not know now.
        records = AnyRecordReader(self.registry)
        try:
            record, value = records.read(base64.b64decode(letter["valueBase64"]), headers)
        except (UndecodableError, RetriableError) as error:
            return {"decoded": None, "problem": str(error)}
        return {"decoded": {"record": record, "value": value}, "problem": ""}


def _bytes_of(header: Mapping[str, Any]) -> bytes | None:
    if "valueBase64" in header:
        return base64.b64decode(header["valueBase64"])
    value: str | None = header["value"]
    return None if value is None else value.encode()


def _content_of(record: Message | None) -> dict[str, Any]:
    value = None if record is None else record.value()
    kind, at_ms = (TIMESTAMP_NOT_AVAILABLE, -1) if record is None else record.timestamp()
    return {
        "recordAt": None if kind == TIMESTAMP_NOT_AVAILABLE else iso_time(at_ms),
        "headers": None if record is None else shown_headers(readable_headers(record)),
        "valueBase64": None if value is None else base64.b64encode(value).decode(),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDeadLetters:
    """The dead letters of one stage.

    `scan` has neither a start nor a condition. `decide` is for partitions that this instance owns.
    """

    scan: DeadLetterScan
    scatter: Scatter
    records: SourceRecords
    decide: Decide

    async def one(self, letter_id: LetterId, asker: Asker) -> Mapping[str, Any] | None:
        """Returns a dead letter with its decoded record; None if there is none. Raises Problem 503."""
        if letter_id.partition >= self.scatter.partitions:
            return None
        scan = replace(self.scan, start=(letter_id.partition, letter_id.offset), limit=1)
        found, _, _ = await self._listed(scan, asker, [letter_id.partition])
        letters = [one for one in found if one["id"] == str(letter_id)]
        letter = next(iter(await self.records.added_to(letters, asker)), None)
        return None if letter is None else await self.records.decoded(letter, asker)

    async def page(
        self, scan: DeadLetterScan, asker: Asker, *, is_partial: bool = False
    ) -> tuple[list[dict[str, Any]], str | None, Sequence[int]]:
        """Returns dead letters with their records, the id after which the next page begins, and missing partitions.

        Args:
            is_partial: whether the page may lack partitions.

        Raises:
            Problem: 503, a partition cannot be read, or the client's share is used up.
        """
        found, following, missing = await self._listed(scan, asker, is_partial=is_partial)
        letters = await self.records.added_to(found, asker)
        return letters, letters[-1]["id"] if len(letters) < len(found) else following, missing

    async def _listed(
        self, scan: DeadLetterScan, asker: Asker, partitions: Iterable[int] | None = None, *, is_partial: bool = False
    ) -> tuple[Sequence[Mapping[str, Any]], str | None, Sequence[int]]:
        found = await self.scatter.gather("deadLetters", scan, asker, partitions=partitions, is_partial=is_partial)
        return found.content.letters, found.content.next, found.missing

    async def decided(self, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str]:
        """Has the owner of the partition carry out a decision. Returns the reasons for refusals, by offset."""
        if partition >= self.scatter.partitions:
            return dict.fromkeys(offsets, NO_PARTITION if verdict.decision is Decision.SET_ASIDE else NO_LETTER)
        deadline = time.monotonic() + self.scatter.timeout_seconds
        outcome = _Outcome(offsets, verdict)
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_AGAIN_SECONDS)
            try:
                refused = await self.decided_here(partition, outcome.left, verdict)
            except BalanceServiceError:
                outcome.unknown(outcome.left)
                refused = None
            if refused is None:
                await self._decided_by_peers(partition, outcome, deadline)
            else:
                outcome.known(outcome.left, refused)
            if not outcome.left:
                break
        return outcome.refused | dict.fromkeys(outcome.left, UNREACHABLE)

    async def decided_here(self, partition: int, offsets: Sequence[int], verdict: Verdict) -> Mapping[int, str] | None:
        """Carries out a decision on this instance. Returns None if it does not own the partition.

        Raises:
            BalanceServiceError: the outcome is unknown.
        """
        copy = self.scatter.routing.copy(partition)
        if copy is None or not self.scatter.routing.is_owned(copy):
            return None
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_DECIDING, self.decide, partition, offsets, verdict)
        except (NotAuthorizedError, StoreFullError) as error:
            return dict.fromkeys(offsets, str(error))
        except TaskMigratedError:
            return None

    async def _decided_by_peers(self, partition: int, outcome: _Outcome, deadline: float) -> None:
        routing = self.scatter.routing
        for peer, seconds, _ in routing.in_turn(partition, deadline, takes_standbys=False):
            if await self._decided_by(peer, partition, outcome, time.monotonic() + seconds):
                routing.believe(partition, peer)
                return
            routing.doubt(partition, peer)

    async def _decided_by(self, peer: Peer, partition: int, outcome: _Outcome, deadline: float) -> bool:
        """Sends what is left to a peer. Returns whether it answered for everything."""
        verdict = outcome.verdict
        path = f"{api.DEAD_LETTERS}.{verdict.decision.value}"
        common = {"stage": self.scan.stage, "partitions": str(partition), "by": verdict.by, "reason": verdict.reason}
        for asked, parameters in split_to_fit("offsets", outcome.left, path, common):
            left = max(0.0, deadline - time.monotonic())
            try:
                answer = await self.scatter.proxy.get(
                    peer, path, parameters, self.scatter.routing.address, left, client=verdict.by, method="POST"
                )
            except RetriableError:
                outcome.unknown(asked)
                return False
            if answer.status != 200:
                if answer.status != _MISDIRECTED:
                    outcome.unknown(asked)
                return False
            try:
                refused = {int(offset): str(why) for offset, why in json.loads(answer.body)["refused"].items()}
            except MALFORMED:
                outcome.unknown(asked)
                return False
            outcome.known(asked, refused)
        return True


class _Outcome:
    """The outcome of a decision about dead letters of one partition, over several requests to possible owners.

    An owner that did not respond may have carried out the decision. A dead letter that is then found as the decision
    leaves it counts as carried out.
    """

    def __init__(self, offsets: Sequence[int], verdict: Verdict) -> None:
        self.verdict = verdict
        self.left = list(offsets)
        """Offsets for which no owner has answered."""
        self.refused: dict[int, str] = {}
        """Reasons for refusals, by offset."""
        self._unknown: set[int] = set()
        self._is_done = verdict.decision.done_already

    def known(self, offsets: Sequence[int], refused: Mapping[int, str]) -> None:
        """An owner answered for `offsets`, and refused some."""
        for offset in offsets:
            why = refused.get(offset)
            if why is not None and not (offset in self._unknown and why == self._is_done):
                self.refused[offset] = why
        self.left = [offset for offset in self.left if offset not in offsets]

    def unknown(self, offsets: Sequence[int]) -> None:
        """An owner received a request for `offsets`, and may or may not have carried it out."""
        self._unknown.update(offsets)
