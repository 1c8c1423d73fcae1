"""Configuration of every Kafka client of ours, and Kafka's errors by remedy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import structlog
from confluent_kafka import KafkaError, KafkaException

from balance_service.errors import RetriableError, TaskMigratedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.settings import Settings

ClientConfig = dict[str, object]

log = structlog.get_logger(__name__)

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
}
_MIB = 1 << 20
# librdkafka queues what it produces; a micro-batch of a million keys must fit.
_QUEUE_MESSAGES = 2_000_000
_QUEUE_KBYTES = 1 << 20

# librdkafka says in files what the JVM client says in PEM stores.
_JVM_NAMES = {
    "ssl.ca.location": "ssl.truststore.location",
    "ssl.keystore.location": "ssl.keystore.location",
    "ssl.keystore.password": "ssl.keystore.password",
    "ssl.key.password": "ssl.key.password",
    "security.protocol": "security.protocol",
    "sasl.mechanism": "sasl.mechanism",
    "sasl.mechanisms": "sasl.mechanism",
    "client.rack": "client.rack",
}
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def common_config(settings: Settings) -> ClientConfig:
    """What every client of ours shares: brokers, the user's own properties, our logger."""
    return {
        "bootstrap.servers": settings.bootstrap_servers,
        "client.id": settings.application_id,
        "logger": logging.getLogger("librdkafka"),
        **settings.kafka_config,
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
    """The one writer of a task. A short timeout frees readers soon after a kill."""
    return {
        **producer_config(settings),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": settings.session_timeout_ms,
    }


def reader_config(settings: Settings) -> ClientConfig:
    """A consumer that is told its partitions, reads what is committed, and sees the end of each."""
    return {
        **common_config(settings),
        "group.id": f"{settings.application_id}-unused",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
    }


def jvm_properties(config: Mapping[str, str]) -> dict[str, str]:
    """Librdkafka properties in the names of the JVM client, where it has them."""
    translated = {_JVM_NAMES[name]: value for name, value in config.items() if name in _JVM_NAMES}
    if "ssl.ca.location" in config:
        translated["ssl.truststore.type"] = "PEM"
    login = _LOGIN_MODULES.get(translated.get("sasl.mechanism", ""))
    if login and "sasl.username" in config:
        user, password = _quoted(config["sasl.username"]), _quoted(config.get("sasl.password", ""))
        translated["sasl.jaas.config"] = f"{login} required username={user} password={password};"
    return translated


def by_remedy(error: KafkaException, doing: str) -> RetriableError | TaskMigratedError:
    """Kafka's error as one of ours: fenced, or to be tried again."""
    cause = error.args[0] if error.args else None
    if isinstance(cause, KafkaError) and cause.code() in _FENCED:
        return TaskMigratedError(f"fenced while {doing}: {cause.str()}")
    return RetriableError(
        f"Kafka failed while {doing}: {cause.str() if isinstance(cause, KafkaError) else error}"
    )


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
