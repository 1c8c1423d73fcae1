"""Membership in the consumer group: which partitions of which topics are ours, and until when that may be trusted.

One thread polls, runs the rebalance callbacks and renews the lease; any thread may ask. The consumer owns
partitions only: it is paused on all of them, and Spark does the reading.
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
"""Topics, each with the number of a partition."""

_POLL_SECONDS = 0.1
_MARGIN_SECONDS = 1.0
_RENEWALS_PER_SESSION = 4
_STOP_SECONDS = 5.0

_REMEDIES = {
    KafkaError.INVALID_SESSION_TIMEOUT: "set BALANCE_SESSION_TIMEOUT_MS to what lies between the brokers' "
    "group.min.session.timeout.ms and group.max.session.timeout.ms",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "stop what else takes part in this group",
    KafkaError.GROUP_MAX_SIZE_REACHED: "run fewer instances, or raise the brokers' group.max.size",
}
"""What to do where the group lets a member in only after somebody has acted. What is not here passes by itself."""


class AssignmentListener(Protocol):
    """Told of changes of assignment, on the membership thread."""

    def assigned(self, partitions: Partitions) -> None:
        """These became ours. Must return at once."""

    def revoked(self, partitions: Partitions) -> None:
        """These must be let go before this returns, within a bound."""

    def lost(self, partitions: Partitions) -> None:
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
        **base,
        "partition.assignment.strategy": "cooperative-sticky",
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


def refusal(error: KafkaError, group: str, topics: Sequence[str]) -> ConfigurationError | None:
    """What the group reports as what keeps a member out until somebody acts; None if it passes by itself."""
    remedy = _REMEDIES.get(error.code())
    if remedy is not None:
        return ConfigurationError(f"group '{group}' does not let this member in ({error.str()}); {remedy}")
    return not_authorized(error, "taking part in the group", f"Read on group '{group}' and on {_named(topics)}")


class Membership:
    """One member of the group. Owns the consumer."""

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
        positions: of each partition of which a task answers; committed for tools, and to renew the lease.
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
        """Set at the first assignment, be it an empty one."""
        self.partitions: Partitions = frozenset()
        """What is ours, as of the last rebalance."""
        self.problem = ""
        """What keeps this member out of the group, and what to do; empty while all is well."""
        self._group = str(config["group.id"])
        self._consumer = new_client(Consumer, {**config, "on_commit": self._committed})
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        """Join the group; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Leave the group; partitions are revoked first, so that a successor can go on at once."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)
        self.lease.revoke()

    def _run(self) -> None:
        # The consumer is closed by the thread that polls it: closing during a poll hangs for ever.
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
        """Commit positions, not waiting: the answer arrives in a later poll."""
        positions = self._positions()
        mine = {p: o for p, o in positions.items() if p in self.partitions}
        now = elapsed()
        # One that has just begun to answer should not wait for the next turn.
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
        # The coordinator checks the membership for all partitions at once, and the right to each topic for itself.
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
            # Explicit offsets: without them a new group would look for committed ones and report an error.
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
