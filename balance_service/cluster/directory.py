"""The directory of instances: a compacted topic where each instance publishes its tasks once a second.

`Directory` publishes for this instance and follows the topic; `ServerTable` holds what all instances published.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException

from balance_service.avro.frames import SCHEMA_PREFIX
from balance_service.cluster.signatures import FAREWELL, UntrustedRecordError
from balance_service.engine.records import Role, TaskSnapshot
from balance_service.errors import BalanceServiceError, NotAuthorizedError
from balance_service.kafka.clients import not_authorized
from balance_service.kafka.log_reader import LogReader, OffsetOutOfRangeError
from balance_service.kafka.messages import headers_of, offset_of
from balance_service.kafka.partitioner import Partitioning
from balance_service.kafka.producers import RecoveringProducer
from balance_service.kafka.signing import HEADER
from balance_service.model.keys import ColumnKey, CompositeKey
from balance_service.model.record_keys import KEY_FORMATS, RecordKey
from balance_service.model.stage import model_and_generation
from balance_service.model.stream import Partitioner
from balance_service.process.runtime import Attempts, elapsed
from balance_service.structs import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from confluent_kafka import Message

    from balance_service.avro.codec import AvroCodec
    from balance_service.cluster.signatures import RecordSignatures
    from balance_service.kafka.clients import ClientConfig
    from balance_service.model.keys import KeyType

log = structlog.get_logger(__name__)

PUBLISH_EVERY_SECONDS = 1.0
SUSPECT_AFTER_SECONDS = 3.0

_FLUSH_SECONDS = 2.0
# A record that is older than this is dropped: a newer one follows every second, and after an outage peers would reject
# a backlog as outdated.
_MESSAGE_TIMEOUT_MS = 3_000
# The writer of refused records may write many.
_WARN_EVERY_SECONDS = 60.0
_LOGGED_CHARACTERS = 300
# Each instance publishes the reasons of its tasks every second.
_MOST_REASON, _MOST_PROBLEM = 300, 1000
_FORGET_AFTER_SECONDS = 3600.0
# For a server that was only read from the past. A running one publishes every second, or later on a busy machine.
_FORGET_UNHEARD_AFTER_SECONDS = 60.0
# A record that was in flight when its instance was killed may arrive after the first one of the successor. Several such
# records that arrive together prove no more than one does.
_LEAST_RETURNS = 3
_RETURNS_SPAN_SECONDS = 2.0
# Without a shared secret, records may be forged.
_MOST_RUNS = 8


@dataclass(frozen=True, slots=True)
class KeyColumn(Struct):
    """A column of a composite key."""

    name: str
    is_number: bool


@dataclass(frozen=True, slots=True)
class PublishedModel(Struct, names={"has_number_keys": "numberKeys"}):
    """A generation of a read model that an instance hosts, and where the keys of its source are.

    `versions` are those of the read model whose classes the instance has; `problem` is why a step of the read model's
    rebuild fails there. `key_columns` are those of composite keys. `key_format` is the form of the source's keys, if
    these are the keys of the states.
    """

    name: str
    partitions: int
    partitioner: Partitioner
    has_number_keys: bool = False
    versions: tuple[int, ...] = ()
    problem: str = ""
    key_columns: tuple[KeyColumn, ...] = ()
    key_format: str = ""

    @property
    def partitioning(self) -> Partitioning:
        own = self._own_key
        return Partitioning(self.partitions, self.partitioner, "string" if own is None else own.key_format)

    @property
    def key_type(self) -> KeyType:
        """The type of the keys. The name of a single column is not published."""
        if self.key_columns:
            return CompositeKey(tuple([ColumnKey(one.name, one.is_number) for one in self.key_columns]))
        return self._own_key or ColumnKey("the key", self.has_number_keys)

    @property
    def _own_key(self) -> RecordKey | None:
        return RecordKey.of_format(self.key_format) if self.key_format in KEY_FORMATS else None


def key_columns(key_type: KeyType) -> tuple[KeyColumn, ...]:
    """Returns what an instance publishes of a read model's keys in addition to `has_number_keys`."""
    return tuple([KeyColumn(one.column, one.is_number) for one in key_type.parts]) if key_type.is_composite else ()


