"""All settings, and how they are loaded from `BALANCE_*` environment variables."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from balance_service import api
from balance_service.errors import ConfigurationError
from balance_service.settings.http_security import HttpSecuritySettings
from balance_service.settings.kafka import HIDDEN, HTTP, WITHOUT_COLON, KafkaSettings, printable_properties
from balance_service.settings.network import (
    DEFAULT_PORT,
    OWN_HOST_NAME,
    address_of,
    checked_list,
    default_server,
    is_network,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

PREFIX = "BALANCE_"
_OWN_TOPIC = "balance"
_NAME = r"^[a-zA-Z0-9._-]{1,200}$"
# Kafka refuses these, which are directories.
_NO_TOPICS = (".", "..")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
# The last label begins with a letter, so that a mistyped IP address is no host name.
_HOST_NAME = re.compile(r"(?i:(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z_](?:[a-z0-9_-]{0,61}[a-z0-9_])?)")
# Also matches a URL whose scheme is missing, and a password with a slash.
_USER_IN_URL = re.compile(r"(//)\S*@|(?<![^\s'\"])(?!\S*//)[^\s'\"@]*:\S*@")
_LEAST_HEAP_MB = 500
_MEGABYTES = {"m": 1, "g": 1024}
_HEAP = r"^\d+[mg]$"
_HTTP_WITHOUT_USER = r"^https?://[^@\s]+$"
# The rules of values, by the types of pydantic's errors. Braces have the error's context.
_RULES = {
    "bool_parsing": "must be true or false",
    "finite_number": "must be a number",
    "float_parsing": "must be a number",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_too_short": "must have at least {min_length} characters",
    "too_short": "must not be empty",
}
_FORMS = {
    _NAME: "must be 1 to 200 letters, digits, '.', '_' and '-'",
    _HEAP: "must be a number of megabytes or gigabytes, such as 512m or 2g",
    _HTTP_WITHOUT_USER: "must be a URL of http or https, without a user",
    HTTP: "must be a URL of http or https",
    WITHOUT_COLON: "must be a name without ':'",
}
_OF_TESTS = "BALANCE_FAILPOINTS"
# Kubernetes sets these in each container, by the names of the services there, and links of Docker do.
# Source: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
_LINK = re.compile(r".+_SERVICE_(?:HOST|PORT(?:_.+)?)|.+_PORT_[0-9]+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?")
_LINKED = re.compile(r"(?:tcp|udp|sctp)://")
_NEAR = 2
_SECRETS = {
    "kafka_config",
    "peer_secret",
    "peer_secrets_former",
    "schema_registry_password",
    "schema_registry_token",
    "tls_key_password",
    "token",
}


class Settings(KafkaSettings, HttpSecuritySettings):
    """One instance's configuration, read from `BALANCE_*` environment variables."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    application_id: str = Field(
        "balance-service",
        pattern=_NAME,
        description="Names the consumer groups, the internal topics and the transactional ids.",
    )
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        ("balance",),
        min_length=1,
        description="Comma-separated read models that this instance hosts: names of shipped ones or of entry points, "
        "`package.module` or `package.module:Class` ([read-models.md](../how-to/read-models.md#name-the-models)).",
    )
    topic: str = Field(_OWN_TOPIC, pattern=_NAME, description="The topic of `FundsAdded` events, the source of truth.")
    partitioner: Literal["murmur2", "crc32", "fnv1a"] = Field(
        "murmur2",
        description="How the producers of `BALANCE_TOPIC` assign keys to partitions: `murmur2` "
        "(Java), `crc32` (librdkafka) or `fnv1a` (sarama) ([more](../how-to/produce.md)). A change needs "
        "`rebuild --offline`.",
    )
    partitions: int = Field(
        2, ge=1, le=10_000, description="Partitions of the source topic, when the service creates it."
    )
    replication_factor: int = Field(1, ge=1, le=32_767, description="Replicas of every topic that the service creates.")
    create_topics: bool = Field(
        True,
        description="Create missing topics of sources, tables and outputs; if off, a missing one is an error. Internal "
        "topics and those of dead letters are created in either case.",
    )
    allow_finite_retention: bool = Field(
        False,
        description="Accept a source topic that is compacted or deletes old records, so that the model cannot be "
        "rebuilt from it in full.",
    )
    http_host: str = Field("127.0.0.1", description="Address the HTTP server listens on.")
    http_port: int = Field(
        DEFAULT_PORT, ge=0, le=65_535, description="Port the HTTP server listens on; 0 takes a free one."
    )
    console: bool = Field(
        True,
        description="Serve the [console](../how-to/console.md), a page for people in a browser, at `/` of the port.",
    )
    application_server: str = Field(
        default_factory=default_server,
        validate_default=True,
        description="The `host:port` where peers reach this instance and no other instance; no wildcard address. "
        "`{hostname}` is replaced by this machine's host name. The default is `localhost` with the port of "
        "`BALANCE_HTTP_PORT`, or `{hostname}` with that port in a container that listens beyond loopback.",
    )
    state_dir: Path = Field(Path("state"), description="Directory of the state stores; one per instance.")
    session_timeout_ms: int = Field(
        10_000,
        ge=3_000,
        le=300_000,
        description="How long the group waits for a silent instance before another one takes over.",
    )
    max_records_per_batch: int = Field(
        2_000_000,
        ge=1,
        description="A commit gathers no more records once it has this many; one pull, of up to 32,768, may exceed it. "
        "Only a partition that lags reaches it.",
    )
    spark_jars: str | None = Field(None, description="Comma-separated connector jars; those in the package when unset.")
    spark_driver_memory: str = Field(
        "512m",
        pattern=_HEAP,
        description="Heap of the Spark driver, at least `500m`.",
    )
    spark_ui: bool = Field(
        False,
        description="Show [Spark's UI](../how-to/spark.md#sparks-ui) on 127.0.0.1, port 4040 or the next free one.",
    )
    read_timeout_seconds: float = Field(
        5.0,
        gt=0,
        le=300,
        allow_inf_nan=False,
        validation_alias=f"{PREFIX}READ_TIMEOUT",
        description="Deadline of a query and of a command's delivery, in seconds.",
    )
    num_standby_replicas: int = Field(
        0, ge=0, le=100, description="Standby copies of each partition's store, which other instances keep up to date."
    )
    switch: Literal["auto", "manual"] = Field(
        "manual",
        description="When a generation serves that was built because a read model has a higher version: as soon as it "
        "has caught up and all instances have that version, or when an operator switches.",
    )
    idempotency_window_seconds: float = Field(
        api.IDEMPOTENCY_WINDOW_SECONDS,
        ge=1,
        le=31_536_000,
        allow_inf_nan=False,
        validation_alias=f"{PREFIX}IDEMPOTENCY_WINDOW",
        description="How long a repeated `Idempotency-Key` is recognised, in seconds of event time; must be equal on "
        "all instances.",
    )
    retry_every_seconds: float = Field(
        300,
        ge=1,
        le=86_400,
        allow_inf_nan=False,
        validation_alias=f"{PREFIX}RETRY_EVERY",
        description="Seconds before the first automatic retry of a dead letter. The time doubles with each retry, up "
        "to 72 times the first; there are ten retries in all.",
    )
    retry_topics: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated topics where other producers keep their dead letters. Each record is sent to "
        "`<application id>-retries` when it is due.",
    )
    peer_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="Secret that all instances share. It signs directory and control records, and the queries and "
        "answers between them; needed with tokens, JWTs, client certificates or a rate limit.",
    )
    peer_secrets_former: Annotated[tuple[Annotated[SecretStr, Field(min_length=16)], ...], NoDecode] = Field(
        (),
        description="Comma-separated earlier values of `BALANCE_PEER_SECRET`, which verify older generations and "
        "decisions.",
    )
    peer_allow_list: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Comma-separated hosts, `*.domains` and networks of peers; any when unset."
    )
    max_concurrent_requests: int = Field(
        1_000,
        ge=1,
        le=100_000,
        description="HTTP requests in flight, and as many that wait for a position; clients "
        "[share](../how-to/secure.md#shares) them. Further ones are answered 503, except `/health`, `/metrics` and "
        "local [plain queries](../decisions/0033-plain-queries-are-answered-at-the-connection.md).",
    )
    max_streams: int = Field(
        1_000,
        ge=0,
        le=100_000,
        description="Streams of events that clients may have open and [share](../how-to/secure.md#shares). Further "
        "ones are answered 503. The limits on connections do not count them.",
    )
    tracing_endpoint: str | None = Field(
        None,
        pattern=_HTTP_WITHOUT_USER,
        description="OpenTelemetry collector that traces are sent to, by OTLP over HTTP; no tracing when unset. "
        "Requires the extra `tracing`.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        "INFO",
        description="Least severe level that is logged. Logs are JSON lines on stderr.",
    )

    @field_validator("models", "peer_allow_list", "peer_secrets_former", "retry_topics", mode="before")
    @classmethod
    def _parse_list(cls, value: Any) -> Any:
        return tuple(filter(None, (v.strip() for v in value.split(",")))) if isinstance(value, str) else value

    @field_validator("peer_allow_list")
    @classmethod
    def _hosts_or_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return checked_list(
            value,
            lambda entry: is_network(entry) or _HOST_NAME.fullmatch(entry.removeprefix("*.")),
            "no host name, *.domain, IP address or network; list such, separated by commas, without ports",
        )

    @field_validator("topic")
    @classmethod
    def _topics_name(cls, value: str) -> str:
        if value in _NO_TOPICS:
            raise ValueError("is no topic name; give another")
        return value

    @field_validator("partitioner", mode="before")
    @classmethod
    def _places_each_key(cls, value: Any) -> Any:
        if value == "any":
            raise ValueError(
                "is not possible: the events of a customer must be on one partition; copy them to a topic of another "
                "name with `balance-service topics copy --partitioner murmur2`, and let its producers use murmur2"
            )
        return value

    @field_validator("retry_topics")
    @classmethod
    def _topics_each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name in _NO_TOPICS or not _TOPIC.fullmatch(name):
                raise ValueError(f"has {name!r}, which is no topic name; list names, separated by commas")
            if value.count(name) > 1:
                raise ValueError(f"names '{name}' twice; name it once")
        return value

    @field_validator("spark_driver_memory")
    @classmethod
    def _enough_for_spark(cls, value: str) -> str:
        if int(value[:-1]) * _MEGABYTES[value[-1]] < _LEAST_HEAP_MB:
            raise ValueError(f"Spark does not start with less than {_LEAST_HEAP_MB}m")
        return value

    @field_validator("application_server")
    @classmethod
    def _advertisable(cls, value: str) -> str:
        value = value.replace(OWN_HOST_NAME, socket.gethostname())
        if value.startswith("*:") or _is_unspecified(address_of(value).host):
            raise ValueError("is a wildcard address, which no peer can reach; name one host that they can")
        return value

    @model_validator(mode="after")
    def _clients_cannot_pass_for_peers(self) -> Settings:
        guards = {
            "TOKENS_FILE": self.tokens_file,
            "JWKS_FILE": self.jwks_file,
            "TLS_CLIENT_CA": self.tls_client_ca,
            "RATE_LIMIT": self.rate_limit,
        }
        for name, value in guards.items():
            if value is not None and self.peer_secret is None:
                raise ValueError(
                    f"{PREFIX}{name} needs {PREFIX}PEER_SECRET, the same on all instances; "
                    "without it, any client could bypass it by claiming to be a peer"
                )
        if self.peer_secrets_former and self.peer_secret is None:
            raise ValueError(f"{PREFIX}PEER_SECRETS_FORMER needs {PREFIX}PEER_SECRET: set the present secret too")
        return self

    @property
    def application_servers_topic(self) -> str:
        """The compacted topic of the directory of instances."""
        return f"{self.application_id}-application-servers"

    @property
    def dead_letter_decisions_topic(self) -> str:
        """The topic of operators' decisions about dead letters."""
        return f"{self.application_id}-dead-letter-decisions"

    @property
    def generations_topic(self) -> str:
        """The topic of the read models' generations; also the id of the transactions that write it."""
        return f"{self.application_id}-generations"

    @property
    def retries_topic(self) -> str:
        """The topic that the records of `retry_topics` are sent to."""
        return f"{self.application_id}-retries"

    def is_own(self, name: str) -> bool:
        """Whether a source that a read model declares is the topic that BALANCE_TOPIC and BALANCE_PARTITIONER mean."""
        return name == _OWN_TOPIC

    def topic_of(self, name: str) -> str:
        """The topic of a source that a read model declares; BALANCE_TOPIC replaces `balance`."""
        return self.topic if self.is_own(name) else name

    def printable(self) -> dict[str, str]:
        """All settings by environment variable, with secrets hidden."""
        shown = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name == "kafka_config":
                value = printable_properties(value)
            elif isinstance(value, tuple):
                value = ",".join(map(str, value))
            shown[variable_of(name)] = "" if value is None else without_user(str(value))
        return shown


