"""Settings: the only reader of the environment."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from balance_service.errors import ConfigurationError
from balance_service.http_settings import HttpSecuritySettings
from balance_service.kafka import properties
from balance_service.kafka.jvm_properties import jvm_properties
from balance_service.kafka.properties import HIDDEN, PropertyError

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
# Also of a URL without its scheme, as one who forgot it writes it, and of a password that has a slash in it.
_USER_IN_URL = re.compile(r"(//)\S*@|(?<![^\s'\"])(?!\S*//)[^\s'\"@]*:\S*@")
_LEAST_HEAP_MB = 500
_NEVER_TOLD = {
    "kafka_config",
    "peer_secret",
    "schema_registry_password",
    "schema_registry_token",
    "tls_key_password",
    "token",
}


class Settings(HttpSecuritySettings):
    """One instance's configuration, read from `BALANCE_*` environment variables."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    bootstrap_servers: str = Field("localhost:9092", description="Kafka brokers to start from.", min_length=1)
    schema_registry_url: str = Field(
        "http://localhost:8081", repr=False, description="Confluent-compatible schema registry.", pattern=r"^https?://"
    )
    schema_registry_user: str | None = Field(None, pattern=r"^[^:]+$", description="Basic-auth user of the registry.")
    schema_registry_password: SecretStr | None = Field(None, description="Basic-auth password of the registry.")
    schema_registry_token: SecretStr | None = Field(None, min_length=1, description="Bearer token for the registry.")
    schema_registry_ca_file: Path | None = Field(
        None, description="PEM file of the CAs by which the registry's certificate is checked."
    )
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
    max_records_per_batch: int = Field(500_000, ge=1, description="Upper bound of a micro-batch, in records.")
    polling_delay_ms: int = Field(
        75, ge=1, le=60_000, description="How long an idle query waits before it looks for new records."
    )
    spark_master: str = Field("local[2]", description="Where Spark runs the pipeline.")
    spark_jars: str | None = Field(
        None, description="Comma-separated connector jars; resolved into a cache when unset."
    )
    spark_driver_memory: str = Field(
        "512m",
        pattern=r"^\d+[mg]$",
        description="Heap of the Spark driver, at least 500m.",
    )
    read_timeout_seconds: float = Field(
        5.0,
        gt=0,
        le=300,
        allow_inf_nan=False,
        validation_alias=f"{PREFIX}READ_TIMEOUT",
        description="Deadline of one query.",
    )
    kafka_config: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        repr=False,
        description="JSON object of extra Kafka client properties, librdkafka names.",
    )
    kafka_config_file: Path | None = Field(
        None, description="Properties file of extra Kafka client properties, librdkafka names; read at start."
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
        1_000, ge=1, le=100_000, description="HTTP requests under way; more get 503. Plain ones answered here never do."
    )
    tracing_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^@\s]+$",
        description="OpenTelemetry collector that traces are sent to, by OTLP over HTTP; unset for no tracing.",
    )
    failpoints: str = Field("", description="For tests: where this process is to die or stall; see failpoints.py.")
    log_level: str = Field(
        "INFO", pattern=r"^(DEBUG|INFO|WARNING|ERROR)$", description="Least severe level that is logged."
    )

    @field_validator("kafka_config", mode="before")
    @classmethod
    def _parse_kafka_config(cls, value: Any) -> Any:
        return properties.parse_json(value) if isinstance(value, str) else value

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

    @field_validator("spark_driver_memory")
    @classmethod
    def _enough_for_spark(cls, value: str) -> str:
        if value[-1] == "m" and int(value[:-1]) < _LEAST_HEAP_MB:
            raise ValueError(f"Spark does not start with less than {_LEAST_HEAP_MB}m")
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

    @model_validator(mode="after")
    def _clients_cannot_pass_for_peers(self) -> Settings:
        guards = {"TOKENS_FILE": self.tokens_file, "JWKS_FILE": self.jwks_file, "RATE_LIMIT": self.rate_limit}
        for name, value in guards.items():
            if value is not None and self.peer_secret is None:
                raise ValueError(
                    f"{PREFIX}{name} needs {PREFIX}PEER_SECRET, the same on all instances; "
                    "without it any client could get around by saying that it is a peer"
                )
        return self

    @model_validator(mode="after")
    def _registry_is_secured_in_one_way(self) -> Settings:
        url = self.schema_registry_url
        ways = {
            f"{PREFIX}SCHEMA_REGISTRY_USER": self.schema_registry_user is not None,
            f"{PREFIX}SCHEMA_REGISTRY_TOKEN": self.schema_registry_token is not None,
            f"a user in {PREFIX}SCHEMA_REGISTRY_URL": "@" in urlsplit(url).netloc,
        }
        if len(given := [way for way, is_given in ways.items() if is_given]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one")
        if self.schema_registry_ca_file is not None:
            if not url.startswith("https://"):
                raise ValueError(
                    f"{PREFIX}SCHEMA_REGISTRY_CA_FILE is not used while {PREFIX}SCHEMA_REGISTRY_URL is not https"
                )
            try:
                ssl.create_default_context(cafile=self.schema_registry_ca_file)
            except (OSError, ssl.SSLError) as error:
                reason = "holds no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
                raise ValueError(
                    f"{PREFIX}SCHEMA_REGISTRY_CA_FILE: {self.schema_registry_ca_file} cannot be used: {reason}"
                ) from None
        return self

    @model_validator(mode="after")
    def _kafka_properties_suit_both_clients(self) -> Settings:
        name = f"{PREFIX}KAFKA_CONFIG_FILE"
        try:
            given = self.kafka_properties
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        try:
            jvm_properties(given)
        except PropertyError as error:
            setting = f"{PREFIX}KAFKA_CONFIG" if error.name in self.kafka_config or not self.kafka_config_file else name
            raise ValueError(f"{setting}: {error}") from None
        return self

    @cached_property
    def kafka_properties(self) -> dict[str, str]:
        """Extra properties of every Kafka client, of the setting and of the file."""
        if self.kafka_config_file is None:
            return dict(self.kafka_config)
        of_file = properties.read_file(self.kafka_config_file)
        if both := sorted(of_file.keys() & self.kafka_config.keys()):
            raise ValueError(f"{both[0]} is in {PREFIX}KAFKA_CONFIG too; keep one")
        return of_file | self.kafka_config

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
                value = properties.printable(value)
            elif isinstance(value, tuple):
                value = ",".join(value)
            shown[str(field.validation_alias or PREFIX + name.upper())] = (
                "" if value is None else without_user(str(value))
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
    given = without_user(repr(error["input"]))
    ours = error["type"] == "value_error"
    return f"{variable}: {given} {message}" if ours else f"{variable}: {message}, not {given}"


def without_user(text: str) -> str:
    """The text, user and password of every URL in it hidden."""
    return _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