@dataclass(frozen=True, slots=True)
class ApplicationServer(Struct, beside=("heard_at", "read_at", "is_shared")):
    """An instance as it last published itself, the topic's record. Times are of the local clock, -inf for never."""

    address: str
    incarnation: str
    models: tuple[PublishedModel, ...]
    tasks: tuple[TaskSnapshot, ...]
    heard_at: float = float("-inf")
    read_at: float = float("-inf")
    is_shared: bool = False
    """Whether two running instances publish under this address."""

    @property
    def was_heard(self) -> bool:
        """Whether it published since this instance began to listen."""
        return self.heard_at > float("-inf")

    def hosts(self, read_model: str) -> bool:
        return any(model.name == read_model for model in self.models)

    def hosts_any(self, read_model: str) -> bool:
        """Whether it hosts a generation of a read model."""
        return any(self._generations(read_model))

    def lacks(self, read_model: str, version: int) -> bool:
        """Whether it hosts a read model, and lacks the class of a version."""
        return any(version not in model.versions for model in self._generations(read_model))

    def problem(self, read_model: str) -> str:
        """Why a step of a read model's rebuild fails there; empty if none does."""
        return next((model.problem for model in self._generations(read_model)), "")

    def _generations(self, read_model: str) -> Iterator[PublishedModel]:
        return (model for model in self.models if model_and_generation(model.name)[0] == read_model)

    def is_suspect(self, now: float) -> bool:
        """Whether it has been silent for too long to be routed to."""
        return self.silent_seconds(now) > SUSPECT_AFTER_SECONDS

    def silent_seconds(self, now: float) -> float:
        """The age of its last record; infinite if this instance has not heard from it."""
        return now - self.heard_at


class _Runs:
    """The runs of instances that published under one address in the last seconds.

    After a restart the old run publishes no more. A run that repeatedly publishes after another run did proves that
    both are alive. Times are of the local clock.
    """

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}
        """By incarnation, in the order of their last records."""
        self._returned_at: list[float] = []
        """The times at which a run published after another one had."""

    def hear(self, incarnation: str, now: float) -> bool:
        """Adds a record; returns whether two instances share the address."""
        runs = {i: at for i, at in self._heard_at.items() if now - at <= SUSPECT_AFTER_SECONDS}
        is_latest = next(reversed(runs), incarnation) == incarnation
        returns = incarnation in runs and not is_latest
        runs.pop(incarnation, None)
        self._heard_at = dict([*runs.items(), (incarnation, now)][-_MOST_RUNS:])
        if not runs:
            self._returned_at = []
        elif returns:
            # The first ones and the latest decide.
            self._returned_at = [*self._returned_at[: _LEAST_RETURNS - 1], now]
        at = self._returned_at
        return len(at) == _LEAST_RETURNS and at[-1] - at[0] >= _RETURNS_SPAN_SECONDS


