"""What a silent task takes over from the one that sends: how far it may go, and what becomes of dead letters.

A generation that is built beside the serving one folds the same records and sends nothing. A record that is a dead
letter of the one that sends must not be applied here in its turn, and a decision about it holds here too.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from balance_service.engine.dead_letters import DueLetters
from balance_service.engine.records import NEVER
from balance_service.engine.store import offset_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.engine.dead_letter import Letter
    from balance_service.engine.dead_letters import LetterChanges
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.store import StateStore, StoreView


class Following:
    """What a task knows of the other generations of its partition.

    Any thread may call `tell`, and read `sender` and `limit`. For the rest, the caller holds the task's lock. It
    commits the changes that an iterator yields before it takes the next ones, and drops the iterator if that fails:
    what was not committed is yielded again.
    """

    def __init__(self, hosted: HostedStage, partition: int) -> None:
        self._hosted = hosted
        self._partition = partition
        self.limit = 0
        """The source offset below which this task has every dead letter of the generation that sends."""
        self._has_part = False
        """Whether the sending generation has more dead letters below its position than this task has."""
        self._followed_epoch: int | None = None
        """That of the sending generation's task whose closed dead letters this task has followed."""
        # Any thread appends; who holds the task's lock takes.
        self._told: deque[Mapping[int, Letter]] = deque()

    @property
    def sender(self) -> StoreView | None:
        """The view of the task that sends, if another one here does. While it is kept, that one stays open."""
        return self._hosted.generations.sender(self._hosted.stage, self._partition)

    @property
    def goal(self) -> int:
        """The source offset to reach: where the task that sends is."""
        sender = self.sender
        return self.limit if sender is None else max(self.limit, offset_of(sender))

    def due(self, store: StateStore, position: int) -> DueLetters:
        """Returns the dead letters that are due, and that are not left to the task that sends."""
        sender = self.sender
        # It has not read all of the records yet.
        if sender is None or offset_of(sender) < position:
            return DueLetters()
        return self._hosted.processor.letters.due(store, sender)

    def opened_there(self, store: StateStore, position: int) -> Iterator[LetterChanges]:
        """Yields the changes that give this task the other one's dead letters; then `limit` is higher."""
        sender = self.sender
        if sender is None:
            return
        reached = offset_of(sender)
        if reached <= self.limit or (self._has_part and position < self.limit):
            return
        changes, end = self._hosted.processor.letters.on_following(store, sender, max(self.limit, position))
        # Not kept while a commit waits.
        del sender
        yield changes
        self.limit, self._has_part = end, end < reached

    def closed_there(self, store: StateStore) -> Iterator[LetterChanges]:
        """Yields what became of dead letters before this task, or the other one, was opened.

        `tell` tells of it afterwards. A record that this generation refuses, and the other one has applied, is tried
        again each time that one of the two is opened.
        """
        sender = self.sender
        if sender is None:
            return
        epoch = NEVER if sender.position is None else sender.position.epoch
        if epoch == self._followed_epoch:
            return
        letters = self._hosted.processor.letters
        all_closed = [*letters.closed_in(store, sender)]
        # As in `opened_there`.
        del sender
        for closed in all_closed:
            yield letters.on_decision_elsewhere(store, closed)
        self._followed_epoch = epoch

    def tell(self, decided: Mapping[int, Letter]) -> None:
        """Tells of dead letters as another generation's task has decided about them."""
        self._told.append(decided)

    @property
    def is_told(self) -> bool:
        """Whether `told` yields anything."""
        return bool(self._told)

    def told(self, store: StateStore) -> Iterator[LetterChanges]:
        """Yields what follows from the decisions of other generations' tasks, in their order."""
        while self._told:
            yield self._hosted.processor.letters.on_decision_elsewhere(store, self._told[0])
            self._told.popleft()
