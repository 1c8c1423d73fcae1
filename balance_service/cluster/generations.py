"""The topic of the read models' generations: each instance follows it, and operators' requests write it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaException, Producer

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.errors import (
    BalanceServiceError,
    ConfigurationError,
    PoisonRecordError,
    RetriableError,
    TaskMigratedError,
    UnreadableRecordError,
)
from balance_service.kafka.clients import by_remedy, new_client, reader_config, transactional_config
from balance_service.kafka.log_reader import LogReader, reader_to_end
from balance_service.kafka.producers import wait_for_deliveries
from balance_service.kafka.signing import ControlRecord, ControlRecords
from balance_service.kafka.topic_specs import prepare_generations
from balance_service.model.generations import Generations
from balance_service.process.failpoints import reach
from balance_service.process.runtime import PeriodicThread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.topics import Topics
    from balance_service.model.generations import Declaration
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_TRANSACTION_SECONDS = 15.0
_RETRY_SECONDS = 1.0


class GenerationLog(PeriodicThread):
    """Follows the topic of generations, once it exists, and writes to it. Any thread may read."""

    def __init__(self, settings: Settings, topics: Topics, registry: SchemaRegistry) -> None:
        """Reads the topic to its end, if there is one: no read model has another generation than its first otherwise.

        Raises:
            ConfigurationError: the schema is not usable, or others sign the records and this process has no secret.
            RetriableError: the broker or the registry does not respond.
        """
        super().__init__("generations", 0.0, self._follow)
        self._settings = settings
        self._topics = topics
        self._topic = settings.generations_topic
        schema = load_schema("Generations")
        self._codec = AvroCodec(registry, subject_of(self._topic, schema), schema)
        self.records = ControlRecords.of(settings, self._topic)
        self._known: Mapping[str, Generations] = {}
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._hearing = threading.Lock()
        self._read_began = float("-inf")
        self._read_failed: str | None = None
        self._changed = threading.Event()
        self._reader: LogReader | None = None
        self._followed: list[ControlRecord] = []
        self._read_to_end()
        self.records.require_secret()

    def stop(self, timeout_seconds: float) -> bool:
        has_ended = super().stop(timeout_seconds)
        if has_ended and self._reader is not None:
            self._reader.close()
        return has_ended

    def of(self, model: str) -> Generations:
        """Returns a read model's generations; without a record, it has the first one."""
        return self._known.get(model) or Generations(model)

    def serving(self, model: str) -> int:
        """Returns the generation that serves. Each query asks, so it makes no object."""
        known = self._known.get(model)
        return 1 if known is None else known.serving

    @property
    def known(self) -> Mapping[str, Generations]:
        """The read models that have a record."""
        return self._known

    def refresh(self) -> None:
        """Reads the topic to its end. One read serves all callers that have called before it began.

        Raises RetriableError as a reader.
        """
        called = time.monotonic()
        with self._reading:
            if self._read_began <= called:
                began, self._read_failed = time.monotonic(), None
                try:
                    self._read_to_end()
                except RetriableError as error:
                    self._read_failed = str(error)
                self._read_began = began
            if self._read_failed is not None:
                raise RetriableError(self._read_failed)

    def newest(self, model: str) -> Generations:
        """Returns a read model's generations according to the topic's present end.

        A model that has had one generation alone, as far as this instance knows, does not depend on the topic.

        Raises:
            RetriableError: the topic cannot be read.
        """
        try:
            self.refresh()
        except RetriableError:
            if self.of(model).newest > 1:
                raise
        return self.of(model)

    def wait(self, seconds: float) -> None:
        """Waits until a record is read, at most some seconds."""
        self._changed.wait(seconds)
        self._changed.clear()

    def begin(self, declarations: Mapping[str, Declaration]) -> None:
        """Writes what the first generations of the read models without a record are folded by.

        Raises:
            ConfigurationError: no record about a read model counts, though there are some.
            BalanceServiceError: as `write`.
        """
        for name in declarations.keys() - self._known.keys():
            if refused := self.records.unknown(name.encode()):
                # Its history is unknown: generation 1 may be one that was dropped.
                raise ConfigurationError(self.records.problem(refused[0]))
        while missing := {name: declared for name, declared in declarations.items() if name not in self._known}:
            try:
                self._write({name: partial(_begun, declared) for name, declared in missing.items()})
            except TaskMigratedError:
                # Instances that start together fence each other. The last one writes for all.
                self._read_to_end()

    def write(self, model: str, change: Callable[[Generations], Generations]) -> Generations:
        """Applies a transition to the model's newest state.

        A transaction by the topic's only transactional id keeps two writers apart: the second one fences the first
        before it reads the state.

        Raises:
            InvalidInputError: the transition is not possible.
            TaskMigratedError: nothing was written, because another instance writes.
            RetriableError: nothing was written, or the outcome is unknown.
        """
        return self._write({model: change})[model]

    def _write(self, changes: Mapping[str, Callable[[Generations], Generations]]) -> Mapping[str, Generations]:
        """Applies a transition to each of some models, in one transaction. A state that it leaves is not written."""
        with self._writing:
            # The transactional id has the topic's name.
            doing, grant = f"writing to topic '{self._topic}'", f"Write on topic and transactional id '{self._topic}'"
            config = transactional_config(self._settings, self._topic)
            # Tasks that open wait for a transaction that a killed instance has left open.
            config["transaction.timeout.ms"] = int(_TRANSACTION_SECONDS * 1000)
            producer = new_client(Producer, config)
            try:
                prepare_generations(self._topics, self._settings)
                producer.init_transactions(_TRANSACTION_SECONDS)
                read = self._read_to_end()
                before = {model: read.get(model) or Generations(model) for model in changes}
                after = {model: change(before[model]) for model, change in changes.items()}
                written = [now for model, now in after.items() if now.number > before[model].number]
                reach("generations-changed")
                producer.begin_transaction()
                for now in written:
                    key, value = now.model.encode(), self._codec.encode(now.record())
                    headers: dict[str, str | bytes | None] = {**self.records.headers(key, value)}
                    producer.produce(self._topic, value, key, partition=0, headers=headers)
                if wait_for_deliveries(producer, _TRANSACTION_SECONDS):
                    raise RetriableError(f"{doing}: the broker did not confirm in time")
                producer.commit_transaction(_TRANSACTION_SECONDS)
                reach("generations-written")
            except KafkaException as error:
                raise by_remedy(error, doing, grant) from error
            finally:
                producer.purge()
            self._hear(after)
            for now in written:
                log.info("generations", model=now.model, action=now.action, serving=now.serving, live=now.live)
            return after

    def _hear(self, read: Mapping[str, Generations]) -> None:
        with self._hearing:
            newer = {name: after for name, after in read.items() if after.number > self.of(name).number}
            if newer:
                self._known = {**self._known, **newer}
                self._changed.set()

    def _read_to_end(self) -> Mapping[str, Generations]:
        if (topic := self._topics.find(self._topic)) is None:
            if self._known:
                raise RetriableError(f"the broker does not know topic '{self._topic}' now")
            return {}
        with reader_to_end(self._settings, self._topics, topic, waits_for_open=True) as reader:
            known = self._result([ControlRecord.of(message) for message in reader])
        self._hear(known)
        return known

    def _result(self, records: Sequence[ControlRecord]) -> dict[str, Generations]:
        """Returns the generations that records of the topic, from its beginning on, result in.

        One that does not count leaves the generations as they were.
        """
        known: dict[str, Generations] = {}
        for record, untrusted in self.records.judged(records):
            reason, model = untrusted, record.key.decode(errors="replace")
            if not reason:
                try:
                    after = Generations.of(model, self._codec.decode_foreign(record.value))
                    reason = after.refusal(known.get(model) or Generations(model))
                except (PoisonRecordError, UnreadableRecordError, ValueError) as error:
                    reason = f"it cannot be read: {error}"
            if reason:
                self.records.refuse(record, reason)
            else:
                known[model] = after
        return known

    def _follow(self) -> None:
        try:
            if self._reader is None:
                self._reader = LogReader(reader_config(self._settings), self._topic, {0: OFFSET_BEGINNING})
                self._followed = []
            if messages := self._reader.read():
                self._followed += map(ControlRecord.of, messages)
                self._hear(self._result(self._followed))
        except BalanceServiceError as error:
            log.warning("following the generations failed", error=str(error))
            # From the beginning again: it is past the record whose schema it could not get.
            if self._reader is not None:
                with suppress(KafkaException):
                    self._reader.close()
                self._reader = None
            time.sleep(_RETRY_SECONDS)


def _begun(declaration: Declaration, now: Generations) -> Generations:
    return now.begun(declaration)