class ServerTable:
    """The latest record of each instance, by address. The directory's thread writes; any thread reads.

    The mappings are immutable and replaced as a whole.
    """

    def __init__(self, clock: Callable[[], float] = elapsed) -> None:
        self._clock = clock
        self._known: tuple[Mapping[str, ApplicationServer], Mapping[str, ApplicationServer]] = {}, {}
        """The instances, and the last records of those that have said farewell."""
        self._runs: dict[str, _Runs] = {}

    def hear(self, address: str, record: Mapping[str, Any] | None, *, live: bool) -> None:
        """Adds a record of the topic.

        Args:
            address: where peers reach the instance; the record's key.
            record: None is the instance's farewell.
            live: whether it was written after this instance began to listen. An older record proves nothing about now.
        """
        now = self._clock()
        servers = {
            a: s
            for a, s in self._servers.items()
            if now - s.read_at < (_FORGET_AFTER_SECONDS if s.was_heard else _FORGET_UNHEARD_AFTER_SECONDS)
        }
        left = {a: s for a, s in self._known[1].items() if now - s.read_at < _FORGET_AFTER_SECONDS}
        if record is None:
            if (server := servers.pop(address, None)) is not None and live:
                left[address] = server
            self._runs.pop(address, None)
        else:
            left.pop(address, None)
            heard_at = now if live else float("-inf")
            is_shared = live and self._runs.setdefault(address, _Runs()).hear(record["incarnation"], now)
            servers[address] = ApplicationServer.of(
                {**record, "address": address}, heard_at=heard_at, read_at=now, is_shared=is_shared
            )
        self._runs = {a: runs for a, runs in self._runs.items() if a in servers}
        self._known = servers, left

    @property
    def _servers(self) -> Mapping[str, ApplicationServer]:
        return self._known[0]

    def is_shared(self, address: str) -> bool:
        """Whether two running instances publish under an address, so that peers may ask the wrong one."""
        server = self._servers.get(address)
        return server is not None and server.is_shared

    def servers(self) -> Sequence[ApplicationServer]:
        """All known instances in the order of their addresses, including suspects."""
        return [server for _, server in sorted(self._servers.items())]

    def models(self) -> Mapping[str, PublishedModel]:
        """Returns the generations of read models that there are, by name.

        That nothing answers for a read model now does not mean that there is none: suspects count, and so do instances
        that have left in the last hour, if no other one hosts the read model.
        """
        found: dict[str, PublishedModel] = {}
        servers, left = self._known
        for model in (model for _, server in sorted(servers.items()) for model in server.models):
            known = found.setdefault(model.name, model)
            if known.partitions < model.partitions:
                found[model.name] = model
        owners = {model_and_generation(name)[0] for name in found}
        gone = (model for server in left.values() for model in server.models)
        return {model.name: model for model in gone if model_and_generation(model.name)[0] not in owners} | found

    def spread(self, stage: str, read_model: str) -> int:
        """Returns how many partitions of a stage the instance with the most owns beyond the one with the fewest.

        Counts the running instances that host the read model.
        """
        owned = [
            sum(task.stage == stage and task.role is Role.ACTIVE for task in server.tasks)
            for server in self.running()
            if server.hosts_any(read_model)
        ]
        return max(owned, default=0) - min(owned, default=0)

    def lacking(self, read_model: str, version: int) -> list[str]:
        """Returns the addresses of the running instances that host a read model, and lack the class of a version."""
        return [server.address for server in self.running() if server.lacks(read_model, version)]

    def problem(self, read_model: str) -> str:
        """Returns why steps of a read model's rebuild fail, and at which running instances; empty if none does."""
        found: dict[str, list[str]] = {}
        for server in self.running():
            if why := server.problem(read_model):
                found.setdefault(why, []).append(server.address)
        return "; ".join(f"{why} (at {', '.join(addresses)})" for why, addresses in found.items())

    def running(self) -> Sequence[ApplicationServer]:
        """As `servers`, without suspects."""
        return self.heard_within(SUSPECT_AFTER_SECONDS)

    def heard_within(self, seconds: float) -> Sequence[ApplicationServer]:
        """As `servers`, without those that have been silent for longer."""
        now = self._clock()
        return [server for server in self.servers() if server.silent_seconds(now) <= seconds]

    def claims(
        self, stage: str, partition: int, *, suspects: bool = False
    ) -> list[tuple[ApplicationServer, TaskSnapshot]]:
        """The instances that claim to own a partition, each with its task, by descending epoch.

        The highest epoch is the owner's, and a lower one that of a predecessor that does not know it yet. A forged
        record may have a higher epoch than the owner: only the owner itself knows by its lease that it is one. A
        suspect claims nothing.

        Args:
            suspects: returns what suspects claimed, instead.
        """
        live = self._live(stage, partition, Role.ACTIVE, suspects=suspects)
        claims = [(server, task) for server, task in live if task.epoch > 0]
        return sorted(claims, key=lambda claim: claim[1].epoch, reverse=True)

    def owners(
        self, stage: str, partition: int, states: frozenset[str], *, suspects: bool = False
    ) -> list[ApplicationServer]:
        """The instances of `claims` whose tasks are in one of these states."""
        claims = self.claims(stage, partition, suspects=suspects)
        return [server for server, task in claims if task.state in states]

    def assigned(self, stage: str, partition: int) -> ApplicationServer | None:
        """The owner of a partition or, if no instance claims it yet, the instance that is opening it."""
        if claims := self.claims(stage, partition):
            return claims[0][0]
        # A task that is restoring has no epoch yet.
        opening = (server for server, _ in self._live(stage, partition, Role.ACTIVE))
        return min(opening, key=lambda server: server.address, default=None)

    def taken(self) -> set[tuple[str, int]]:
        """The stages and partitions that an instance owns or is opening. A suspect has none."""
        return {
            (task.stage, task.partition)
            for server in self.running()
            for task in server.tasks
            if task.role is Role.ACTIVE
        }

    def standbys(
        self, stage: str, partition: int, states: frozenset[str], *, suspects: bool = False
    ) -> list[ApplicationServer]:
        """The instances with a standby in one of these states, by descending position."""
        able = [
            (task.position, server.address, server)
            for server, task in self._live(stage, partition, Role.STANDBY, suspects=suspects)
            if task.state in states
        ]
        return [server for _, _, server in sorted(able, reverse=True)]

    def _live(
        self, stage: str, partition: int, role: Role, *, suspects: bool = False
    ) -> Iterator[tuple[ApplicationServer, TaskSnapshot]]:
        """The tasks of a partition in this role, without those of suspects; or those of suspects alone."""
        now = self._clock()
        for server in self._servers.values():
            if server.is_suspect(now) is not suspects:
                continue
            for task in server.tasks:
                if (task.stage, task.partition, task.role) == (stage, partition, role):
                    yield server, task


