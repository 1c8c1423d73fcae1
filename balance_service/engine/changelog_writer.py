"""Writes a task's commits: states, dead letters, outputs and position, in one transaction. Used under its lock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException, Producer

from balance_service.engine.records import POSITION_KEY
from balance_service.errors import (
    BalanceServiceError,
    ChangelogCutError,
    NotAuthorizedError,
    RetriableError,
    TaskMigratedError,
)
from balance_service.kafka.clients import by_remedy, new_client, not_authorized, transaction_error
from balance_service.kafka.messages import offset_of
from balance_service.kafka.producers import connect, wait_for_deliveries
from balance_service.process.failpoints import failpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from confluent_kafka import Message

    from balance_service.engine.records import DeadLetter, Output, Record, TaskId
    from balance_service.kafka.clients import ClientConfig

    Headers = list[tuple[str, str | bytes | None]]
    Report = Callable[[KafkaError | None, Message], None]
    _Queued = tuple[Any, ...]


_FENCE_ATTEMPTS = 5
_FENCE_TIMEOUT_SECONDS = 10.0
_COMMIT_TIMEOUT_SECONDS = 30.0
_ROOM_WITHIN_SECONDS = 0.01
# To librdkafka 0 is now, and -1 too.
_NOW, _EARLIEST_MS = 0, 1
_CONSEQUENCES = {KafkaError._STATE, KafkaError._FATAL}


class SecondWriterError(RetriableError):
    """The changelog has records that this task did not write since it fenced all others."""


class ChangelogWriter:
    """The only writer of a task's changelog partition; its transactional id fences all others.

    After a call has failed, close the writer and open a new one: librdkafka does not allow to continue with a producer
    whose commit timed out.
    """

    def __init__(
        self,
        config: ClientConfig,
        task_id: TaskId,
        changelog: str,
        dead_letters: str,
        envelope: Envelope,
    ) -> None:
        self._envelope = envelope
        self._producer: Producer | None = new_client(Producer, config)
        self._transactional_id = str(config["transactional.id"])
        self._partition = task_id.partition
        self._changelog = changelog
        self._dead_letters = dead_letters
        self._written_to = {changelog, dead_letters}
        self._next: int | None = None

    def fence(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Aborts the open transaction of a predecessor and fences that predecessor.

        Args:
            should_stop: called before each attempt, because a task that lost its partition must not fence its
                successor.

        Raises:
            RetriableError: the transaction coordinator does not respond in time.
            TaskMigratedError: a successor fenced this writer, or `should_stop` returned True.
        """
        connect(self._open_producer(), self._changelog)
        for attempt in range(_FENCE_ATTEMPTS):
            if should_stop():
                raise TaskMigratedError("the task was closed before it fenced its predecessor")
            try:
                self._open_producer().init_transactions(_FENCE_TIMEOUT_SECONDS)
            except KafkaException as error:
                if not error.args[0].retriable() or attempt == _FENCE_ATTEMPTS - 1:
                    raise self._by_remedy(error, "fencing the task's previous holder") from error
            else:
                return

    def expect(self, end: int) -> None:
        """Has the next commit begin at an offset of the changelog, its end after `fence`; later ones follow on it."""
        self._next = end

    def commit(
        self,
        states: Iterable[Record],
        dead_letters: Iterable[DeadLetter],
        position: bytes,
        holds_up_to: int,
        outputs: Iterable[Output] = (),
    ) -> int:
        """Writes states, dead letters, outputs and last the position, in one transaction.

        Args:
            holds_up_to: the changelog offset that the store has applied up to.

        Returns:
            The changelog offset after the position record.

        Raises:
            TaskMigratedError: the writer was fenced; nothing was committed.
            NotAuthorizedError: the brokers do not allow the write; nothing was committed.
            ChangelogCutError: the changelog ends below `holds_up_to`; nothing was committed.
            SecondWriterError: another producer has written to the changelog; nothing was committed.
            RetriableError: nothing was committed, or the outcome is unknown; the changelog shows which.
        """
        try:
            return self._transact(self._open_producer(), states, dead_letters, position, holds_up_to, outputs)
        except KafkaException as error:
            # While a large batch is still being produced, the producer reports a fatal state without its cause.
            if error.args[0].code() in _CONSEQUENCES:
                self._raise_cause(self._open_producer())
            raise self._by_remedy(error, "committing a micro-batch") from error

    def close(self) -> None:
        """Destroys the producer with the records that it still has. Idempotent.

        The producer's own `close` would wait for the broker to abort the transaction. The next `fence` does that.
        """
        if self._producer is not None:
            self._producer.purge()
            self._producer = None

    def _transact(
        self,
        producer: Producer,
        states: Iterable[Record],
        dead_letters: Iterable[DeadLetter],
        position: bytes,
        holds_up_to: int,
        outputs: Iterable[Output],
    ) -> int:
        delivery = _Delivery()
        producer.begin_transaction()
        failpoint("begun")
        # Delivery reports for states would cost as much as the states. They precede the position in the same partition,
        # and librdkafka does not commit a transaction if one of its records was not delivered.
        changelog, own_partition = self._changelog, self._partition
        count = self._queue(producer, ((changelog, state, key, own_partition) for key, state in states))
        self._queue(producer, map(self._of_output, outputs))
        self._queue(producer, (self._of_letter(letter, delivery.report) for letter in dead_letters))
        self._queue(producer, [(changelog, position, POSITION_KEY, own_partition, delivery.report_position)])
        unsent = wait_for_deliveries(producer, _COMMIT_TIMEOUT_SECONDS)
        if delivery.failed or unsent:
            self._raise_cause(producer)
        delivery.check(unsent)
        # Kafka accepts writes to a recreated topic. A position that is the only record there would look valid, and all
        # earlier states would be lost.
        if (began := delivery.position_offset - count) < holds_up_to:
            raise ChangelogCutError(
                f"the changelog {self._changelog}-{self._partition} ends at {began}, and the store holds it up to "
                f"{holds_up_to}: it was recreated or truncated"
            )
        if self._next is not None and began > self._next:
            raise SecondWriterError(
                f"another producer has written to {self._changelog}-{self._partition}: a commit began at {began}, "
                f"not at {self._next}"
            )
        failpoint("produced")
        producer.commit_transaction(_COMMIT_TIMEOUT_SECONDS)
        failpoint("committed")
        # The marker of the transaction has an offset too.
        self._next = delivery.position_offset + 2
        return delivery.position_offset + 1

    def _of_output(self, output: Output) -> _Queued:
        _, topic, partition, key, value, timestamp_ms, headers = output
        self._written_to.add(topic)
        return topic, value, key, partition, None, None, max(timestamp_ms, _EARLIEST_MS), headers

    def _of_letter(self, letter: DeadLetter, report: Report) -> _Queued:
        key, value, headers = self._envelope.of(letter)
        return self._dead_letters, value, key, self._partition, report, None, _NOW, headers

    def _queue(self, producer: Producer, records: Iterable[_Queued]) -> int:
        """Queues records, each the arguments of `produce`; returns how many. Waits while the queue is full."""
        produce, count = producer.produce, 0
        for record in records:
            try:
                produce(*record)
            except (BufferError, KafkaException):
                self._queue_later(producer, record)
            count += 1
        return count

    @staticmethod
    def _queue_later(producer: Producer, record: _Queued) -> None:
        """Queues a record that the producer did not take at first, as soon as the queue has room.

        It raises no error that is its own cause, or that one of its variables has: such an error, and the frames of
        all callers with their views of stores, would stay until a collection.
        """
        deadline = time.monotonic() + _COMMIT_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            producer.poll(_ROOM_WITHIN_SECONDS)
            try:
                producer.produce(*record)
            except BufferError:
                continue
            except KafkaException as error:
                # An authorization error that librdkafka already knows is raised here, not in a delivery report.
                raise _forbidden(error.args[0], record[0]) or error from None
            return
        raise RetriableError("the producer's queue stays full")

    def _raise_cause(self, failed: Producer) -> None:
        """Raises the fencing or authorization error that is the reason for a failed delivery, if there is one."""
        error = transaction_error(failed)
        if error is not None:
            cause = by_remedy(KafkaException(error), "writing what a micro-batch changed", self._topic_grants())
            try:
                if not isinstance(cause, RetriableError):
                    raise cause
            finally:
                # As in `_queue_later`.
                del cause

    def _open_producer(self) -> Producer:
        if self._producer is None:
            raise TaskMigratedError("the task's writer is closed")
        return self._producer

    def _by_remedy(self, error: KafkaException, doing: str) -> BalanceServiceError:
        of_topic = error.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        # Kafka's grants may be prefixed, and the ids of the other partitions differ in their last digits alone.
        prefix = self._transactional_id.rstrip("0123456789")
        grants = self._topic_grants() if of_topic else f"Write on transactional ids prefixed '{prefix}'"
        return by_remedy(error, doing, grants)

    def _topic_grants(self) -> str:
        """Names all topics of the transaction, because the brokers do not say which one they do not allow."""
        topics = [f"topic '{name}'" for name in sorted(self._written_to)]
        return f"Write on {' and on '.join(topics)}"


