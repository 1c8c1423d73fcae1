"""Decides which partitions of a stage share a Spark query, and when another query replaces it.

Starting a query costs Spark most of a second of processor time, with one partition as with many. So the tasks that ask
for rows at about the same time share one. A stream of rows belongs to one task and is used once: a task that must read
events again, or returns after a wait, asks again and gets a stream of another query. The rows that it leaves behind
wait in Spark, where they cost a thread and nothing else.

Once nothing has changed for some seconds, one query over all partitions replaces several, or one with partitions that
have left, or one that is nearly a day old. The new query starts before the old ones end: each task changes over between
two commits, once the new query reads its partition, and leaves out the rows that it has committed.

A query that fails is replaced by one for each of its partitions: the fault of one must not stop the others.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow.compute as pc
import structlog

from balance_service.errors import BalanceServiceError
from balance_service.spark.row_query import BatchEndedError, QueryEndedError, QueryInterruptedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pyarrow as pa

    from balance_service.spark.row_query import PartitionStream, RowQuery

log = structlog.get_logger(__name__)

_LOOK_EVERY_SECONDS = 0.25
# Tasks that ask within this time of each other share a query.
_LINGER_SECONDS = 0.1
_MOST_LINGER_SECONDS = 0.5
# A query that is starting delays the next one by so much at most: together they would both start later.
_TURN_SECONDS = 1.5
_SETTLE_SECONDS = 5.0
_RETRY_SECONDS = 60.0
# A partition without events gives no sign that the new query reads it.
_GRACE_SECONDS = 3.0
# For so long after a failure, its partitions share no query with others.
_APART_SECONDS = 60.0
# Before Spark's batch ends after 24 hours.
_MOST_AGE_SECONDS = 23 * 3600.0
_SLOTS_SECONDS = 2.0
# These failures say nothing about a single partition.
_GENERAL = re.compile(r"TimeoutException|DisconnectException|not allow Spark to read|did not begin to read|slots")


class Slots:
    """Counts the partitions that Spark can read at once. A query without slots would wait silently."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = total
        self._changed = threading.Condition()

    def take(self, count: int) -> bool:
        """Takes slots; returns whether there were enough within two seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free >= count, _SLOTS_SECONDS):
                return False
            self._free -= count
            return True

    def give_back(self, count: int) -> None:
        with self._changed:
            self._free += count
            self._changed.notify_all()


@dataclass(eq=False, slots=True)
class _Running:
    """A query and the tasks that it was started for."""

    query: RowQuery
    members: Sequence[_Member]
    since: float
    is_noted: bool = False
    """Whether the consequences of its end have been drawn."""

    @property
    def readers(self) -> list[_Member]:
        """The tasks that pull its rows."""
        return [member for member in self.members if member.running is self and not member.is_gone]

    @property
    def is_idle(self) -> bool:
        return all(stream.is_closed for stream in self.query.rows.values())

    @property
    def has_left(self) -> bool:
        return any(stream.is_closed for stream in self.query.rows.values())


@dataclass(eq=False, slots=True)
class _Member:
    """A task that wants rows, and the stream that it pulls."""

    partition: int
    position: Callable[[], int]
    is_interrupted: Callable[[], bool]
    asked: float
    running: _Running | None = None
    next: _Running | None = None
    """The query to change over to."""
    error: BalanceServiceError | None = None
    is_gone: bool = False
    decided: threading.Event = field(default_factory=threading.Event)
    """Set when the member has a query, or an error."""


class TaskRows:
    """The rows of one task, in offset order, each once, by any query. The task's thread calls."""

    def __init__(self, queries: SharedQueries, member: _Member, stream: PartitionStream) -> None:
        self._queries = queries
        self._member = member
        self._stream = stream
        self._from = 0

    @property
    def position(self) -> int:
        """The offset that the query began at."""
        return self._stream.position

    def pull(self, timeout_seconds: float) -> pa.RecordBatch | None:
        """Returns all rows that have arrived since the last pull; None if none arrives in time.

        Raises:
            QueryEndedError: Spark has ended the query.
        """
        rows = self._stream.pull(timeout_seconds)
        if rows is None or rows["offset"][0].as_py() >= self._from:
            return rows
        rest = rows.filter(pc.greater_equal(rows["offset"], self._from))
        return rest if rest.num_rows else None

    def change_over(self, position: int) -> bool:
        """Goes on with the query that replaces the present one, if it reads the partition; returns whether it does.

        Args:
            position: all rows below it are committed, and none above it has been pulled without being committed.
        """
        stream = None if self._member.next is None else self._queries.change_over(self._member)
        if stream is None:
            return False
        self._stream, self._from = stream, position
        return True