class Directory:
    """Publishes this instance and follows all instances, on a thread of its own."""

    def __init__(
        self,
        *,
        consumer_config: ClientConfig,
        producer_config: ClientConfig,
        topic: str,
        address: str,
        incarnation: str,
        codec: AvroCodec,
        signatures: RecordSignatures,
        texts: Callable[[], Mapping[bytes, bytes]] = dict,
        models: Callable[[], Sequence[PublishedModel]],
        tasks: Callable[[], Sequence[TaskSnapshot]],
        table: ServerTable,
        on_round: Callable[[], None] = lambda: None,
        on_refused: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        """Args:
        incarnation: identifies this run of the instance.
        signatures: sign this instance's records and verify those of all.
        texts: those of the records' schema, which are published in front of them; as `OwnSchemas.records`.
        models, tasks: are published.
        table: is updated with the records of all instances.
        on_round: called after each publication on the directory's thread; must return at once.
        on_refused: called with the reason of each record that is ignored.
        """
        self._on_round = on_round
        self._models = models
        self._texts = texts
        self._topic = topic
        self._codec = codec
        self._tasks = tasks
        self._reader = LogReader(consumer_config, topic, {0: OFFSET_BEGINNING})
        self._producer = RecoveringProducer({**producer_config, "message.timeout.ms": _MESSAGE_TIMEOUT_MS})
        self._stopping = threading.Event()
        self._publish_now = threading.Event()
        self._incarnation = incarnation
        self._signatures = signatures
        self._on_refused = on_refused
        self._warned_at: dict[str, float] = {}
        self._was_shared = False
        self._publishing = Attempts(
            log, "publishing to the directory failed", "publishing to the directory works again"
        )
        self._following = Attempts(log, "following the directory failed", "the directory is followed again")
        self.address = address
        self._forbidden: dict[str, str] = {}
        self.table = table
        # The end of the topic when this instance began to listen. Records from this offset on are live.
        self._live_from: int | None = None
        self.is_read = False
        """Whether all records below that end were read."""
        self._thread = threading.Thread(target=self._run, name="directory", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def publish_soon(self) -> None:
        """Publishes without waiting for the next second. Any thread may call it."""
        self._publish_now.set()

    @property
    def problem(self) -> str:
        """The ACL that is missing; empty if none is."""
        return next(filter(None, self._forbidden.values()), "")

    @property
    def shared_address_problem(self) -> str:
        """What to do about another instance with this address; empty if there is none."""
        if not self.table.is_shared(self.address):
            return ""
        return (
            f"another instance runs with BALANCE_APPLICATION_SERVER {self.address}, as this one does, so that "
            "peers may ask the wrong one; give each instance an address of its own and restart it"
        )

    def stop(self, timeout_seconds: float) -> None:
        """Publishes a farewell, so that peers no longer route to this instance."""
        self._stopping.set()
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            self._start_over()
            next_publish = 0.0
            while not self._stopping.is_set():
                now = elapsed()
                if now >= next_publish or self._publish_now.is_set():
                    self._publish_now.clear()
                    self._publish(self._codec.encode(self._record()))
                    next_publish = now + PUBLISH_EVERY_SECONDS
                    if self.is_read:
                        self._on_round()
                self._read()
        except Exception:
            log.exception("the directory failed")
            raise
        finally:
            self._publish(None)
            self._producer.flush(_FLUSH_SECONDS)
            self._reader.close()

    def _start_over(self) -> None:
        self._live_from, self.is_read = None, False
        self._reader.assign({0: OFFSET_BEGINNING})
        for key, text in self._texts().items():
            self._produce(key, text, self._signatures.sign_text(key, text))

    def _read(self) -> None:
        try:
            messages = self._reader.read()
        except OffsetOutOfRangeError as error:
            self._following.failed(error)
            # The topic was recreated, or lost its end.
            self._start_over()
            return
        except BalanceServiceError as error:
            self._following.failed(error)
            self._note("Read", str(error) if isinstance(error, NotAuthorizedError) else "")
            return
        if messages:
            self._following.succeeded()
            self._note("Read", "")
        if self._live_from is None and messages:
            # If other instances publish all the time, the reader never meets the end.
            self._live_from = self._reader.known_end(0)
        for message in messages:
            self._follow(message)
        if self._reader.met_end:
            if self._live_from is None:
                self._live_from = self._reader.position(0)
            self.is_read = True

    def _follow(self, message: Message) -> None:
        key, value, offset = message.key() or b"", message.value(), offset_of(message)
        live_from = self._live_from or 0
        address, is_live = key.decode(errors="replace"), offset >= live_from
        try:
            if key.startswith(SCHEMA_PREFIX):
                self._learn(key, value, dict(headers_of(message)).get(HEADER))
                return
            signed_ms = self._signatures.check(address, value, dict(headers_of(message)).get(HEADER))
            record = None if value is None else self._codec.decode(value)
            self._signatures.check_order(address, record["incarnation"] if record else FAREWELL, signed_ms)
        except UntrustedRecordError as refusal:
            # An older record proves nothing anyway.
            if is_live:
                self._refuse(address, refusal)
        except BalanceServiceError as failure:
            log.warning("a record of the directory was skipped", address=address, error=str(failure))
        else:
            self.table.hear(address, record, live=is_live)
            self._report_sharing()
        finally:
            self.is_read = self.is_read or offset + 1 >= live_from

    def _learn(self, key: bytes, text: bytes | None, signature: str | bytes | None) -> None:
        if self._signatures.has_signed_text(key, text or b"", signature):
            self._codec.learn(key, text)

    def _report_sharing(self) -> None:
        shared = self.shared_address_problem
        if shared and not self._was_shared:
            log.error("another instance has the address of this one", problem=shared)
        elif self._was_shared and not shared:
            log.info("no other instance has the address of this one any more", application_server=self.address)
        self._was_shared = bool(shared)

    def _refuse(self, address: str, refusal: UntrustedRecordError) -> None:
        self._on_refused(refusal.reason)
        now = elapsed()
        if now - self._warned_at.get(refusal.reason, float("-inf")) >= _WARN_EVERY_SECONDS:
            self._warned_at[refusal.reason] = now
            log.warning(
                "a record of the directory was ignored", address=address[:_LOGGED_CHARACTERS], reason=str(refusal)
            )

    def _publish(self, value: bytes | None) -> None:
        self._produce(self.address.encode(), value, self._signatures.sign(self.address, value))

    def _produce(self, key: bytes, value: bytes | None, signed: Mapping[str, bytes]) -> None:
        headers: dict[str, str | bytes | None] = {**signed}
        try:
            self._producer.produce(self._topic, value, key, partition=0, headers=headers, on_delivery=self._published)
            self._producer.poll(0)
        except (KafkaException, BufferError) as error:
            self._publishing.failed(error, topic=self._topic)

    def _published(self, error: KafkaError | None, _message: Message) -> None:
        if error is None:
            self._publishing.succeeded()
        else:
            self._publishing.failed(error.str(), topic=self._topic)
        topic = f"topic '{self._topic}'"
        forbidden = error and not_authorized(error, f"writing to {topic}", f"Write on {topic}")
        self._note("Write", str(forbidden or ""))

    def _note(self, operation: str, problem: str) -> None:
        self._forbidden = {**self._forbidden, operation: problem}

    def _record(self) -> dict[str, Any]:
        models = tuple(replace(model, problem=model.problem[:_MOST_PROBLEM]) for model in self._models())
        tasks = tuple(replace(task, reason=task.reason[:_MOST_REASON]) for task in self._tasks())
        return ApplicationServer(self.address, self._incarnation, models, tasks).record()