def variable_of(name: str) -> str:
    return str(Settings.model_fields[name].validation_alias or PREFIX + name.upper())


def load_settings(**overrides: Any) -> Settings:
    """Loads the settings from the environment, with overrides by field name.

    Raises:
        ConfigurationError: names each wrong variable and the reason. A variable that is no setting is wrong if its name
            is that of one with at most two characters changed.
        TypeError: an override is no setting.
    """
    fields = Settings.model_fields
    if unknown := sorted(overrides.keys() - fields.keys()):
        raise TypeError(f"no such setting: {', '.join(unknown)}")
    wrong = misspelt_variables(os.environ)
    try:
        settings = Settings(**{str(fields[name].validation_alias or name): v for name, v in overrides.items()})
    except ValidationError as error:
        # A default that depends on another setting is not computed while any setting is wrong.
        wrong += [_sentence(e) for e in error.errors() if e["type"] != "default_factory_not_called"]
    if wrong:
        raise ConfigurationError("; ".join(wrong))
    return settings


def misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a sentence for each variable that is no setting, but whose name is almost that of one."""
    return [
        f"{name} is no setting: correct it to {nearest}, or remove it"
        for name in unknown_variables(environment)
        if (nearest := _nearest(name)) is not None
    ]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns the variables with the prefix of settings that are none, without those that Kubernetes sets."""
    known = {*map(variable_of, Settings.model_fields), _OF_TESTS}
    return sorted(
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX)
        and name.upper() not in known
        and not _LINK.fullmatch(name)
        and not (name.endswith("_PORT") and _LINKED.match(value))
    )


