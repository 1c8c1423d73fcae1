"""Why brokers and a client of ours do not accept each other: librdkafka tells it aside, its requests only time out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from balance_service.errors import ConfigurationError, RetriableError

if TYPE_CHECKING:
    from balance_service.errors import BalanceServiceError
    from balance_service.kafka.clients import ClientConfig

_REFUSED = {KafkaError._AUTHENTICATION, KafkaError._SSL}
# What comes as a mere failure of the transport: the other side's word on our certificate, or on how we talk to it.
_SIGNS = ("ssl/tls alert", "SSL handshake failed", "security.protocol")
# The issuer of tokens, or a proxy before the brokers, may only be down for now.
_MAY_PASS = ("Failed to acquire SASL OAUTHBEARER token", "Disconnected")
_SETTINGS = "BALANCE_KAFKA_CONFIG, or the file of BALANCE_KAFKA_CONFIG_FILE"


class Connection:
    """What one client heard of its connections. Whichever thread polls the client reports; any thread may ask."""

    def __init__(self) -> None:
        self.refusal = ""
        """Why there is no connection, as far as it is known."""
        self._was_accepted = False

    def watched(self, config: ClientConfig) -> ClientConfig:
        """The configuration of a client that reports here."""
        return {**config, "error_cb": self._report}

    def accepted(self) -> None:
        """A request was answered."""
        self.refusal, self._was_accepted = "", True

    def explain(self, message: str) -> BalanceServiceError:
        """What to raise when a request was not answered: once all was well it may be so again, by itself."""
        if not self.refusal:
            return RetriableError(message)
        if self._was_accepted or any(sign in self.refusal for sign in _MAY_PASS):
            return RetriableError(f"{message}: {self.refusal}")
        return ConfigurationError(
            f"the brokers and this client do not accept each other ({self.refusal}); "
            f"correct the security properties in {_SETTINGS}"
        )

    def _report(self, error: KafkaError) -> None:
        if error.code() in _REFUSED or any(sign in error.str() for sign in _SIGNS):
            self.refusal = error.str()
