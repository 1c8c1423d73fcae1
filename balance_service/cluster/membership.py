"""Membership in consumer groups: the partitions that this instance owns, and the leases on them.

Each topic that stages read has a group of its own, `<application id>/<topic>`, so that each spreads evenly over the
instances. Before an instance joins these, it joins the guard group, `<application id>`.

Each member has a thread that polls, runs the callbacks of rebalances and renews the lease; any thread may read. A
consumer only owns partitions: it is paused on all of them, and Spark reads.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

import structlog
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from balance_service.errors import ConfigurationError, FatalError
from balance_service.kafka.clients import common_config, new_client, not_authorized
from balance_service.kafka.lease import Lease
from balance_service.process.runtime import elapsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from balance_service.kafka.clients import ClientConfig
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

Partitions = frozenset[int]
"""Partitions of one topic."""

COOPERATIVE, GUARDING = "cooperative-sticky", "range"
"""The assignors of the topics' groups, and of the guard group. Kafka admits only members of one kind to a group."""

_POLL_SECONDS = 0.1
# While nothing changes: a thousand members of a large application must not wake up ten times a second.
_IDLE_POLL_SECONDS = 0.5
_RENEWALS_PER_SESSION = 4
# Enough for the others to get the assignment of the first round: a join before that would take it from them.
_ASK_AGAIN_SECONDS = 0.1
# For so long after its admission, a member may get its partitions at any moment.
_NEW_SECONDS = 1.0
_STOP_SECONDS = 5.0
_LEAST_STOP_SECONDS = 0.5

_REMEDIES = {
    KafkaError.INVALID_SESSION_TIMEOUT: "set BALANCE_SESSION_TIMEOUT_MS to a value between the brokers' "
    "group.min.session.timeout.ms and group.max.session.timeout.ms",
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: "stop the other members of this group, for example instances of an "
    "earlier version",
    KafkaError.GROUP_MAX_SIZE_REACHED: "run fewer instances, or raise the brokers' group.max.size",
}
"""By error, what an operator must do before the group admits this member. Other errors pass by themselves."""


class AssignmentListener(Protocol):
    """Called with changes of the assignment of a topic, on the thread of its member."""

    def assigned(self, topic: str, partitions: Partitions) -> None:
        """This instance owns these partitions now. Must return at once."""

    def revoked(self, topic: str, partitions: Partitions) -> None:
        """Must release these partitions before it returns, within a bounded time."""

    def lost(self, topic: str, partitions: Partitions) -> None:
        """Another instance may own these partitions already."""


def group_of(application_id: str, topic: str) -> str:
    """The name of a topic's group. Neither part may contain a slash, so no two have the same."""
    return f"{application_id}/{topic}"


