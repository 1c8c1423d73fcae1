"""A task's copy of its changelog: a store, and what reads the changelog into it. Used under the task's lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.engine import tombstones
from balance_service.engine.changelog.reader import ChangelogReader
from balance_service.engine.changelog.restoration import Restoration
from balance_service.engine.completeness import Wholeness
from balance_service.engine.opening import check_same_changelog, check_same_log, open_store
from balance_service.errors import FatalError, RetriableError, StoreCorruptedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.topic_setup import prepare_changelog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import FilteringBoundLogger

    from balance_service.engine.changelog.reader import Part
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import TaskId
    from balance_service.engine.store.store import StateStore

_END_WITHIN_MS = 10


class Replica:
    """A store that is brought up to the changelog's end, once for its owner, again and again for a standby.

    `store` is None before `open`. `changelog_topic_id` is the changelog's, empty before.
    """

    def __init__(self, task_id: TaskId, hosted: HostedStage, log: FilteringBoundLogger) -> None:
        self._task_id = task_id
        self._hosted = hosted
        self._reader: ChangelogReader | None = None
        self._wholeness = Wholeness(self._end)
        self.store: StateStore | None = None
        self.changelog_topic_id = ""
        self.restoration = Restoration(log)

    def open(self, *, is_owned: bool) -> None:
        """Find the changelog and open the store. Raises as `Task.open`."""
        hosted, partition = self._hosted, self._task_id.partition
        topics, source = hosted.topics, hosted.source
        changelog = prepare_changelog(topics, hosted.stage, source)
        check_same_log(source, topics.find_patiently(source.name), changelog)
        self.changelog_topic_id = changelog.topic_id
        # A store that is no copy of this changelog is worth nothing.
        self.store = open_store(self._task_id, hosted, changelog)
        tombstones.check_by_offset(topics, changelog, partition, self.store.changelog_offset)
        config = reader_config(hosted.settings)
        if is_owned:
            # The broker holds back for so long that it has no more, which nobody can answer without.
            config |= {"fetch.wait.max.ms": _END_WITHIN_MS}
        # Asked for here: a consumer that shall begin at the beginning finds out where that is half a second later.
        start = self.store.changelog_offset or topics.offsets(changelog.name, [partition], earliest=True)[partition]
        self._reader = ChangelogReader(config, changelog.name, partition, start)

    def catch_up(self, is_closing: Callable[[], bool], *, is_fenced: bool, answers: bool) -> Iterator[Part]:
        """The changelog up to its present end; not fenced, up to the transaction that a writer may have open.

        Each part is to be applied before the next one is asked for, after `passed` was asked about it.

        A writer that was cut off leaves one open until its successor fences it, which may be the one that waits here.

        Args:
            answers: whether the store does so meanwhile.

        Raises:
            BalanceServiceError: as `Task.open`.
        """
        store, reader = self._opened()
        start, end = store.changelog_offset, self._end(committed=not is_fenced)
        if store.reaches > end:
            raise StoreCorruptedError(f"the store reaches to {store.reaches}, beyond the changelog's end {end}")
        self.restoration.begin(start, end)
        if not is_fenced:
            self._wholeness.look()
        yield from reader.replay(end, is_closing, answers=answers, fenced=is_fenced)
        self._wholeness.passed(reader.whole_up_to)

    def tail(self) -> Iterator[Part]:
        """What the owner has committed since, waiting briefly for it; to be applied as `catch_up` says.

        Raises as `Task.open`.
        """
        _, reader = self._opened()
        yield from reader.tail()
        if reader.met_end:
            self._wholeness.met_end()
        # The end is met once; an idle changelog is stood at for long.
        self._wholeness.passed(reader.whole_up_to)
        self._wholeness.look()

    @property
    def is_complete(self) -> bool:
        """Whether the store is as one commit of the owner left it."""
        return self._opened()[1].is_whole and self._wholeness.holds

    def passed(self, part: Part) -> bool:
        """Whether the store will be as one commit left it, once a part is applied.

        Raises:
            RetriableError: it was read so late that the store must be opened anew, which looks at its age.
        """
        if self._wholeness.was_away:
            raise RetriableError("the changelog was not read for an hour, in which tombstones may have gone")
        if part.is_whole:
            self._wholeness.passed(part.changelog_offset)
        return part.is_whole and self._wholeness.holds

    def apply(self, part: Part) -> None:
        """Write what was read.

        Raises:
            StoreFullError: the disk has no room.
            RetriableError: it was read from another changelog.
        """
        store, _ = self._opened()
        store.require_room()
        records = len(part.records)
        store.apply(part.records, part.changelog_offset)
        if part.is_whole and store.position is not None:
            check_same_changelog(self.changelog_topic_id, store.position.changelog_topic_id)
        self.restoration.advance(records, part.changelog_offset)

    def check_same_logs(self) -> None:
        """Check that source and changelog are the topics they were. Raises TaskHaltedError, RetriableError."""
        topics, source = self._hosted.topics, self._hosted.source
        check_same_log(source, topics.find_patiently(source.name))
        changelog = topics.find_patiently(self._hosted.stage.changelog)
        check_same_changelog(self.changelog_topic_id, None if changelog is None else changelog.topic_id)

    def stop_reading(self) -> None:
        """Read no more: an owner knows what it writes."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close(self) -> None:
        """Free the store and what reads."""
        self.stop_reading()
        if self.store is not None:
            self.store.close()

    def _end(self, *, committed: bool = True) -> int:
        changelog, partition = self._hosted.stage.changelog, self._task_id.partition
        return self._hosted.topics.offsets(changelog, [partition], committed=committed)[partition]

    def _opened(self) -> tuple[StateStore, ChangelogReader]:
        if self.store is None or self._reader is None:
            raise FatalError(f"the store of task {self._task_id} is not open, or not to be read into")
        return self.store, self._reader