class SharedQueries:
    """The queries of one stage. A thread of its own replaces and stops them; each start has a thread, too."""

    def __init__(
        self,
        name: str,
        new_query: Callable[[Mapping[int, int], Callable[[], bool]], RowQuery],
        slots: Slots,
        without_slots: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        name: of the stage.
        new_query: first offsets by partition, and whether the start is interrupted → a query that is not started.
        without_slots: called when a query gets no slots.
        """
        self._name = name
        self._new_query = new_query
        self._slots = slots
        self._without_slots = without_slots
        self._clock = clock
        self._changed = threading.Condition()
        self._asking: list[_Member] = []
        self._running: list[_Running] = []
        self._threads: dict[threading.Thread, float] = {}
        self._replace_at = 0.0
        self._apart: dict[int, float] = {}
        """Partitions of queries that failed → until when each has a query of its own."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"queries-{name}", daemon=True)
        self._thread.start()

    @contextmanager
    def rows(
        self, partition: int, position: Callable[[], int], is_interrupted: Callable[[], bool]
    ) -> Iterator[TaskRows]:
        """Gives a task the rows from its position on, until the context ends.

        Args:
            position: the task's present position; any thread may call it.

        Raises:
            QueryEndedError: Spark cannot start the query.
            QueryInterruptedError: interrupted.
            ConfigurationError: the folder for sockets cannot be used.
        """
        member = _Member(partition, position, is_interrupted, self._clock())
        with self._changed:
            self._asking.append(member)
            self._changed.notify_all()
        try:
            while not member.decided.wait(_LOOK_EVERY_SECONDS):
                if is_interrupted():
                    raise QueryInterruptedError("the query was interrupted while it started")
            if member.error is not None:
                raise type(member.error)(*member.error.args)
            if member.running is None:
                raise QueryInterruptedError("the task is closed")
            yield TaskRows(self, member, member.running.query.rows[partition])
        finally:
            self._leave(member)

    def change_over(self, member: _Member) -> PartitionStream | None:
        """Returns the stream that replaces a member's, and closes that; None if it is not time yet."""
        with self._changed:
            before, after = member.running, member.next
            if before is None or after is None:
                return None
            if after.query.is_over:
                member.next = None
                return None
            old, stream = before.query.rows[member.partition], after.query.rows[member.partition]
            # What the old query has handed over since then, the new one hands over too: the task would wait for it.
            is_behind = old.next > stream.position or self._clock() - after.since < _GRACE_SECONDS
            if is_behind and not stream.has_rows:
                return None
            member.running, member.next = after, None
            self._wait_to_replace()
            old.close()
            return stream

    def stop(self, timeout_seconds: float) -> bool:
        """Stops all queries; returns whether all threads ended in time. No task may want rows any more."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        deadline = self._clock() + timeout_seconds
        # The first thread starts others.
        self._thread.join(timeout_seconds)
        threads = [self._thread, *self._threads]
        for thread in threads:
            thread.join(max(0.0, deadline - self._clock()))
        return not any(thread.is_alive() for thread in threads)

    def _leave(self, member: _Member) -> None:
        with self._changed:
            if member.running is not None:
                self._note_end(member.running)
            member.is_gone = True
            if member in self._asking:
                self._asking.remove(member)
            for running in (member.running, member.next):
                if running is not None:
                    running.query.rows[member.partition].close()
            # One that fails again and again must not delay the others' replacement.
            if member.partition not in self._apart:
                self._wait_to_replace()
            self._changed.notify_all()

    def _wait_to_replace(self) -> None:
        """Waits with the next replacement until nothing has changed for some seconds."""
        self._replace_at = max(self._replace_at, self._clock() + _SETTLE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(_LINGER_SECONDS / 2 if self._asking else _LOOK_EVERY_SECONDS)
                if self._is_stopping:
                    break
                while (group := self._next_group()) is not None:
                    self._do(self._start, group, False)
                if (group := self._to_replace()) is not None:
                    self._do(self._start, group, True)
                running = self._running.copy()
            for one in running:
                self._look_after(one)
        for one in self._running:
            self._do(self._stop, one)

    def _next_group(self) -> list[_Member] | None:
        """Takes tasks that ask, and that share a query; None if it is not their turn yet."""
        now = self._clock()
        if not self._asking:
            return None
        waited = now - self._asking[0].asked
        is_complete = now - self._asking[-1].asked >= _LINGER_SECONDS or waited >= _MOST_LINGER_SECONDS
        is_turn = waited >= _TURN_SECONDS or not any(now - since < _TURN_SECONDS for since in self._threads.values())
        if not (is_complete and is_turn):
            return None
        self._forget_failures()
        group = [member for member in self._asking if member.partition not in self._apart] or self._asking[:1]
        self._asking = [member for member in self._asking if member not in group]
        return group

    def _to_replace(self) -> list[_Member] | None:
        """Returns the tasks for one query that replaces theirs; None if there is nothing to replace now."""
        now = self._clock()
        if self._asking or self._threads or now < self._replace_at:
            return None
        self._forget_failures()
        live = [one for one in self._running if not one.query.is_over]
        members = [member for one in live for member in one.readers]
        shared = [member for member in members if member.partition not in self._apart]
        queries = [one for one in live if any(member.running is one for member in shared)]
        is_due = len(queries) > 1 or any(one.has_left or now - one.since > _MOST_AGE_SECONDS for one in queries)
        return shared if is_due and not any(m.next for m in members) else None

    def _do(self, work: Callable[..., None], *arguments: object) -> None:
        """Starts or stops a query in a thread: neither delays the others."""

        def run() -> None:
            work(*arguments)
            with self._changed:
                del self._threads[thread]

        thread = threading.Thread(target=run, name=f"query-{self._name}", daemon=True)
        self._threads[thread] = self._clock() if work == self._start else 0.0
        thread.start()

    def _start(self, group: Sequence[_Member], is_replacement: bool) -> None:
        began = self._clock()
        # The position is -1 once a task is closed.
        positions = {m.partition: at for m in group if not m.is_gone and (at := m.position()) >= 0}
        members = [m for m in group if m.partition in positions]
        query = self._new_query(positions, lambda: all(m.is_gone or m.is_interrupted() for m in members))
        error = self._started(query, len(positions))
        with self._changed:
            if error is None:
                running = _Running(query, members, self._clock())
                self._running.append(running)
                for member in members:
                    if member.is_gone:
                        query.rows[member.partition].close()
                    elif is_replacement:
                        member.next = running
                    else:
                        member.running = running
                log.info(
                    "query started",
                    stage=self._name,
                    partitions=sorted(positions),
                    replaces_others=is_replacement,
                    seconds=round(self._clock() - began, 3),
                )
            elif not isinstance(error, QueryInterruptedError):
                log.warning("a query cannot start", stage=self._name, partitions=sorted(positions), error=str(error))
                if is_replacement:
                    self._replace_at = self._clock() + _RETRY_SECONDS
                else:
                    self._keep_apart(members, error)
            if is_replacement:
                self._wait_to_replace()
            else:
                for member in group:
                    member.error = error
                    member.decided.set()

    def _started(self, query: RowQuery, slots: int) -> BalanceServiceError | None:
        """Starts a query; returns the error if that fails."""
        if not slots:
            return QueryInterruptedError("the tasks are closed")
        if not self._slots.take(slots):
            self._without_slots()
            return QueryEndedError(f"Spark has not {slots} free slots of {self._slots.total}; report this as a bug")
        try:
            query.__enter__()
        except BalanceServiceError as error:
            self._slots.give_back(slots)
            return error
        return None

    def _look_after(self, running: _Running) -> None:
        """Notices the end of a query, whose idle partitions would not; stops one that no task reads."""
        query = running.query
        if not query.is_over and query.has_ended:
            query.ended()
        with self._changed:
            self._note_end(running)
            if not running.is_idle:
                return
            self._running.remove(running)
            self._do(self._stop, running)

    def _stop(self, running: _Running) -> None:
        running.query.close()
        self._slots.give_back(len(running.query.rows))

    def _note_end(self, running: _Running) -> None:
        if running.is_noted or not running.query.is_over:
            return
        running.is_noted = True
        error = running.query.ended()
        members = running.readers
        log.warning(
            "the query has ended; another is started",
            stage=self._name,
            partitions=sorted(m.partition for m in members),
            error=str(error),
        )
        if not isinstance(error, BatchEndedError):
            self._keep_apart(members, error)

    def _keep_apart(self, members: Sequence[_Member], error: BalanceServiceError) -> None:
        """Has each of these partitions share no query for a while, unless the error says nothing about any of them."""
        if not _GENERAL.search(str(error)):
            self._apart |= dict.fromkeys((member.partition for member in members), self._clock() + _APART_SECONDS)

    def _forget_failures(self) -> None:
        now = self._clock()
        self._apart = {partition: until for partition, until in self._apart.items() if until > now}