def consumer_config(
    base: ClientConfig, group: str, session_timeout_ms: int, assignor: str = COOPERATIVE
) -> ClientConfig:
    """A group member that reads nothing."""
    return {
        **base,
        "partition.assignment.strategy": assignor,
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


def guard_config(settings: Settings) -> ClientConfig:
    """A member of the guard group."""
    return consumer_config(common_config(settings), settings.application_id, settings.session_timeout_ms, GUARDING)


def refusal(error: KafkaError, group: str, topic: str) -> ConfigurationError | None:
    """The error of a member that the group does not admit until an operator acts; None if it passes by itself."""
    remedy = _REMEDIES.get(error.code())
    if remedy is not None:
        return ConfigurationError(f"group '{group}' does not admit this member ({error.str()}); {remedy}")
    return not_authorized(error, "joining the group", f"Read on group '{group}' and on topic '{topic}'")


class _Member:
    """A member of a consumer group that subscribes to one topic, on a thread of its own."""

    def __init__(self, config: ClientConfig, topic: str) -> None:
        self._topic = topic
        self._group = str(config["group.id"])
        self._stopping = threading.Event()
        self.joined = threading.Event()
        """Set at the first assignment, even an empty one."""
        self.problem = ""
        """Why the group does not admit this member, and what to do; empty if it does."""
        self._consumer = new_client(Consumer, config)
        self._thread = threading.Thread(target=self._run, name=f"group-{self._group}", daemon=True)

    def start(self) -> None:
        """Joins the group; returns at once."""
        self._thread.start()

    def leave(self) -> None:
        """Leaves the group; returns at once. `stop` awaits it."""
        self._stopping.set()

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """Leaves the group, and waits until it has, at most this long."""
        self.leave()
        if self._thread.ident is None:
            self._consumer.close()
        else:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        # The consumer is closed by the thread that polls it: closing during a poll hangs forever.
        try:
            self._subscribe()
            while not self._stopping.is_set():
                self._turn()
        finally:
            self._consumer.close()

    def _subscribe(self) -> None:
        raise NotImplementedError

    def _turn(self) -> None:
        """Polls once, and does what is due then."""
        raise NotImplementedError

    def _poll(self, seconds: float) -> None:
        try:
            message = self._consumer.poll(seconds)
        except KafkaException as error:
            log.warning("polling the group failed", group=self._group, error=str(error))
            self._stopping.wait(_POLL_SECONDS)
            return
        reported = None if message is None else message.error()
        if reported is not None:
            log.warning("the group reports", group=self._group, error=reported.str())
            self.note(reported)

    def note(self, error: KafkaError) -> None:
        """Notes an error of the group, and whether it is why the group does not admit this member."""
        refused = refusal(error, self._group, self._topic)
        if refused is not None and self.problem != str(refused):
            self.problem = str(refused)
            log.error("the group is out of reach", reason=self.problem)


class Guard(_Member):
    """A member of the guard group, `<application id>`, which owns nothing.

    In earlier versions that group assigned the partitions, with another assignor. Kafka does not admit members with
    different assignors to one group, so no such instance owns a partition while one of this version does. Commands that
    need the application to stand still look at this group, too.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(guard_config(settings), settings.application_servers_topic)

    def _subscribe(self) -> None:
        self._consumer.subscribe([self._topic], on_assign=self._on_assign)

    def _turn(self) -> None:
        # It leaves after all others, so a stop must not wait for a long poll.
        self._poll(_POLL_SECONDS)

    def _on_assign(self, consumer: Consumer, _assigned: list[TopicPartition]) -> None:
        consumer.assign([])
        self.joined.set()
        self.problem = ""

    def note(self, error: KafkaError) -> None:
        super().note(error)
        if error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL and self.joined.is_set():
            # The other member may own partitions too. A new start waits until it has left.
            raise FatalError(self.problem)


class Membership(_Member):
    """A member of the group of one topic."""

    def __init__(
        self,
        *,
        config: ClientConfig,
        topic: str,
        session_timeout_ms: int,
        listener: AssignmentListener,
        positions: Callable[[str], Mapping[int, int]],
        guarded: threading.Event,
    ) -> None:
        """Args:
        positions: of the topic's partitions whose tasks answer. They are committed for tools, and to renew the lease.
        guarded: set once this instance is in the guard group; it does not join this group before.
        """
        super().__init__({**config, "on_commit": self.confirmed}, topic)
        self._listener = listener
        self._positions = positions
        self._guarded = guarded
        self.lease = Lease(session_timeout_ms)
        self._renew_every = session_timeout_ms / 1000 / _RENEWALS_PER_SESSION
        self._sent_at: float | None = None
        self._next_renewal = 0.0
        self._renewed_for: Partitions = frozenset()
        self._admitted_at: float | None = None
        # The client may drop its references while one of them runs.
        self._callbacks = {"on_assign": self._on_assign, "on_revoke": self._on_revoke, "on_lost": self._on_lost}
        self.partitions: Partitions = frozenset()
        """The owned partitions as of the last rebalance."""

    @property
    def has_asked(self) -> bool:
        """Whether the lease was asked for: while no task of the topic answers, there is nothing to commit."""
        return bool(self._renewed_for & self.partitions)

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """Revokes the partitions, so that a successor can open them at once, and leaves the group."""
        super().stop(timeout_seconds)
        self.lease.revoke()

    def _subscribe(self) -> None:
        while not self._guarded.wait(_POLL_SECONDS):
            if self._stopping.is_set():
                return
        self._consumer.subscribe([self._topic], **self._callbacks)

    def _turn(self) -> None:
        # A partition whose task has just begun to answer does not wait for its lease.
        is_idle = self.joined.is_set() and self._renewed_for >= self.partitions and not self._is_new
        self._poll(_IDLE_POLL_SECONDS if is_idle else _POLL_SECONDS)
        self.renew()

    def renew(self) -> None:
        """Commits positions asynchronously: a later poll serves the answer."""
        mine = {p: o for p, o in self._positions(self._topic).items() if p in self.partitions}
        now = elapsed()
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
            log.warning("the lease could not be renewed", topic=self._topic, error=str(error))

    def confirmed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """The answer to a commit: the lease is renewed if the group has accepted a partition, from the request on."""
        sent_at, self._sent_at = self._sent_at, None
        failure = error or next((p.error for p in partitions if p.error), None)
        # The coordinator verifies the membership once for all partitions, and the ACL for the topic.
        is_member = error is None and any(p.error is None for p in partitions)
        if is_member and sent_at is not None:
            self.lease.renew(sent_at)
            self.problem = ""
        if failure is not None:
            self._next_renewal = elapsed() + _POLL_SECONDS
            log.debug("the group did not confirm the lease", topic=self._topic, error=str(failure))
            self.note(failure)

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        new = _numbers(assigned)
        if assigned:
            # Without explicit offsets, a new group would look up committed ones and report an error.
            parts = [TopicPartition(self._topic, p, OFFSET_END) for p in sorted(new)]
            consumer.incremental_assign(parts)
            consumer.pause(parts)
        self.partitions |= new
        self._next_renewal = 0.0
        self.problem = ""
        self.joined.set()
        self._listener.assigned(self._topic, new)
        self._log_change("assigned", new)
        if self._admitted_at is None:
            self._admitted_at = elapsed()
            self._ask_again()

    def _ask_again(self) -> None:
        """Has a new member that owns nothing join again, for the partitions that others are releasing for it.

        librdkafka would wait until a second after it joined first, and no instance owns those partitions until then. A
        subscription, even to the same topic, joins without that wait. The group answers once all others have released.
        """
        if not self.partitions and not self._stopping.wait(_ASK_AGAIN_SECONDS):
            self._consumer.subscribe([self._topic], **self._callbacks)

    @property
    def _is_new(self) -> bool:
        """Whether the group has admitted this member a moment ago."""
        return self._admitted_at is not None and elapsed() - self._admitted_at < _NEW_SECONDS

    def _on_revoke(self, consumer: Consumer, revoked: list[TopicPartition]) -> None:
        gone = _numbers(revoked)
        self._release(gone)
        self._listener.revoked(self._topic, gone)
        consumer.incremental_unassign(revoked)
        self._log_change("revoked", gone)

    def _on_lost(self, consumer: Consumer, lost: list[TopicPartition]) -> None:
        self.lease.revoke()
        self._admitted_at = None
        gone = _numbers(lost)
        self._release(gone)
        self._listener.lost(self._topic, gone)
        consumer.incremental_unassign(lost)
        self._log_change("lost", gone)

    def _release(self, gone: Partitions) -> None:
        self.partitions -= gone
        # A partition that comes back has a task that begins to answer again.
        self._renewed_for -= gone

    def _log_change(self, change: str, partitions: Partitions) -> None:
        tell = log.warning if change == "lost" else log.info
        tell(change, topic=self._topic, partitions=sorted(partitions), all=sorted(self.partitions))


class Memberships:
    """All memberships of an instance: in the guard group, and in the groups of the topics that its stages read."""

    def __init__(
        self,
        settings: Settings,
        topics: Iterable[str],
        listener: AssignmentListener,
        positions: Callable[[str], Mapping[int, int]],
    ) -> None:
        """Args: as of `Membership`."""
        timeout_ms = settings.session_timeout_ms
        self._guard = Guard(settings)
        self.of = {
            topic: Membership(
                config=consumer_config(common_config(settings), group_of(settings.application_id, topic), timeout_ms),
                topic=topic,
                session_timeout_ms=timeout_ms,
                listener=listener,
                positions=positions,
                guarded=self._guard.joined,
            )
            for topic in sorted(topics)
        }
        """By topic."""

    @property
    def joining(self) -> list[str]:
        """The topics whose groups have not admitted this instance yet, or not confirmed it for the first time."""
        return [
            topic
            for topic, one in self.of.items()
            if not one.joined.is_set() or (one.has_asked and not one.lease.was_confirmed)
        ]

    @property
    def problems(self) -> list[str]:
        """Why groups do not admit this instance, and what to do."""
        members: list[_Member] = [self._guard, *self.of.values()]
        return list(dict.fromkeys(one.problem for one in members if one.problem))

    @property
    def own_some(self) -> bool:
        """Whether this instance owns a partition."""
        return any(one.partitions for one in self.of.values())

    @property
    def unconfirmed(self) -> list[str]:
        """The topics whose tasks would answer as owners here, and may not, because the lease does not hold."""
        return [topic for topic, one in self.of.items() if one.has_asked and not one.lease.holds]

    def guard(self) -> None:
        """Joins the guard group; returns at once."""
        self._guard.start()

    def start(self) -> None:
        """Joins the groups of the topics once the guard group has admitted this instance. Returns at once."""
        for one in self.of.values():
            one.start()

    def stop(self) -> None:
        """Leaves the groups of all topics at once, and the guard group after them."""
        deadline = elapsed() + _STOP_SECONDS
        for one in self.of.values():
            one.leave()
        for one in self.of.values():
            one.stop(max(0.0, deadline - elapsed()))
        self._guard.stop(max(_LEAST_STOP_SECONDS, deadline - elapsed()))


def _numbers(partitions: Iterable[TopicPartition]) -> Partitions:
    return frozenset(p.partition for p in partitions)