def _nearest(name: str) -> str | None:
    """Returns the setting whose name is nearest; None if more than two characters differ."""
    distance, nearest = min(
        (_distance(name.upper(), known), known) for known in map(variable_of, Settings.model_fields)
    )
    return nearest if distance <= _NEAR else None


def _distance(one: str, other: str) -> int:
    """Returns how many characters must be added, removed or replaced to make one text of another."""
    row: list[int] = [*range(len(other) + 1)]
    for n, character in enumerate(one, 1):
        before, row = row, [n]
        for m, wanted in enumerate(other, 1):
            row.append(min(before[m] + 1, row[-1] + 1, before[m - 1] + (character != wanted)))
    return row[-1]


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _sentence(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    context = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch":
        message = _FORMS.get(context["pattern"], message)
    elif (rule := _RULES.get(error["type"])) is not None:
        # Bounds of numbers with a fraction are whole, too.
        message = rule.format(**{k: int(v) if isinstance(v, float) else v for k, v in context.items()})
    name = str(error["loc"][0])
    variable = name if name.startswith(PREFIX) else PREFIX + name.upper()
    if name in _SECRETS:
        return f"{variable}: {message}"
    given = without_user(repr(error["input"]))
    ours = error["type"] == "value_error"
    return f"{variable}: {given} {message}" if ours else f"{variable}: {message}, not {given}"


def without_user(text: str) -> str:
    """The text with user and password of every URL hidden."""
    return _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
