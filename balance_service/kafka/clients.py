"""Configuration of Kafka clients, and translation of Kafka's errors into the service's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar, cast

from confluent_kafka import KafkaError, KafkaException

from balance_service.errors import ConfigurationError, NotAuthorizedError, RetriableError, TaskMigratedError
from balance_service.kafka.partitioner import librdkafka_partitioner

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Producer

    from balance_service.errors import BalanceServiceError
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

ClientConfig = dict[str, object]
_Client = TypeVar("_Client")

_MIB = 1 << 20
_PRODUCER_QUEUE_MESSAGES = 2_000_000
_PRODUCER_QUEUE_KBYTES = 1 << 20
# A task waits while its producer's queue is full. A small record takes about 300 bytes in the queue.
_TASK_QUEUE_MESSAGES = 20_000
_TRANSACTION_TIMEOUT_MS = 60_000

_FENCED = {
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
}
_NOT_AUTHORIZED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_REFUSED = {KafkaError._AUTHENTICATION, KafkaError._SSL}
# librdkafka reports these as transport failures: the peer rejected the client's certificate, or expects another
# security protocol.
_REFUSAL_SIGNS = ("ssl/tls alert", "SSL handshake failed", "security.protocol")
# The token issuer, or a proxy in front of the brokers, may only be down for now.
_MAY_PASS = ("Failed to acquire SASL OAUTHBEARER token", "Disconnected")
_PROPERTIES = "BALANCE_KAFKA_CONFIG, or the file of BALANCE_KAFKA_CONFIG_FILE"


def common_config(settings: Settings) -> ClientConfig:
    """The properties that all clients share: brokers, the user's own properties, the logger."""
    return {
        "client.id": settings.application_id,
        **settings.kafka_properties,
        "bootstrap.servers": settings.bootstrap_servers,
        "logger": logging.getLogger("librdkafka"),
    }


def producer_config(settings: Settings, partitioner: Partitioner = "murmur2") -> ClientConfig:
    """An idempotent producer, which assigns keys to partitions by the function of the topics that it writes to."""
    return {
        **common_config(settings),
        "enable.idempotence": True,
        "acks": "all",
        "partitioner": librdkafka_partitioner(partitioner),
        "queue.buffering.max.messages": _PRODUCER_QUEUE_MESSAGES,
        "queue.buffering.max.kbytes": _PRODUCER_QUEUE_KBYTES,
        "linger.ms": 2,
        "message.max.bytes": 16 * _MIB,
    }


def most_transaction_ms(settings: Settings) -> int:
    """The timeout of a task's transaction. It is the longest of the service's own transactions."""
    # Not the session timeout: a commit that takes longer would be retried unchanged forever.
    return max(settings.session_timeout_ms, _TRANSACTION_TIMEOUT_MS)


def transactional_config(
    settings: Settings, transactional_id: str, transaction_timeout_ms: int | None = None
) -> ClientConfig:
    """The producer of a task.

    If it leaves a transaction open, its successor aborts that; without a successor, the transaction times out.

    Args:
        transaction_timeout_ms: by default `most_transaction_ms`.
    """
    timeout_ms = transaction_timeout_ms or most_transaction_ms(settings)
    return {
        # The default follows the transaction's timeout, but a silently dead connection must not last that long.
        "socket.timeout.ms": min(settings.session_timeout_ms, timeout_ms) - 100,
        **producer_config(settings),
        "queue.buffering.max.messages": _TASK_QUEUE_MESSAGES,
        # A commit waits for its records, and no more records follow.
        "linger.ms": 0,
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout_ms,
    }


def reader_config(settings: Settings) -> ClientConfig:
    """A consumer for `LogReader`: it reads committed records and reports the end of each partition."""
    return {
        **common_config(settings),
        # librdkafka looks the group up even if the consumer never joins it. This user may read this group.
        "group.id": settings.application_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        # Once the prefetch queue is full, librdkafka checks it again only after this time; the default is a second.
        "fetch.queue.backoff.ms": 5,
    }


def new_client(kind: Callable[[Any], _Client], config: ClientConfig) -> _Client:
    """Creates a consumer, producer or admin client.

    Raises:
        ConfigurationError: the client refuses a property. Only the user's own properties can be wrong.
        RetriableError: the process or the machine has no threads or memory left.
    """
    try:
        return kind(config)
    except KafkaException as error:
        cause = error.args[0] if error.args else None
        if isinstance(cause, KafkaError) and cause.code() == KafkaError._CRIT_SYS_RESOURCE:
            raise RetriableError(f"a Kafka client cannot be created: {cause.str()}") from error
        reason = cause.str() if isinstance(cause, KafkaError) else str(error)
        raise ConfigurationError(f"{_PROPERTIES}: {reason}") from error


def by_remedy(
    error: KafkaException, doing: str, grant: str = ""
) -> RetriableError | TaskMigratedError | NotAuthorizedError:
    """Translates Kafka's error by what to do about it: the task was fenced, a grant is missing, or try again.

    Args:
        doing: the operation that failed, such as "reading topic 'balance'".
        grant: the ACL that it needs, such as "Read on topic 'balance'".
    """
    cause = error.args[0] if error.args else None
    if not isinstance(cause, KafkaError):
        return RetriableError(f"Kafka failed while {doing}: {error}")
    if cause.code() in _FENCED:
        return TaskMigratedError(f"fenced while {doing}: {cause.str()}")
    return not_authorized(cause, doing, grant) or RetriableError(f"Kafka failed while {doing}: {cause.str()}")


def not_authorized(error: KafkaError, doing: str, grant: str = "") -> NotAuthorizedError | None:
    """Translates an authorization error of the brokers; None for any other. Arguments as of `by_remedy`."""
    if error.code() not in _NOT_AUTHORIZED:
        return None
    wanted = grant or "the ACLs that docs/how-to/secure.md lists"
    return NotAuthorizedError(f"the brokers do not allow {doing} ({error.str()}); grant this user {wanted}")


def transaction_error(failed: Producer) -> KafkaError | None:
    """The cause of a failed transaction. Delivery reports hold only its consequences.

    A call that is invalid within a transaction returns the cause.
    """
    try:
        failed.begin_transaction()
    except KafkaException as error:
        return cast("KafkaError", error.args[0])
    return None


class ConnectionErrors:
    """Records authentication and TLS errors of a client's connections; its requests only time out.

    The thread that polls the client records. Any thread may read.
    """

    def __init__(self) -> None:
        self.refusal = ""
        """The reason why the client cannot connect; empty if none is known."""
        self._was_accepted = False

    def watched(self, config: ClientConfig) -> ClientConfig:
        """The configuration of a client that reports to this object."""
        return {**config, "error_cb": self._record}

    def accepted(self) -> None:
        """Notes that a request was answered."""
        self.refusal, self._was_accepted = "", True

    def explain(self, message: str) -> BalanceServiceError:
        """The error to raise for a request that got no answer.

        A refusal is a wrong setting only if the brokers never accepted this client.
        """
        if not self.refusal:
            return RetriableError(message)
        if self._was_accepted or any(sign in self.refusal for sign in _MAY_PASS):
            return RetriableError(f"{message}: {self.refusal}")
        return ConfigurationError(
            f"the brokers and this client do not accept each other ({self.refusal}); "
            f"correct the security properties in {_PROPERTIES}"
        )

    def _record(self, error: KafkaError) -> None:
        if error.code() in _REFUSED or any(sign in error.str() for sign in _REFUSAL_SIGNS):
            self.refusal = error.str()
