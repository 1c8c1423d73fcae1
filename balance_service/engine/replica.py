"""A task's copy of its changelog: the store, and the reader that brings it up to date. Used under the task's lock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from balance_service.engine.changelog_reader import ChangelogReader
from balance_service.engine.completeness import Completeness, check_tombstones_since_offset
from balance_service.engine.inheritance import check_owner
from balance_service.engine.opening import (
    check_same_changelog,
    check_same_log,
    check_same_partitioner,
    open_store,
)
from balance_service.errors import FatalError, RetriableError, StoreCorruptedError
from balance_service.kafka.clients import reader_config
from balance_service.kafka.log_reader import END_SOON
from balance_service.kafka.topic_specs import prepare_changelog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import FilteringBoundLogger

    from balance_service.engine.changelog_reader import Part
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import TaskId
    from balance_service.engine.store import StateStore, StoreView
    from balance_service.kafka.topics import Topic

_SAY_EVERY_SECONDS = 2.0


class Replica:
    """A store and its changelog. An owner brings the store up to the changelog's end once, a standby continuously.

    `changelog_topic_id` is empty before `find`, and `store` is None before `open`.
    """

    def __init__(self, task_id: TaskId, hosted: HostedStage, log: FilteringBoundLogger) -> None:
        self._task_id = task_id
        self._hosted = hosted
        self._reader: ChangelogReader | None = None
        self.completeness = Completeness(self._end)
        self.store: StateStore | None = None
        self.changelog_topic_id = ""
        self.end = 0
        """The end of the changelog when `catch_up` began last."""
        self.restoration = Restoration(log)

    def find(self) -> Topic:
        """Returns the changelog, which is made if there is none. Raises as `Task.open`."""
        topics, source = self._hosted.topics, self._hosted.source
        changelog = prepare_changelog(topics, self._hosted.stage, source)
        check_same_log(source, topics.find_patiently(source.name), changelog)
        self.changelog_topic_id = changelog.topic_id
        return changelog

    def open(self, changelog: Topic, *, is_owned: bool) -> None:
        """Opens the store, and begins to read the changelog. Raises as `Task.open`."""
        hosted, partition, topics = self._hosted, self._task_id.partition, self._hosted.topics
        self.store = open_store(self._task_id, hosted, changelog)
        check_tombstones_since_offset(topics, changelog, partition, self.store.changelog_offset)
        config = reader_config(hosted.settings)
        if is_owned:
            # Queries are refused until then.
            config |= END_SOON
        # A consumer that starts at "earliest" takes half a second more to find that offset than this request.
        start = self.store.changelog_offset or topics.offsets(changelog.name, [partition], earliest=True)[partition]
        self._reader = ChangelogReader(config, changelog.name, partition, start)

    @property
    def whole_view(self) -> StoreView | None:
        """The present view, if the store is as a commit to this changelog left it."""
        store, _ = self._opened()
        position = store.position
        is_whole = store.written_up_to == store.changelog_offset and position is not None
        is_same = position is not None and position.changelog_topic_id in ("", self.changelog_topic_id)
        return store.view if is_whole and is_same else None

    def catch_up(self, is_closing: Callable[[], bool], *, is_fenced: bool, answers: bool) -> Iterator[Part]:
        """Yields the changelog up to its present end.

        The caller passes each part to `passed`, and then to `apply`, before it asks for the next one. Without fencing,
        the present end is that of the last stable offset: a writer that was cut off leaves its transaction open until
        its successor fences it, and this task may be the successor.

        Args:
            answers: whether queries are answered from the store while it catches up.

        Raises:
            BalanceServiceError: as `Task.open`.
        """
        store, reader = self._opened()
        start, end = store.changelog_offset, self._end(committed=not is_fenced)
        self.end = end
        if store.written_up_to > end:
            raise StoreCorruptedError(f"the store reaches to {store.written_up_to}, beyond the changelog's end {end}")
        self.restoration.begin(start, end)
        if not is_fenced:
            self.completeness.look()
        yield from reader.replay(end, is_closing, answers=answers, fenced=is_fenced)
        self.completeness.passed(reader.whole_up_to)

    def tail(self) -> Iterator[Part]:
        """Yields the owner's commits since the last call, after a short wait if there are none. Use as `catch_up`.

        Raises as `Task.open`.
        """
        _, reader = self._opened()
        yield from reader.tail()
        if reader.met_end:
            self.completeness.met_end()
        # The consumer reports the end once; on an idle changelog the reader stays there.
        self.completeness.passed(reader.whole_up_to)
        self.completeness.look()

    @property
    def is_complete(self) -> bool:
        """Whether the store is exactly as a commit of the owner left it, and not a part of what it is loaded from."""
        store, reader = self._opened()
        return reader.is_whole and self.completeness.holds and store.loading is None

    def passed(self, part: Part) -> bool:
        """Returns whether the store will be as a commit left it once a part is applied.

        Raises:
            RetriableError: the reader paused so long that the store must be opened again, which checks its age.
        """
        if self.completeness.was_away:
            raise RetriableError("the changelog was not read for an hour; its tombstones may be gone")
        if part.is_whole:
            self.completeness.passed(part.changelog_offset)
        return part.is_whole and self.completeness.holds

    def apply(self, part: Part) -> None:
        """Writes a part to the store.

        Raises:
            StoreFullError: the disk has no room.
            RetriableError: the part comes from another changelog.
            TaskHaltedError: its states were folded with another partitioner.
        """
        store, _ = self._opened()
        store.require_room(serves=self._hosted.generations.serves(self._hosted.stage))
        store.apply(part.records, part.changelog_offset)
        if part.is_whole and (position := store.position or store.loading) is not None:
            check_owner(self._hosted.stage, position)
            check_same_changelog(self.changelog_topic_id, position.changelog_topic_id)
            check_same_partitioner(self._hosted, position.partitioner)
        self.restoration.advance(len(part.records), part.changelog_offset)

    def check_same_logs(self) -> None:
        """Checks that source and changelog were not replaced. Raises TaskHaltedError or RetriableError."""
        topics, source = self._hosted.topics, self._hosted.source
        check_same_log(source, topics.find_patiently(source.name))
        changelog = topics.find_patiently(self._hosted.stage.changelog)
        check_same_changelog(self.changelog_topic_id, None if changelog is None else changelog.topic_id)

    def stop_reading(self) -> None:
        """Closes the reader. An owner does not need it: it writes the changelog."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def close(self) -> None:
        self.stop_reading()
        if self.store is not None:
            self.store.close()

    def _end(self, *, committed: bool = True) -> int:
        changelog, partition = self._hosted.stage.changelog, self._task_id.partition
        return self._hosted.topics.offsets(changelog, [partition], committed=committed)[partition]

    def _opened(self) -> tuple[StateStore, ChangelogReader]:
        if self.store is None or self._reader is None:
            raise FatalError(f"task {self._task_id} has no open store, or no reader of its changelog")
        return self.store, self._reader


