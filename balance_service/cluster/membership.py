"""Membership in the consumer group: the partitions that this instance owns, and the lease on them.

One thread polls, runs the rebalance callbacks and renews the lease; any thread may read. The consumer only owns
partitions: it is paused on all of them, and Spark reads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from balance_service.errors import ConfigurationError
from balance_service.kafka.clients import new_client, not_authorized
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from balance_service.kafka.clients import ClientConfig

log = structlog.get_logger(__name__)

Partitions = frozenset[tuple[str, int]]
"""Pairs of topic and partition."""

_POLL_SECONDS = 0.1
_MARGIN_SECONDS = 1.0
_RENEWALS_PER_SESSION = 4
_STOP_SECONDS = 5.0

_REMEDIES = {
    KafkaError.INVALID_SESSION_TIMEOUT: "set BALANCE_SESSION_TIMEOUT_MS to a value between the brokers' "
    "group.min.session.timeout.ms and group.max.session.timeout.ms",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "stop the other members of this group",
    KafkaError.GROUP_MAX_SIZE_REACHED: "run fewer instances, or raise the brokers' group.max.size",
}
"""By error, what an operator must do before the group admits this member. Other errors pass by themselves."""


class AssignmentListener(Protocol):
    """Called with changes of the assignment, on the membership thread."""

    def assigned(self, partitions: Partitions) -> None:
        """This instance owns these partitions now. Must return at once."""

    def revoked(self, partitions: Partitions) -> None:
        """Must release these partitions before it returns, within a bounded time."""

    def lost(self, partitions: Partitions) -> None:
        """Another instance may own these partitions already."""


class Lease:
    """How long an instance may answer as owner without hearing from the group.

    A lease begins just before the last request that the coordinator verified against this membership. It lasts for
    the session timeout less a margin: until then, no other instance can own the partitions.
    Source: Gray & Cheriton, "Leases" (1989).
    """

    def __init__(self, session_timeout_ms: int, clock: Callable[[], float] = elapsed) -> None:
        self._length = session_timeout_ms / 1000 - _MARGIN_SECONDS
        self._clock = clock
        self._expires = float("-inf")

    def renew(self, sent_at: float) -> None:
        """Extends the lease: the coordinator confirmed a request that was sent at this time of the clock."""
        self._expires = max(self._expires, sent_at + self._length)

    def revoke(self) -> None:
        """Ends the lease until the next renewal."""
        self._expires = float("-inf")

    @property
    def holds(self) -> bool:
        return self._clock() < self._expires


def consumer_config(base: ClientConfig, group: str, session_timeout_ms: int) -> ClientConfig:
    """A group member that reads nothing."""
    return {
        **base,
        "partition.assignment.strategy": "cooperative-sticky",
        "group.id": group,
        "session.timeout.ms": session_timeout_ms,
        "heartbeat.interval.ms": min(session_timeout_ms // 10, 500),
        "max.poll.interval.ms": max(300_000, 2 * session_timeout_ms),
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # Positions are restored from the changelog. A reset to either end of the topic would skip or repeat events.
        "auto.offset.reset": "error",
        "queued.min.messages": 1,
    }


def refusal(error: KafkaError, group: str, topics: Sequence[str]) -> ConfigurationError | None:
    """The error of a member that the group does not admit until an operator acts; None if it passes by itself."""
    remedy = _REMEDIES.get(error.code())
    if remedy is not None:
        return ConfigurationError(f"group '{group}' does not admit this member ({error.str()}); {remedy}")
    return not_authorized(error, "joining the group", f"Read on group '{group}' and on {_named(topics)}")


class Membership:
    """A member of the consumer group."""

    def __init__(
        self,
        *,
        config: ClientConfig,
        topics: Sequence[str],
        session_timeout_ms: int,
        listener: AssignmentListener,
        positions: Callable[[], Mapping[tuple[str, int], int]],
    ) -> None:
        """Args:
        positions: of the partitions whose tasks answer. They are committed for tools, and to renew the lease.
        """
        self._topics = sorted(set(topics))
        self._listener = listener
        self._positions = positions
        self.lease = Lease(session_timeout_ms)
        self._renew_every = session_timeout_ms / 1000 / _RENEWALS_PER_SESSION
        self._sent_at: float | None = None
        self._next_renewal = 0.0
        self._renewed_for: Partitions = frozenset()
        self._stopping = threading.Event()
        self.joined = threading.Event()
        """Set at the first assignment, even an empty one."""
        self.partitions: Partitions = frozenset()
        """The owned partitions as of the last rebalance."""
        self.problem = ""
        """Why the group does not admit this member, and what to do; empty if it does."""
        self._group = str(config["group.id"])
        self._consumer = new_client(Consumer, {**config, "on_commit": self._committed})
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        """Joins the group; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Revokes the partitions, so that a successor can open them at once, and leaves the group."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)
        self.lease.revoke()

    def _run(self) -> None:
        # The consumer is closed by the thread that polls it: closing during a poll hangs forever.
        try:
            self._consumer.subscribe(
                self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
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
        """Commits positions asynchronously: a later poll serves the answer."""
        positions = self._positions()
        mine = {p: o for p, o in positions.items() if p in self.partitions}
        now = elapsed()
        # A partition whose task has just begun to answer does not wait for the next renewal.
        is_due = now >= self._next_renewal or not self._renewed_for >= mine.keys()
        if not mine or not is_due or self._sent_at is not None:
            return
        offsets = [TopicPartition(topic, p, o) for (topic, p), o in mine.items()]
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
        # The coordinator verifies the membership once for all partitions, and the ACL for each topic.
        is_member = error is None and any(p.error is None for p in partitions)
        if is_member and sent_at is not None:
            self.lease.renew(sent_at)
            self.problem = ""
        if failure is not None:
            self._next_renewal = elapsed() + _POLL_SECONDS
            log.debug("the group did not confirm the lease", error=str(failure))
            self._note(failure)

    def _note(self, error: KafkaError) -> None:
        refused = refusal(error, self._group, self._topics)
        if refused is not None and self.problem != str(refused):
            self.problem = str(refused)
            log.error("the group is out of reach", reason=self.problem)

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        new = _pairs(assigned)
        if assigned:
            # Without explicit offsets, a new group would look up committed ones and report an error.
            parts = [TopicPartition(topic, p, OFFSET_END) for topic, p in sorted(new)]
            consumer.incremental_assign(parts)
            consumer.pause(parts)
        self.partitions |= new
        self._next_renewal = 0.0
        self.problem = ""
        self.joined.set()
        self._listener.assigned(new)
        log.info("assigned", partitions=_shown(new), all=_shown(self.partitions))

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        gone = _pairs(revoked)
        self.partitions -= gone
        self._listener.revoked(gone)
        consumer.incremental_unassign(revoked)
        log.info("revoked", partitions=_shown(gone), all=_shown(self.partitions))

    def _on_lost(self, consumer: Consumer, lost: list[TopicPartition]) -> None:
        self.lease.revoke()
        gone = _pairs(lost)
        self.partitions -= gone
        self._listener.lost(gone)
        consumer.incremental_unassign(lost)
        log.warning("lost", partitions=_shown(gone), all=_shown(self.partitions))


def _pairs(partitions: Iterable[TopicPartition]) -> Partitions:
    return frozenset((p.topic, p.partition) for p in partitions)


def _shown(partitions: Partitions) -> list[str]:
    return [f"{topic}-{partition}" for topic, partition in sorted(partitions)]


def _named(topics: Sequence[str]) -> str:
    return " and ".join(f"topic '{topic}'" for topic in topics)
