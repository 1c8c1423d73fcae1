"""The topic of the read models' generations: each instance follows it, and operators' requests write it."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Producer

from balance_service.avro.schemas import load_schema
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
from balance_service.kafka.producers import connect, wait_for_deliveries
from balance_service.kafka.signing import ControlRecord, ControlRecords
from balance_service.kafka.topic_specs import prepare_generations
from balance_service.model.generations import Generations
from balance_service.process.failpoints import failpoint
from balance_service.process.runtime import Attempts, PeriodicThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from balance_service.avro.codec import AvroCodec
    from balance_service.avro.own_schemas import OwnSchemas
    from balance_service.kafka.topics import Topics
    from balance_service.model.generations import Declaration
    from balance_service.settings import Settings

log = structlog.get_logger(__name__)

_TRANSACTION_SECONDS = 15.0
_RETRY_SECONDS = 1.0
_MOST_TRIES = 20
# A write takes some tenths of a second.
_TURN_SECONDS = 2.0
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Step:
    """The states of some models after a transition, and the records of those that it has changed."""

    after: Mapping[str, Generations] = field(default_factory=dict)
    values: Mapping[str, bytes] = field(default_factory=dict)
    """By model. No other writer writes the same, because they have the time."""

    def is_among(self, records: Iterable[ControlRecord]) -> bool:
        return not {*self.values.values()}.isdisjoint(record.value for record in records)


class GenerationLog(PeriodicThread):
    """Follows the topic of generations, once it exists, and writes to it. Any thread may read."""

    def __init__(self, settings: Settings, topics: Topics, schemas: OwnSchemas) -> None:
        """Reads the topic to its end, if there is one: no read model has another generation than its first otherwise.

        Raises:
            ConfigurationError: the schema is not usable, or others sign the records and this process has no secret.
            RetriableError: the broker or the registry does not respond.
        """
        super().__init__("generations", 0.0, self._follow)
        self._settings = settings
        self._topics = topics
        self._topic = settings.generations_topic
        self._schemas = schemas
        self._is_settled = False
        """Whether a record of the topic has shown the form of the application's records."""
        self._codec: AvroCodec
        self.records = ControlRecords.of(settings, self._topic)
        self._known: Mapping[str, Generations] = {}
        self.history: Sequence[Generations] = ()
        """The states of all read models that the topic has, in its order."""
        self._writing = threading.Lock()
        self._reading = threading.Lock()
        self._hearing = threading.Lock()
        self._read_began = float("-inf")
        self._read_failed: str | None = None
        self._changed = threading.Event()
        self._reader: LogReader | None = None
        self._followed: list[ControlRecord] = []
        self._has_met_end = False
        self._attempts = Attempts(log, "following the generations failed", "the generations are followed again")
        self._read_to_end()
        self.records.require_secret()
        if not self._is_settled:
            self._codec = schemas.codec(self._topic, load_schema("Generations"))

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

        A model that has had one generation alone, as far as this instance and the names of the topics tell, does not
        depend on the topic.

        Raises:
            RetriableError: the topic cannot be read.
        """
        try:
            self.refresh()
        except RetriableError:
            # It may have been suspended while another one was built.
            if self.of(model).newest > 1 or self._topics.starting_with(f"{self._settings.application_id}-{model}.g"):
                raise
        return self.of(model)

    def wait(self, seconds: float) -> None:
        """Waits until a record is read, at most some seconds."""
        self._changed.wait(seconds)
        self._changed.clear()

    def begin(self, declarations: Mapping[str, Declaration]) -> None:
        """Writes what the first generations of the read models without a record are folded by.

        Raises:
            BalanceServiceError: as `write`.
        """
        if missing := {name: declared for name, declared in declarations.items() if name not in self._known}:
            # One that starts at the same time may write it first.
            self._write({name: partial(_begun, declared) for name, declared in missing.items()})

    def write(self, model: str, change: Callable[[Generations], Generations]) -> Generations:
        """Applies a transition to the model's newest state.

        A transaction by the topic's only transactional id keeps two writers apart: the second one fences the first
        before it reads the state. The first one then tries again, with the state that the second one wrote.

        Args:
            change: called again if another writer was faster.

        Raises:
            InvalidInputError: the transition is not possible.
            ConfigurationError: no record about the read model counts, though it has had generations.
            RetriableError: nothing was written, or the outcome is unknown.
        """
        return self._write({model: change})[model]

    def _write(self, changes: Mapping[str, Callable[[Generations], Generations]]) -> Mapping[str, Generations]:
        """Applies a transition to each of some models, in one transaction. A state that it leaves is not written."""
        with self._writing:
            prepare_generations(self._topics, self._settings)
            step, records = _Step(), list[ControlRecord]()
            for tries in range(1, _MOST_TRIES + 1):
                try:
                    with self._transaction() as producer:
                        records = self._records(waits_for_open=True)
                        # The one that fenced it may have done so after the broker had committed.
                        if not step.is_among(records):
                            step = self._step(changes, records)
                            failpoint("generations-changed")
                            self._produce(producer, step.values, records)
                    break
                except TaskMigratedError as fenced:
                    if tries == _MOST_TRIES:
                        raise RetriableError(f"{fenced}, {tries} times: try again") from fenced
                    self._let_write(records)
            self._hear(step.after)
            for name in step.values:
                now = step.after[name]
                log.info("generations", model=name, action=now.action, serving=now.serving, live=now.live)
            return step.after

    def _let_write(self, records: Sequence[ControlRecord]) -> None:
        """Waits until another writer has written, for a while: two that fence each other all the time write nothing."""
        until = time.monotonic() + _TURN_SECONDS
        while len(self._records(waits_for_open=False)) <= len(records) and time.monotonic() < until:
            time.sleep(random.uniform(0, _LOOK_SECONDS))  # noqa: S311

    @contextmanager
    def _transaction(self) -> Iterator[Producer]:
        """A producer that has fenced the other writers; what it produces is committed at the end.

        Raises:
            TaskMigratedError: another writer has fenced this one.
            RetriableError: the broker does not respond.
        """
        # The transactional id has the topic's name.
        doing, grant = f"writing to topic '{self._topic}'", f"Write on topic and transactional id '{self._topic}'"
        # Tasks that open wait for a transaction that a killed instance has left open.
        config = transactional_config(self._settings, self._topic, int(_TRANSACTION_SECONDS * 1000))
        producer = new_client(Producer, config)
        try:
            connect(producer, self._topic)
            producer.init_transactions(_TRANSACTION_SECONDS)
            producer.begin_transaction()
            yield producer
            if wait_for_deliveries(producer, _TRANSACTION_SECONDS):
                raise RetriableError(f"{doing}: the broker did not confirm in time")
            _commit(producer, doing)
            failpoint("generations-written")
        except KafkaException as error:
            raise by_remedy(error, doing, grant) from error
        finally:
            producer.purge()

    def _produce(self, producer: Producer, values: Mapping[str, bytes], records: Sequence[ControlRecord]) -> None:
        """Writes states, behind the text of their schema if the topic lacks it."""
        there = {record.key for record in records}
        texts = {key: text for key, text in self._schemas.records(self._topic).items() if key not in there}
        named = {name.encode(): value for name, value in values.items()}
        for key, value in {**texts, **named}.items() if values else ():
            headers: dict[str, str | bytes | None] = {**self.records.headers(key, value)}
            producer.produce(self._topic, value, key, partition=0, headers=headers)

    def _step(
        self, changes: Mapping[str, Callable[[Generations], Generations]], records: Sequence[ControlRecord]
    ) -> _Step:
        """Returns what transitions lead to after the records of the topic."""
        read = self._result(records)
        for name in changes.keys() - read.keys():
            self._require_no_history(name)
        before = {name: read.get(name) or Generations(name) for name in changes}
        after = {name: change(before[name]) for name, change in changes.items()}
        changed = [now for name, now in after.items() if now.number > before[name].number]
        return _Step(after, {now.model: self._codec.encode(now.record()) for now in changed})

    def _require_no_history(self, model: str) -> None:
        """Checks that a read model without a record that counts never had another generation than its first.

        Otherwise that one, which may have been dropped, would serve again, and numbers would be given twice.

        Raises:
            ConfigurationError: it had.
            RetriableError: the broker does not respond.
        """
        if lost := self.records.may_count(model.encode()):
            raise ConfigurationError(
                f"topic '{self._topic}' has no record of the read model '{model}' that counts, so which generation "
                f"serves is not known: {self.records.problem(lost[0])}"
            )
        if later := self._topics.starting_with(f"{self._settings.application_id}-{model}.g"):
            raise ConfigurationError(
                f"topic '{min(later)}' is of a later generation of the read model '{model}', and topic '{self._topic}' "
                "has no record of it: restore the records; or, to fold the model from its first generation on, stop "
                f"all instances and delete {', '.join(sorted(later))}"
            )

    def _hear(self, read: Mapping[str, Generations]) -> None:
        with self._hearing:
            newer = {name: after for name, after in read.items() if after.number > self.of(name).number}
            if newer:
                self._known = {**self._known, **newer}
                self._changed.set()

    def _read_to_end(self) -> None:
        self._result(self._records(waits_for_open=True))

    def _records(self, *, waits_for_open: bool) -> list[ControlRecord]:
        """Returns all records of the topic; none if there is no topic. Argument as of `reader_to_end`."""
        if (topic := self._topics.find(self._topic)) is None:
            if self._known:
                raise RetriableError(f"the broker does not know topic '{self._topic}' now")
            return []
        with reader_to_end(self._settings, self._topics, topic, waits_for_open=waits_for_open) as reader:
            return [ControlRecord.of(message) for message in reader]

    def _settle(self, first: bytes) -> None:
        """Keeps to the form of the first record, also if another process has just written that."""
        if not self._is_settled:
            self._is_settled = self._schemas.settle(first, self._topic)
            self._codec = self._schemas.codec(self._topic, load_schema("Generations"))

    def _result(self, records: Sequence[ControlRecord]) -> dict[str, Generations]:
        """Returns the generations that records of the topic, from its beginning on, result in, and knows them.

        One that does not count changes no generation.
        """
        known: dict[str, Generations] = {}
        history: list[Generations] = []
        for record, untrusted in self.records.judged(records):
            reason, model = untrusted, record.key.decode(errors="replace")
            if not reason and self._schemas.learn(record.key, record.value):
                continue
            if not reason:
                try:
                    self._settle(record.value)
                    after = Generations.of(self._codec.decode_foreign(record.value), model=model)
                    reason = after.refusal(known.get(model) or Generations(model))
                except (PoisonRecordError, UnreadableRecordError, ValueError) as error:
                    reason = f"it cannot be read: {error}"
            if reason:
                self.records.refuse(record, reason)
            else:
                known[model] = after
                history.append(after)
        self._hear(known)
        if len(history) > len(self.history):
            self.history = history
        return known

    def _follow(self) -> None:
        try:
            if self._reader is None:
                self._reader = LogReader(reader_config(self._settings), self._topic, {0: OFFSET_BEGINNING})
                self._followed, self._has_met_end = [], False
            messages = self._reader.read()
            self._followed += map(ControlRecord.of, messages)
            # A checkpoint vouches for the records before it: without the rest of the topic, they would seem forged.
            meets_end = self._reader.met_end and not self._has_met_end
            self._has_met_end = self._has_met_end or self._reader.met_end
            if meets_end or (messages and self._has_met_end):
                self._result(self._followed)
                self._attempts.succeeded()
        except BalanceServiceError as error:
            self._attempts.failed(error)
            # From the beginning again: it is past the record whose schema it could not get.
            if self._reader is not None:
                with suppress(KafkaException):
                    self._reader.close()
                self._reader = None
            time.sleep(_RETRY_SECONDS)


def _commit(producer: Producer, doing: str) -> None:
    """Commits a transaction. Raises TaskMigratedError if another writer may have fenced this one."""
    try:
        producer.commit_transaction(_TRANSACTION_SECONDS)
    except KafkaException as error:
        # A broker answers a commit with this error if it fences the producer at that time.
        if error.args[0].code() == KafkaError.UNKNOWN:
            raise TaskMigratedError(f"perhaps fenced while {doing}: {error.args[0].str()}") from error
        raise


def _begun(declaration: Declaration, now: Generations) -> Generations:
    return now.begun(declaration)
