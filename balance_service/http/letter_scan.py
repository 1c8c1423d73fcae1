"""Dead letters of one stage, as the local stores know them; their records are in the source."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import LetterId
from balance_service.http.answer import compact_json
from balance_service.http.scan import MAX_BYTES
from balance_service.kafka.messages import text_or_base64

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import Letters
    from balance_service.http.routing import LocalCopy
    from balance_service.http.scan import Render, Steps, View
    from balance_service.model.keys import KeyType

_STEP = 200
_NUMBER_BYTES = 8
# Where few are of a cause or status, a page ends before it is full: no page takes long.
_MOST_LOOKED_AT = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterScan:
    """The letters of a stage from a place on, in the order of partitions and offsets; of one cause or status, if given.

    A body is `{"deadLetters": […], "next": the id after which to go on, or null}`.
    """

    stage: str
    read_model: str
    key_type: KeyType
    """How the source's keys are written."""
    letters: Letters = field(repr=False)
    cause: str | None = None
    status: Status | None = None
    start: tuple[int, int] = (0, 0)
    """Partition and offset."""
    limit: int = 100

    def parameters(self) -> dict[str, str]:
        """See `Scan`."""
        given = {"stage": self.stage, "limit": str(self.limit), "from": f"{self.start[0]}:{self.start[1]}"}
        if self.cause is not None:
            given["cause"] = self.cause
        if self.status is not None:
            given["status"] = self.status.value
        return given

    def read(self, copies: Sequence[LocalCopy], view: View, render: Render) -> Steps:  # noqa: ARG002
        """See `Scan`."""
        told: list[dict[str, Any]] = []
        last, size = "", 0
        for looked_at, (partition, letter) in enumerate(self._from(copies)):
            if looked_at % _STEP == 0:
                yield
            if len(told) == self.limit or looked_at == _MOST_LOOKED_AT:
                return _body(told, last)
            name = str(LetterId(self.stage, partition, letter.offset))
            if self._is_wanted(letter):
                one = self._told(name, letter)
                # A control character of a key is six bytes of JSON.
                size += len(compact_json(one))
                if told and size > MAX_BYTES:
                    return _body(told, last)
                told.append(one)
            last = name
        return _body(told, None)

    def merge(self, bodies: Sequence[str]) -> str:
        """See `Scan`."""
        pages = [json.loads(body) for body in bodies]
        # What an instance left out may come before what another one has.
        known_up_to = min((LetterId.parse(page["next"]) for page in pages if page["next"]), default=None)
        ordered = heapq.merge(*(page["deadLetters"] for page in pages), key=letter_id)
        # Each has an id, or its instance has not answered.
        by_id = ((letter_id(letter), letter) for letter in ordered)
        known = [letter for its_id, letter in by_id if known_up_to is None or its_id <= known_up_to]
        is_all = known_up_to is None and len(known) <= self.limit
        last = known[: self.limit][-1]["id"] if len(known) > self.limit else known_up_to
        return _body(known[: self.limit], None if is_all else str(last))

    def _is_wanted(self, letter: Letter) -> bool:
        return self.cause in (None, letter.cause) and self.status in (None, letter.status)

    def _from(self, copies: Sequence[LocalCopy]) -> Iterator[tuple[int, Letter]]:
        """All letters from the place on."""
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

    def _told(self, name: str, letter: Letter) -> dict[str, Any]:
        return {
            "id": name,
            "model": self.read_model,
            "cause": letter.cause,
            "status": letter.status.value,
            "attempt": letter.attempt,
            "dueAt": _time(letter.due_ms) if letter.status is Status.SCHEDULED else None,
            "key": None,
            **self._key(letter.key),
        }

    def _key(self, key: bytes | None) -> dict[str, Any]:
        if key is not None and self.key_type.is_number and len(key) == _NUMBER_BYTES:
            return {"key": self.key_type.text(key)}
        return text_or_base64("key", key)


def _body(letters: Sequence[Mapping[str, Any]], following: str | None) -> str:
    return compact_json({"deadLetters": letters, "next": following})


def letter_id(letter: Mapping[str, Any]) -> LetterId:
    """Of a letter in JSON."""
    return LetterId.parse(letter["id"])


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