class Restoration:
    """The progress of a restore, for operators. The task's thread writes it; any thread may read it."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._start = self._at = self._end = 0
        self._began = self._said = 0.0
        self.restored = 0
        """Records applied since the replay last began."""

    def begin(self, start: int, end: int) -> None:
        """Notes the changelog offsets that a replay starts at and ends at."""
        self._start, self._at, self._end = start, start, end
        self._began = self._said = time.monotonic()
        self.restored = 0

    def advance(self, records: int, at: int) -> None:
        """Notes applied records and the offset after them; logs the progress every few seconds."""
        self.restored += records
        self._at = at
        now = time.monotonic()
        if at < self._end and now - self._said >= _SAY_EVERY_SECONDS:
            self._said = now
            rate = self.restored / (now - self._began)
            self._log.info(
                "restoring", restored=self.restored, records_per_second=round(rate), seconds_left=self.seconds_left
            )

    @property
    def to_restore(self) -> int:
        """Changelog offsets between the replay's start and its end."""
        return self._end - self._start

    @property
    def seconds_left(self) -> float | None:
        """The time that the replay still takes at its present rate; None before the first record."""
        done = self._at - self._start
        if done <= 0:
            return None
        elapsed = time.monotonic() - self._began
        return round(elapsed * max(0, self._end - self._at) / done, 1)
