"""How many dead letters are read to be tried again together: Spark's heap holds what they come to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.events.redrive import Redrive
from balance_service.settings import load_settings
from balance_service.state.letters.letter import Letter
from balance_service.state.letters.letters import Due

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

MIB = 1 << 20


class Source:
    """A partition whose first records are gone; notes how many are read at once."""

    def __init__(self, size_of: Callable[[int], int], kept_from: int = 0) -> None:
        self.size_of = size_of
        self.kept_from = kept_from
        self.read: list[int] = []

    def records_left_at(
        self, _settings: Any, _topics: Any, _topic: str, _partition: int, offsets: Collection[int], _seconds: float
    ) -> tuple[Collection[int], dict[int, Any]]:
        self.read.append(len(offsets))
        kept = [at for at in offsets if at >= self.kept_from]
        return offsets, {at: self._record(at) for at in kept}

    def _record(self, offset: int) -> SimpleNamespace:
        return SimpleNamespace(
            key=lambda: None,
            value=lambda: bytes(self.size_of(offset)),
            headers=lambda: None,
            timestamp=lambda: (1, 0),
            offset=lambda: offset,
            partition=lambda: 0,
        )


@pytest.mark.parametrize(
    ("size_of", "kept_from", "tried"),
    [
        (lambda _: MIB, 0, 8),
        (lambda _: 1, 0, 1_000),
        (lambda _: 9 * MIB, 0, 1),
        (lambda _: 9 * MIB, 3, 4),
        (lambda at: 9 * MIB if at == 0 else 1, 0, 1),
        (lambda at: MIB if at >= 500 else 1, 0, 507),
        (lambda _: 9 * MIB, 1_000, 1_000),
    ],
    ids=["large", "small", "one too large", "gone, then too large", "the first too large", "large ones later", "gone"],
)
def test_what_is_tried_together_is_bounded_in_bytes_but_for_a_single_record(
    monkeypatch: pytest.MonkeyPatch, size_of: Callable[[int], int], kept_from: int, tried: int
) -> None:
    source = Source(size_of, kept_from)
    monkeypatch.setattr("balance_service.events.redrive.records_left_at", source.records_left_at)
    nobody: Any = None
    redrive = Redrive(
        spark=nobody, settings=load_settings(), topics=nobody, source="s", decoder=nobody, has_states=False
    )
    monkeypatch.setattr(redrive, "_decoded", lambda _records: None)
    monkeypatch.setattr("balance_service.events.redrive.letter_of", lambda _message: None)
    due = Due([Letter.first(at, "join-missing", None, 0, 1) for at in range(1_000)])

    batch = redrive.batch(0, 1_000, due)

    assert batch.retried == frozenset(range(tried))
    assert [letter.offset for letter in batch.dead_letters] == [*range(min(kept_from, tried))]
    assert max(source.read) <= 100
