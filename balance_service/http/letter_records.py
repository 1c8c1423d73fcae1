"""What the records of dead letters say, read from the source by the instance that was asked.

A record may be larger than what a peer answers, so peers tell letters, and nobody passes records on.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from balance_service.errors import RetriableError
from balance_service.http.answer import compact_json, unavailable
from balance_service.http.letter_scan import letter_id
from balance_service.http.scan import MAX_BYTES
from balance_service.http.scheduling import in_one_step
from balance_service.kafka.messages import shown_headers

if TYPE_CHECKING:
    from confluent_kafka import Message

    from balance_service.http.scheduling import Asker, FairScheduler

# A page whose records take longer to read ends there: the client's deadline may be near.
_PAGE_SECONDS = 0.3

Records = Callable[[int, Sequence[int], float, int], tuple[Sequence[int], Mapping[int, "Message"]]]
"""See `records_left_at`: partition, offsets, seconds, bytes → the offsets that were looked for, and their records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterRecords:
    """The records of one stage's letters."""

    records: Records = field(repr=False)
    scheduler: FairScheduler
    timeout_seconds: float

    async def added_to(self, letters: Sequence[Mapping[str, Any]], asker: Asker) -> list[dict[str, Any]]:
        """The first of some letters, each with `headers` and `valueBase64`: as many as make a page, one at least.

        Raises:
            Problem: 503, the broker does not answer, or the client's share is used up.
        """
        if not letters:
            return []
        try:
            async with (
                asyncio.timeout(self.timeout_seconds),
                self.scheduler.admitted(asker, self.timeout_seconds / 2),
            ):
                return await self.scheduler.run(asker, in_one_step(self._read, letters))
        except (TimeoutError, RetriableError) as error:
            raise unavailable("the records of dead letters cannot be read now") from error

    def _read(self, letters: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        size, until = 0, time.monotonic() + _PAGE_SECONDS
        for partition, of_it in groupby(letters, key=lambda letter: letter_id(letter).partition):
            if told and time.monotonic() > until:
                return told
            by_offset = {letter_id(letter).offset: letter for letter in of_it}
            looked_for, records = self.records(partition, [*by_offset], until - time.monotonic(), MAX_BYTES)
            for offset in looked_for:
                one = {**by_offset[offset], **_of(records.get(offset))}
                size += len(compact_json(one))
                if told and size > MAX_BYTES:
                    return told
                told.append(one)
            if len(looked_for) < len(by_offset):
                return told
        return told


def _of(record: Message | None) -> dict[str, Any]:
    value = None if record is None else record.value()
    return {
        "headers": None if record is None else shown_headers(record),
        "valueBase64": None if value is None else base64.b64encode(value).decode(),
    }