class _Delivery:
    """The delivery reports of one transaction."""

    def __init__(self) -> None:
        self._error: KafkaError | None = None
        self._forbidden: NotAuthorizedError | None = None
        self.position_offset = -1

    def report(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._error = self._error or error
            self._forbidden = self._forbidden or _forbidden(error, str(message.topic()))

    def report_position(self, error: KafkaError | None, message: Message) -> None:
        self.report(error, message)
        if error is None:
            self.position_offset = offset_of(message)

    @property
    def failed(self) -> bool:
        """Whether a record was not delivered for another reason than a missing grant."""
        return self._error is not None and self._forbidden is None

    def check(self, unsent: int) -> None:
        if self._forbidden is not None:
            raise self._forbidden
        if self._error is not None:
            raise KafkaException(self._error)
        if unsent or self.position_offset < 0:
            raise RetriableError(f"{unsent} records of a micro-batch were not delivered in time")


def _forbidden(error: KafkaError, topic: str) -> NotAuthorizedError | None:
    return not_authorized(error, f"writing to {topic}", f"Write on topic '{topic}'")


# The size of a batch with one record, without its key and value: mostly headers, whose longest are topic names.
_ENVELOPE_BYTES = 2 << 10


@dataclass(frozen=True, slots=True)
class Envelope:
    """Makes the records of dead letters of one stage and source partition.

    Records larger than `largest_bytes` are stored without their value, and if necessary without their key: the brokers
    would reject them, and the partition could never continue.
    """

    read_model: str
    source: str
    partition: int
    application_id: str
    largest_bytes: int

    def of(self, letter: DeadLetter) -> tuple[bytes | None, bytes | None, Headers]:
        """Returns key, value and headers of a dead letter's record."""
        key, value = letter.key, letter.value
        headers: Headers = [
            ("dead-letter-cause", letter.cause.encode()),
            ("dead-letter-read-model", self.read_model.encode()),
            ("dead-letter-topic", self.source.encode()),
            ("dead-letter-application-id", self.application_id.encode()),
            ("dead-letter-partition", str(self.partition).encode()),
            ("dead-letter-offset", str(letter.offset).encode()),
            ("dead-letter-timestamp", str(letter.timestamp_ms).encode()),
        ]
        if letter.detail:
            headers.append(("dead-letter-detail", letter.detail.encode()))
        room = self.largest_bytes - _ENVELOPE_BYTES - len(letter.detail.encode())
        if value is not None and len(key or b"") + len(value) > room:
            headers.append(("dead-letter-value-bytes", str(len(value)).encode()))
            value = None
        if key is not None and len(key) > room:
            headers.append(("dead-letter-key-bytes", str(len(key)).encode()))
            key = None
        return key, value, headers
