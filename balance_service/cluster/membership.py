"""Membership in the consumer group: which partitions are ours, and until when that may be trusted.

One thread polls, runs the rebalance callbacks and renews the lease; any thread may ask. The consumer owns
partitions only: it is paused on all of them, and Spark does the reading.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from balance_service.clock import elapsed
from balance_service.kafka.clients import not_authorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.kafka.clients import ClientConfig

log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.1
_MARGIN_SECONDS = 1.0
_RENEWALS_PER_SESSION = 4
_STOP_SECONDS = 5.0


class AssignmentListener(Protocol):
    """Told of changes of assignment, on the membership thread."""

    def assigned(self, partitions: frozenset[int]) -> None:
        """These became ours. Must return at once."""

    def revoked(self, partitions: frozenset[int]) -> None:
        """These must be let go before this returns, within a bound."""

    def lost(self, partitions: frozenset[int]) -> None:
        """These are another's by now."""


class Lease:
    """How long an instance may answer as owner without hearing from the group.

    It runs from just before the last request that the coordinator checked against our membership, for the
    session timeout less a margin: before it ends, nobody can have succeeded us. Source: Gray & Cheriton,
    "Leases" (1989).
    """

    def __init__(self, session_timeout_ms: int, clock: Callable[[], float] = elapsed) -> None:
        self._length = session_timeout_ms / 1000 - _MARGIN_SECONDS
        self._clock = clock
        self._expires = float("-inf")

    def renew(self, sent_at: float) -> None:
        """The coordinator has confirmed a request sent at this moment of the clock."""
        self._expires = max(self._expires, sent_at + self._length)

    def revoke(self) -> None:
        """Nothing may be answered as owner until the next renewal."""
        self._expires = float("-inf")

    @property
    def holds(self) -> bool:
        """Whether nobody can have succeeded us yet."""
        return self._clock() < self._expires


def consumer_config(base: ClientConfig, group: str, session_timeout_ms: int) -> ClientConfig:
    """A group member that is never asked to read."""
    return {
        "partition.assignment.strategy": "cooperative-sticky",
        **base,
        "group.id": group,
        "session.timeout.ms": session_timeout_ms,
        "heartbeat.interval.ms": min(session_timeout_ms // 10, 500),
        "max.poll.interval.ms": max(300_000, 2 * session_timeout_ms),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # A position comes from the changelog; a reset to either end of the topic would skip or repeat money.
        "auto.offset.reset": "error",
        "queued.min.messages": 1,
    }


class Membership:
    """One member of the group. Owns the consumer."""

    def __init__(
        self,
        config: ClientConfig,
        topic: str,
        session_timeout_ms: int,
        listener: AssignmentListener,
        positions: Callable[[], Mapping[int, int]],
    ) -> None:
        """Args:
        positions: partition → position of each task that answers; committed for tools, and to renew the
            lease.
        """
        self._topic = topic
        self._listener = listener
        self._positions = positions
        self.lease = Lease(session_timeout_ms)
        self._renew_every = session_timeout_ms / 1000 / _RENEWALS_PER_SESSION
        self._sent_at: float | None = None
        self._next_renewal = 0.0
        self._renewed_for: frozenset[int] = frozenset()
        self._stopping = threading.Event()
        self.joined = threading.Event()
        """Set at the first assignment, be it an empty one."""
        self.partitions: frozenset[int] = frozenset()
        """What is ours, as of the last rebalance."""
        self.problem = ""
        """What the brokers do not allow; empty while all is well."""
        self._grants = f"Read on group '{config['group.id']}' and on topic '{topic}'"
        self._consumer = Consumer({**config, "on_commit": self._committed})
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        """Join the group; returns at once."""
        self._thread.start()

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """Leave the group; partitions are revoked first, so that a successor can go on at once."""
        self._stopping.set()
        self._thread.join(timeout_seconds)
        self.lease.revoke()

    def _run(self) -> None:
        # The consumer is closed by the thread that polls it: closing during a poll hangs for ever.
        try:
            self._consumer.subscribe(
                [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
            while not self._stopping.is_set():
                self._poll()
                self._renew()
        finally:
            self._consumer.close()

    def _poll(self) -> None:
        try:
            message = self._consumer.poll(_POLL_SECONDS)
        except KafkaException as error:
            log.warning("polling the group failed", error=str(error))
            self._stopping.wait(_POLL_SECONDS)
            return
        reported = None if message is None else message.error()
        if reported is not None:
            log.warning("the group reports", error=reported.str())
            self._note(reported)

    def _renew(self) -> None:
        """Commit positions, not waiting: the answer arrives in a later poll."""
        positions = self._positions()
        mine = {p: o for p, o in positions.items() if p in self.partitions}
        now = elapsed()
        # One that has just begun to answer should not wait for the next turn.
        is_due = now >= self._next_renewal or not self._renewed_for >= mine.keys()
        if not mine or not is_due or self._sent_at is not None:
            return
        offsets = [TopicPartition(self._topic, p, o) for p, o in mine.items()]
        try:
            self._sent_at, self._next_renewal = now, now + self._renew_every
            self._renewed_for = frozenset(mine)
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._sent_at = None
            log.warning("the lease could not be renewed", error=str(error))

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        sent_at, self._sent_at = self._sent_at, None
        failure = error or next((p.error for p in partitions if p.error), None)
        if failure is None and sent_at is not None:
            self.lease.renew(sent_at)
            self.problem = ""
        elif failure is not None:
            self._next_renewal = elapsed() + _POLL_SECONDS
            log.debug("the group did not confirm the lease", error=str(failure))
            self._note(failure)

    def _note(self, error: KafkaError) -> None:
        forbidden = not_authorized(error, "taking part in the group", self._grants)
        if forbidden is not None and not self.problem:
            self.problem = str(forbidden)
            log.error("the group is out of reach", reason=self.problem)

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        new = self._numbers(assigned)
        if assigned:
            # Explicit offsets: without them a new group would look for committed ones and report an error.
            parts = [TopicPartition(self._topic, p, OFFSET_END) for p in sorted(new)]
            consumer.incremental_assign(parts)
            consumer.pause(parts)
        self.partitions |= new
        self._next_renewal = 0.0
        self.problem = ""
        self.joined.set()
        self._listener.assigned(new)
        log.info("assigned", partitions=sorted(new), all=sorted(self.partitions))

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        gone = self._numbers(revoked)
        self.partitions -= gone
        self._listener.revoked(gone)
        consumer.incremental_unassign(revoked)
        log.info("revoked", partitions=sorted(gone), all=sorted(self.partitions))

    def _on_lost(self, consumer: Consumer, lost: list[TopicPartition]) -> None:
        self.lease.revoke()
        gone = self._numbers(lost)
        self.partitions -= gone
        self._listener.lost(gone)
        consumer.incremental_unassign(lost)
        log.warning("lost", partitions=sorted(gone), all=sorted(self.partitions))

    @staticmethod
    def _numbers(partitions: Iterable[TopicPartition]) -> frozenset[int]:
        return frozenset(p.partition for p in partitions)
