"""Configuration of every Kafka client of ours, and Kafka's errors by remedy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast

import structlog
from confluent_kafka import KafkaError, KafkaException

from balance_service.errors import ConfigurationError, NotAuthorizedError, RetriableError, TaskMigratedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Producer

    from balance_service.settings import Settings

ClientConfig = dict[str, object]
_Client = TypeVar("_Client")

IDEMPOTENCY_HEADER = "idempotency-key"
"""Kafka header by which a producer names an event, so that of several with one name and key one is applied."""

log = structlog.get_logger(__name__)

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
}
_MIB = 1 << 20
# librdkafka queues what it produces.
_QUEUE_MESSAGES = 2_000_000
_QUEUE_KBYTES = 1 << 20
# A task's writer waits where its queue is full; a small record takes some 300 bytes there.
_WRITER_MESSAGES = 20_000
_TRANSACTION_TIMEOUT_MS = 60_000

_NOT_AUTHORIZED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}


def common_config(settings: Settings) -> ClientConfig:
    """What every client of ours shares: brokers, the user's own properties, our logger."""
    return {
        "client.id": settings.application_id,
        **settings.kafka_properties,
        "bootstrap.servers": settings.bootstrap_servers,
        "logger": logging.getLogger("librdkafka"),
    }


def producer_config(settings: Settings) -> ClientConfig:
    """An idempotent producer that agrees with Kafka's own clients on the partition of a key."""
    return {
        **common_config(settings),
        "enable.idempotence": True,
        "acks": "all",
        # librdkafka's own default is CRC32, which would send a key elsewhere than Java clients do.
        "partitioner": "murmur2_random",
        "queue.buffering.max.messages": _QUEUE_MESSAGES,
        "queue.buffering.max.kbytes": _QUEUE_KBYTES,
        "linger.ms": 2,
        "message.max.bytes": 16 * _MIB,
    }


def transactional_config(settings: Settings, transactional_id: str) -> ClientConfig:
    """The one writer of a task. Its successor aborts any transaction it leaves open; failing that, the timeout does."""
    return {
        # By itself it would follow the transaction's: a connection that is dead without a word should not last as long.
        "socket.timeout.ms": settings.session_timeout_ms - 100,
        **producer_config(settings),
        "queue.buffering.max.messages": _WRITER_MESSAGES,
        # A commit waits for its records, and no more of them are to come.
        "linger.ms": 0,
        "transactional.id": transactional_id,
        # Not the session's: a commit that takes longer than that would be tried again as it is, for ever.
        "transaction.timeout.ms": max(settings.session_timeout_ms, _TRANSACTION_TIMEOUT_MS),
    }


def reader_config(settings: Settings) -> ClientConfig:
    """A consumer that is told its partitions, reads what is committed, and sees the end of each."""
    return {
        **common_config(settings),
        # librdkafka looks the group up even if we never join, so use the one that this user may read.
        "group.id": settings.application_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        # Once enough is fetched ahead, it would not look for a whole second whether that still holds.
        "fetch.queue.backoff.ms": 5,
    }


def by_remedy(
    error: KafkaException, doing: str, grant: str = ""
) -> RetriableError | TaskMigratedError | NotAuthorizedError:
    """Kafka's error as one of ours: fenced, not allowed, or to be tried again.

    Args:
        doing: what failed.
        grant: which operation on which resource it takes, such as "Read on topic 'balance'".
    """
    cause = error.args[0] if error.args else None
    if not isinstance(cause, KafkaError):
        return RetriableError(f"Kafka failed while {doing}: {error}")
    if cause.code() in _FENCED:
        return TaskMigratedError(f"fenced while {doing}: {cause.str()}")
    return not_authorized(cause, doing, grant) or RetriableError(f"Kafka failed while {doing}: {cause.str()}")


def not_authorized(error: KafkaError, doing: str, grant: str = "") -> NotAuthorizedError | None:
    """Kafka's error as what the brokers do not allow; None if it is another. Arguments as of `by_remedy`."""
    if error.code() not in _NOT_AUTHORIZED:
        return None
    wanted = grant or "what docs/security.md lists"
    return NotAuthorizedError(f"the brokers do not allow {doing} ({error.str()}); grant this user {wanted}")


def transaction_error(failed: Producer) -> KafkaError | None:
    """What became of the transaction of a producer that could not deliver; its reports tell only the consequences.

    A call that is never right within a transaction is answered with that.
    """
    try:
        failed.begin_transaction()
    except KafkaException as error:
        return cast("KafkaError", error.args[0])
    return None


def new_client(kind: Callable[[Any], _Client], config: ClientConfig) -> _Client:
    """A consumer, producer or other client.

    Raises:
        ConfigurationError: it refuses a property; only the user's own can be wrong.
        RetriableError: this process or machine has no more threads or memory for it.
    """
    try:
        return kind(config)
    except KafkaException as error:
        cause = error.args[0] if error.args else None
        if isinstance(cause, KafkaError) and cause.code() == KafkaError._CRIT_SYS_RESOURCE:
            raise RetriableError(f"a Kafka client cannot be made: {cause.str()}") from error
        said = cause.str() if isinstance(cause, KafkaError) else str(error)
        raise ConfigurationError(f"BALANCE_KAFKA_CONFIG, or the file of BALANCE_KAFKA_CONFIG_FILE: {said}") from error
