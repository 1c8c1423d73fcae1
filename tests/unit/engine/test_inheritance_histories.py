"""Any sequence of failures, retries, decisions, moves and switches between two generations loses and repeats nothing.

Each code refuses other records. The expected outputs, states and dead letters come from a plain list of the events.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance_service.engine.dead_letter import Status
from balance_service.engine.decisions import Decision, Verdict
from balance_service.model.events import PER_KEY
from tests.unit.engine.test_inheritance import LATE, Generation, New, Old, declared, paid, paired

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.testing import InputEvent

INCOMPATIBLE = "schema-incompatible"
Step = tuple[str, Any]

_EVENTS = st.tuples(
    st.sampled_from("ab"),
    st.sampled_from([(), (), ("old",), ("new",)]),
    st.sampled_from([None, None, LATE, INCOMPATIBLE]),
)
_STEPS = st.one_of(
    st.tuples(st.just("arrive"), st.lists(_EVENTS, min_size=1, max_size=5)),
    st.tuples(st.sampled_from(["sender_reads", "silent_reads"]), st.integers(1, 5)),
    st.tuples(st.sampled_from(["sender_retries", "silent_retries"]), st.none()),
    st.tuples(st.just("mend"), st.sampled_from([LATE, INCOMPATIBLE])),
    st.tuples(st.just("wait"), st.sampled_from([5, 60])),
    st.tuples(st.sampled_from(["discard", "redrive"]), st.integers(0, 12)),
    st.tuples(st.sampled_from(["switch", "correct", "sender_opens", "silent_opens"]), st.none()),
)


class OldInOrder(Old):
    name = "test-ordered"
    order = PER_KEY


class NewInOrder(New):
    name = "test-ordered"
    order = PER_KEY


class History:
    """Two generations of one partition, and its events."""

    def __init__(self, old: Old, new: Old, version: int, patch: pytest.MonkeyPatch) -> None:
        """Args:
        version: of the new one; the old one's is 1.
        """
        self.pair = paired(old, new, replace(declared(1, version), model=old.name), patch)
        self.sender, self.silent = self.both = self.pair.old, self.pair.new
        self.events: list[InputEvent] = []
        self.keys: list[str] = []

    def play(self, steps: Sequence[Step]) -> None:
        for name, what in steps:
            getattr(self, f"_{name}")(what)
        self._settle()

    def _arrive(self, some: list[tuple[str, tuple[str, ...], str | None]]) -> None:
        for key, refused_by, unreadable in some:
            # Powers of two: a sum says which events it has.
            event = paid(str(2 ** len(self.events)), *refused_by, key=key)
            self.events.append(replace(event, unreadable=unreadable))
            self.keys.append(key)

    def _sender_reads(self, most: int) -> None:
        self._read(self.sender, most)

    def _silent_reads(self, most: int) -> None:
        self.silent.the_task.follow_sender()
        limit = self.silent.the_task.limit
        assert limit is not None
        self._read(self.silent, min(most, max(0, limit - self.silent.position.offset)))

    def _read(self, generation: Generation, most: int) -> None:
        start = generation.position.offset
        if some := self.events[start : start + most]:
            generation.commit(some)

    def _sender_retries(self, _: None) -> None:
        self._retry(self.sender)

    def _silent_retries(self, _: None) -> None:
        self._retry(self.silent)

    @staticmethod
    def _retry(generation: Generation) -> bool:
        due = generation.the_task.due()
        if not due.again:
            return False
        batch = generation.driven.due()
        assert batch is not None
        generation.driven.deliver(batch)
        return True

    def _mend(self, cause: str) -> None:
        self.events = [replace(event, unreadable=None) if event.unreadable == cause else event for event in self.events]
        for generation in self.both:
            generation.driver.mend(cause)

    def _wait(self, minutes: int) -> None:
        for generation in self.both:
            generation.driven.now_ms += minutes * 60_000

    def _discard(self, offset: int) -> None:
        self._decide(offset, Decision.DISCARD)

    def _redrive(self, offset: int) -> None:
        self._decide(offset, Decision.REDRIVE)

    def _decide(self, offset: int, decision: Decision) -> None:
        task = self.sender.the_task
        if not task.decide([offset], Verdict(decision, "", "")):
            self.sender.hosted.generations.follow(self.sender.hosted.stage, 0, task.letters_at([offset]))

    def _switch(self, _: None) -> None:
        self.pair.switch(self.silent)
        self.sender, self.silent = self.silent, self.sender

    def _sender_opens(self, _: None) -> None:
        """Its task is closed and opened again."""
        self.sender.opened(sends=True)

    def _silent_opens(self, _: None) -> None:
        """The same; what the task was told and had not carried out is lost."""
        self.silent.opened(sends=False)

    def _correct(self, _: None) -> None:
        """The code of the sending generation refuses nothing any more."""
        self.sender.model.refuses = ""

    def _settle(self) -> None:
        for cause in (LATE, INCOMPATIBLE):
            self._mend(cause)
        for _ in range(20):
            self._sender_reads(len(self.events))
            self._silent_reads(len(self.events))
            self._redrive_all()
            for generation in self.both:
                for _ in range(50):
                    if not self._retry(generation):
                        break
            self._wait(5)

    def _redrive_all(self) -> None:
        for offset, letter in self.sender.letters.items():
            if letter.status.needs_decision and self.events[offset].unreadable is None:
                self._redrive(offset)

    def check(self) -> None:
        sent = Counter(self.sender.sent + self.silent.sent)
        letters = self.sender.letters
        applied = [at for at in range(len(self.events)) if at not in letters or letters[at].status is Status.APPLIED]
        assert self.sender.position.offset == self.silent.position.offset == len(self.events)
        assert max(sent.values(), default=0) <= 1
        assert [at for at in applied if not sent[at]] == []
        for key in "ab":
            view = self.sender.driver.view(key)
            of_key = [at for at in applied if self.keys[at] == key]
            assert (Decimal(0) if view is None else view["paid"]) == sum(2**at for at in of_key)
        written = Counter(self.sender.written + self.silent.written)
        assert max(written.values(), default=0) <= 1
        assert [at for at, letter in letters.items() if letter.status.is_open and not written[at]] == []


@pytest.mark.shows("outputs-once")
@pytest.mark.parametrize("models", [(Old, New), (OldInOrder, NewInOrder)], ids=["any order", "in order"])
@settings(max_examples=60)
@given(version=st.sampled_from((1, 2)), steps=st.lists(_STEPS, max_size=25))
def test_every_event_counts_and_is_sent_once_in_any_order_of_switches(
    models: tuple[type[Old], type[Old]], version: int, steps: list[Step]
) -> None:
    old, new = (model() for model in models)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        history = History(old, new, version, patch)
        for generation in history.both:
            stack.callback(generation.close)
        history.play(steps)
        history.check()
