"""Settings: the only reader of the environment."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PREFIX = "BALANCE_"
_NAME = r"^[a-zA-Z0-9._-]{1,200}$"
# No user, path or scheme: what peers reach is a host and a port, an IPv6 address in brackets.
_HOST_AND_PORT = re.compile(r"(?P<host>[^\s:/@\[\]?#]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
# Stands for this machine's own name, so that containers of one definition can each advertise their own.
_OWN_HOST_NAME = "{hostname}"
# The last label begins with a letter, as no address does that is mistyped.
_HOST_NAME = re.compile(r"(?i:(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z_](?:[a-z0-9_-]{0,61}[a-z0-9_])?)")
_USER_IN_URL = re.compile(r"//[^/@]*@")
_HIDDEN = "********"
_NEVER_TOLD = {"kafka_config", "schema_registry_password", "peer_secret"}
_SECRET_WORDS = (
    "password",
    "secret",
    "token",
    "credential",
    "jaas",
    "passphrase",
    "private",
    ".key",
    "key.pem",
    "oauthbearer.config",
)


class Settings(BaseSettings):
    """One instance's configuration, read from `BALANCE_*` environment variables."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    bootstrap_servers: str = Field("localhost:9092", description="Kafka brokers to start from.", min_length=1)
    schema_registry_url: str = Field(
        "http://localhost:8081", description="Confluent-compatible schema registry.", pattern=r"^https?://"
    )
    schema_registry_user: str | None = Field(None, description="Basic-auth user of the registry.")
    schema_registry_password: SecretStr | None = Field(None, description="Basic-auth password of the registry.")
    application_id: str = Field(
        "balance-service",
        pattern=_NAME,
        description="Names the consumer group, the internal topics and the transactional ids.",
    )
    topic: str = Field("balance", pattern=_NAME, description="The source topic: the truth.")
    partitions: int = Field(2, ge=1, le=10_000, description="Partitions of the source topic, when created here.")
    replication_factor: int = Field(1, ge=1, le=32_767, description="Replicas of every topic created here.")
    create_topics: bool = Field(
        True, description="Create the source topic if it is missing; otherwise that is an error."
    )
    allow_finite_retention: bool = Field(
        False, description="Accept a source topic from which the model cannot be rebuilt in full."
    )
    application_server: str = Field(
        "localhost:5051",
        description="The host:port under which peers reach this instance; {hostname} stands for this machine's name.",
    )
    http_host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    http_port: int = Field(5051, ge=0, le=65_535, description="Port the HTTP server listens on.")
    state_dir: Path = Field(Path("state"), description="Where the state stores are kept.")
    session_timeout_ms: int = Field(
        10_000, ge=3_000, le=300_000, description="How long the group waits for a silent instance."
    )
    max_records_per_batch: int = Field(1_000_000, ge=1, description="Upper bound of a micro-batch, in records.")
    polling_delay_ms: int = Field(
        50, ge=1, le=60_000, description="How long an idle query waits before it looks for new records."
    )
    spark_master: str = Field("local[2]", description="Where Spark runs the pipeline.")
    spark_jars: str | None = Field(
        None, description="Comma-separated connector jars; resolved into a cache when unset."
    )
    spark_driver_memory: str = Field("1g", pattern=r"^\d+[mg]$", description="Heap of the Spark driver.")
    read_timeout_seconds: float = Field(
        5.0,
        gt=0,
        le=300,
        allow_inf_nan=False,
        validation_alias=f"{PREFIX}READ_TIMEOUT",
        description="Deadline of one query.",
    )
    kafka_config: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict, description="JSON object of extra Kafka client properties, librdkafka names."
    )
    num_standby_replicas: int = Field(
        0, ge=0, le=100, description="Copies of each partition's store that other instances keep up to date."
    )
    idempotency_window_seconds: float = Field(
        86_400,
        ge=1,
        le=31_536_000,
        allow_inf_nan=False,
        validation_alias=f"{PREFIX}IDEMPOTENCY_WINDOW",
        description="How long a repeated Idempotency-Key is recognised, in seconds of event time.",
    )
    peer_secret: SecretStr | None = Field(
        None, min_length=16, description="Secret that all instances share, by which peers prove themselves."
    )
    peer_allow_list: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Comma-separated hosts, *.domains and networks that may be peers; empty for any."
    )
    max_concurrent_requests: int = Field(
        1_000, ge=1, le=100_000, description="HTTP requests under way; more are answered 503."
    )
    failpoints: str = Field("", description="For tests: where this process is to die or stall; see failpoints.py.")
    log_level: str = Field(
        "INFO", pattern=r"^(DEBUG|INFO|WARNING|ERROR)$", description="Least severe level that is logged."
    )

    @field_validator("kafka_config", mode="before")
    @classmethod
    def _parse_kafka_config(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as error:
            raise ValueError("not JSON; give an object of property names and values") from error
        if not isinstance(parsed, dict):
            raise ValueError("not a JSON object; give an object of property names and values")
        for name, v in parsed.items():
            if not isinstance(v, (str, int, float)):  # a bool is an int
                raise ValueError(f"property '{name}' is neither a string nor a number nor a boolean")
        return {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in parsed.items()}

    @field_validator("peer_allow_list", mode="before")
    @classmethod
    def _parse_peer_allow_list(cls, value: Any) -> Any:
        return tuple(filter(None, (v.strip() for v in value.split(",")))) if isinstance(value, str) else value

    @field_validator("peer_allow_list")
    @classmethod
    def _hosts_or_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            try:
                ipaddress.ip_network(entry)
            except ValueError:
                if not _HOST_NAME.fullmatch(entry.removeprefix("*.")):
                    raise ValueError(
                        f"has {entry!r}, which is no host name, *.domain, IP address or network; "
                        "list such, separated by commas, without ports"
                    ) from None
        return value

    @field_validator("application_server")
    @classmethod
    def _advertisable(cls, value: str) -> str:
        value = value.replace(_OWN_HOST_NAME, socket.gethostname())
        match = _HOST_AND_PORT.fullmatch(value)
        if match is None or not 0 < int(match["port"]) <= 65_535:
            raise ValueError("is not host:port; give an address that peers can reach")
        host = match["host"].strip("[]")
        try:
            wildcard = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            wildcard = host == "*"
        if wildcard:
            raise ValueError("is a wildcard address, which no peer can reach; name one host that they can")
        return value

    @model_validator(mode="after")
    def _credentials_are_whole(self) -> Settings:
        if (self.schema_registry_user is None) != (self.schema_registry_password is None):
            raise ValueError(
                f"{PREFIX}SCHEMA_REGISTRY_USER and {PREFIX}SCHEMA_REGISTRY_PASSWORD go together; set both or none"
            )
        return self

    @property
    def changelog_topic(self) -> str:
        """Name of the compacted topic that holds the balance store, record for record."""
        return f"{self.application_id}-balance-changelog"

    @property
    def application_servers_topic(self) -> str:
        """Name of the compacted topic that is the directory of instances."""
        return f"{self.application_id}-application-servers"

    @property
    def dead_letters_topic(self) -> str:
        """Name of the topic that keeps records which could not be applied."""
        return f"{self.topic}-dead-letters"

    def printable(self) -> dict[str, str]:
        """Every setting by its environment variable, secrets hidden."""
        shown = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name == "kafka_config":
                value = json.dumps({k: _hidden(k, v) for k, v in value.items()})
            elif isinstance(value, tuple):
                value = ",".join(value)
            shown[str(field.validation_alias or PREFIX + name.upper())] = (
                "" if value is None else _without_user(str(value))
            )
        return shown


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment, with explicit overrides by field name.

    Raises:
        ConfigurationError: names each variable that is wrong and why.
        TypeError: an override is no setting.
    """
    fields = Settings.model_fields
    if unknown := sorted(overrides.keys() - fields.keys()):
        raise TypeError(f"no such setting: {', '.join(unknown)}")
    try:
        return Settings(**{str(fields[name].validation_alias or name): v for name, v in overrides.items()})
    except ValidationError as error:
        raise ConfigurationError("; ".join(_sentence(e) for e in error.errors())) from None


def _sentence(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    variable = name if name.startswith(PREFIX) else PREFIX + name.upper()
    if name in _NEVER_TOLD:
        return f"{variable}: {message}"
    given = _without_user(repr(error["input"]))
    ours = error["type"] == "value_error"
    return f"{variable}: {given} {message}" if ours else f"{variable}: {message}, not {given}"


def _hidden(name: str, value: str) -> str:
    return _HIDDEN if any(word in name.lower() for word in _SECRET_WORDS) else value


def _without_user(text: str) -> str:
    return _USER_IN_URL.sub(f"//{_HIDDEN}@", text)
