"""The one writer of a copy: a transaction holds records, and how far the copy is with them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from balance_service.devtools.topic_copy.contents import writable_timestamp
from balance_service.errors import ConfigurationError, RetriableError, TaskMigratedError
from balance_service.kafka.clients import (
    by_remedy,
    new_client,
    not_authorized,
    reader_config,
    transaction_error,
    transactional_config,
)
from balance_service.kafka.messages import headers_of, place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from confluent_kafka import Message

    from balance_service.errors import BalanceServiceError
    from balance_service.kafka.topics import Topic
    from balance_service.settings import Settings

# A record may be larger here than where it is kept, for there it is compressed.
_LARGEST_RECORD_BYTES = 100 << 20
# Nobody waits for a copier's death: its successor ends what it left open.
_TRANSACTION_TIMEOUT_MS = 60_000
_TIMEOUT_SECONDS = 60.0
_ATTEMPT_SECONDS = 5.0
_LOOK_EVERY_SECONDS = 0.1
_COORDINATOR_SOON = {
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError._TIMED_OUT,
}
_BY_KEY = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a source partition is copied: the next offset, and how many records went before it."""

    offset: int
    records: int


class Copier:
    """The one writer of a copy, by its transactional id, and what it noted in its consumer group. For one thread.

    Once a call has failed it is spent: the next run takes up what is committed.
    """

    def __init__(self, settings: Settings, source: Topic, target: Topic) -> None:
        """Raises ConfigurationError if a client refuses a property."""
        # No topic's name holds a colon, so no two copies share this one.
        name = f"copy:{source.name}:{target.name}"
        self._source = source
        self._target = target
        self._note = f"{source.topic_id} {target.topic_id} "
        self._refusal: KafkaError | None = None
        self._grants = (
            f"Write on topic '{target.name}' and on transactional id '{name}', "
            f"Read on group '{name}' and on topic '{source.name}'"
        )
        self._group = new_client(Consumer, {**reader_config(settings), "group.id": name})
        self._producer = new_client(
            Producer,
            {
                "compression.type": "lz4",
                **transactional_config(settings, name),
                "transaction.timeout.ms": _TRANSACTION_TIMEOUT_MS,
                "message.max.bytes": _LARGEST_RECORD_BYTES,
                "delivery.report.only.error": True,
            },
        )

    def __enter__(self) -> Self:
        try:
            self._producer.init_transactions(_TIMEOUT_SECONDS)
        except KafkaException as error:
            self._group.close()
            raise by_remedy(error, "ending what an earlier run left open", self._grants) from error
        return self

    def __exit__(self, *_: object) -> None:
        # What is still open the next run aborts; waiting for it here would only hold up the error.
        self._producer.purge()
        self._group.close()

    def progress(self) -> dict[int, Progress]:
        """How far each source partition is copied, where anything is; final once the transactions are initialised.

        Raises:
            ConfigurationError: what was copied is of another topic of the source's name.
            RetriableError: the group's coordinator does not answer.
        """
        done = {}
        for tp in self._noted():
            if tp.offset < 0 or not tp.metadata:
                continue
            source_id, target_id, records = tp.metadata.split(" ")
            # Notes of a target that was deleted since count for nothing.
            if target_id != self._target.topic_id:
                continue
            if source_id != self._source.topic_id:
                raise ConfigurationError(
                    f"topic '{self._source.name}' was deleted and made anew since it was copied to "
                    f"'{self._target.name}'; {start_anew(self._target.name)}"
                )
            done[tp.partition] = Progress(tp.offset, int(records))
        return done

    def write(self, batch: Sequence[Message], done: dict[int, Progress]) -> None:
        """Write records, and how far that is, in one transaction; then note the latter in `done`.

        Raises:
            TaskMigratedError: another run of the same copy took over.
            RetriableError: not committed, or nobody knows.
        """
        after: dict[int, Progress] = {}
        try:
            self._producer.begin_transaction()
            for message in batch:
                partition, offset = place_of(message)
                before = after.get(partition) or done.get(partition) or Progress(0, 0)
                after[partition] = Progress(offset + 1, before.records + 1)
                self._produce(message, partition)
            offsets = [
                TopicPartition(self._source.name, p, d.offset, f"{self._note}{d.records}") for p, d in after.items()
            ]
            self._producer.send_offsets_to_transaction(offsets, self._group.consumer_group_metadata(), _TIMEOUT_SECONDS)
            self._producer.commit_transaction(_TIMEOUT_SECONDS)
        except KafkaException as error:
            raise self._failure(error) from error
        except BufferError as error:
            raise RetriableError("the producer's queue is full; run it again") from error
        done |= after

    def _noted(self) -> list[TopicPartition]:
        wanted = [TopicPartition(self._source.name, p) for p in range(self._source.partitions)]
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while True:
            try:
                # Of a reader of what is committed it waits for the end of a transaction that holds offsets.
                return self._group.committed(wanted, timeout=_ATTEMPT_SECONDS)
            except KafkaException as error:
                # A coordinator that may not be asked is told of aside; the request only runs out of time.
                told = self._group.poll(0)
                told_error = None if told is None else told.error()
                forbidden = told_error and not_authorized(told_error, "reading how far the copy is", self._grants)
                if forbidden:
                    raise forbidden from error
                # A group's first request may meet a coordinator that is only being found.
                if error.args[0].code() not in _COORDINATOR_SOON or time.monotonic() > deadline:
                    raise by_remedy(error, "reading how far the copy is", self._grants) from error
            time.sleep(_LOOK_EVERY_SECONDS)

    def _produce(self, message: Message, partition: int) -> None:
        key = message.key()
        self._producer.produce(
            self._target.name,
            message.value(),
            key,
            partition % self._target.partitions if key is None else _BY_KEY,
            headers=[*headers_of(message)],
            timestamp=writable_timestamp(message),
            on_delivery=self._on_failure,
        )

    def _on_failure(self, error: KafkaError | None, _message: Message) -> None:
        self._refusal = self._refusal or error

    def _failure(self, error: KafkaException) -> BalanceServiceError:
        """What a failed transaction means."""
        if isinstance(by_remedy(error, "copying"), TaskMigratedError):
            return TaskMigratedError(
                f"another run that copies '{self._source.name}' to '{self._target.name}' took over from this one"
            )
        # The reports of what was not delivered, which may say more than the transaction's own error.
        self._producer.poll(0)
        causes = [
            cause for cause in (self._refusal, error.args[0], transaction_error(self._producer)) if cause is not None
        ]
        forbidden = next(filter(None, (not_authorized(cause, "the copy", self._grants) for cause in causes)), None)
        return forbidden or RetriableError(
            f"records could not be written to '{self._target.name}': {causes[0].str()}; what is copied stays, so "
            "remove the cause and run this again"
        )


def start_anew(target: str) -> str:
    """The way out when a target is not what the copy left."""
    return f"copy to a topic that does not exist yet, or delete '{target}' first"
