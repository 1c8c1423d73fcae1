"""Configuration of every Kafka client of ours, and Kafka's errors by remedy."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from confluent_kafka import KafkaError, KafkaException

from balance_service.errors import ConfigurationError, RetriableError, TaskMigratedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.settings import Settings

ClientConfig = dict[str, object]

IDEMPOTENCY_HEADER = "idempotency-key"
"""Kafka header by which a producer names an event, so that of several with one name and key one is applied."""

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

_SAME_IN_THE_JVM = {
    "client.rack",
    "sasl.mechanism",
    "security.protocol",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.password",
    "ssl.keystore.location",
    "ssl.keystore.password",
}
# Files to librdkafka, their content to the JVM client.
_PEM_FILES = {
    "ssl.certificate.location": "ssl.keystore.certificate.chain",
    "ssl.key.location": "ssl.keystore.key",
}
_PEM_TEXTS = {
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.key.pem": "ssl.keystore.key",
}
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}


def common_config(settings: Settings) -> ClientConfig:
    """What every client of ours shares: brokers, the user's own properties, our logger."""
    return {
        "client.id": settings.application_id,
        **settings.kafka_config,
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
    """Librdkafka properties as the JVM client wants them, where it has them.

    Raises:
        ConfigurationError: a file that a property names cannot be read.
    """
    jvm = {name: value for name, value in config.items() if name in _SAME_IN_THE_JVM}
    jvm |= {_PEM_TEXTS[name]: value for name, value in config.items() if name in _PEM_TEXTS}
    jvm |= {_PEM_FILES[name]: _content(name, value) for name, value in config.items() if name in _PEM_FILES}
    if "ssl.ca.location" in config:
        jvm["ssl.truststore.location"] = config["ssl.ca.location"]
    if jvm.keys() & {"ssl.truststore.location", "ssl.truststore.certificates"}:
        jvm["ssl.truststore.type"] = "PEM"
    if "ssl.keystore.location" in jvm:
        jvm["ssl.keystore.type"] = "PKCS12"
    elif "ssl.keystore.key" in jvm:
        jvm["ssl.keystore.type"] = "PEM"
    if "security.protocol" in jvm:
        jvm["security.protocol"] = jvm["security.protocol"].upper()
    if jvm.get("ssl.endpoint.identification.algorithm") == "none":
        jvm["ssl.endpoint.identification.algorithm"] = ""
    if "sasl.mechanisms" in config:
        jvm["sasl.mechanism"] = config["sasl.mechanisms"]
    login = _LOGIN_MODULES.get(jvm.get("sasl.mechanism", ""))
    if login and "sasl.username" in config:
        user, password = _quoted(config["sasl.username"]), _quoted(config.get("sasl.password", ""))
        jvm["sasl.jaas.config"] = f"{login} required username={user} password={password};"
    return jvm


def by_remedy(error: KafkaException, doing: str) -> RetriableError | TaskMigratedError:
    """Kafka's error as one of ours: fenced, or to be tried again."""
    cause = error.args[0] if error.args else None
    if isinstance(cause, KafkaError) and cause.code() in _FENCED:
        return TaskMigratedError(f"fenced while {doing}: {cause.str()}")
    return RetriableError(f"Kafka failed while {doing}: {cause.str() if isinstance(cause, KafkaError) else error}")


def refused(error: KafkaException) -> ConfigurationError:
    """The error of a client that could not be made: of its properties, only the user's own can be wrong."""
    cause = error.args[0] if error.args else None
    return ConfigurationError(f"BALANCE_KAFKA_CONFIG: {cause.str() if isinstance(cause, KafkaError) else error}")


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _content(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"BALANCE_KAFKA_CONFIG: {name} {path} cannot be read: {error.strerror}") from error
