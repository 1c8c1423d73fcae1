"""Settings of Kafka and of the schema registry. Part of `Settings`.

The user's Kafka properties have librdkafka's names. They come from a JSON object, a file of lines, or both. For
Spark's Kafka client, which runs in the JVM, properties of trust and identity are translated or refused; properties that
only tune librdkafka are left out.
"""

from __future__ import annotations

import json
import re
import ssl
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from balance_service.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN = "********"
HTTP = r"^https?://"
WITHOUT_COLON = r"^[^:]+$"
_P = "BALANCE_"
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
# Locations are no secrets, although their names have one of those words in them.
_NO_SECRETS = {"sasl.oauthbearer.token.endpoint.url", "ssl.key.location", "ssl.keystore.location"}
_PROPERTY = re.compile(r"(?P<name>[\w.-]+)[ \t]*=[ \t]*(?P<value>.*)", re.DOTALL)

_SAME = {
    "client.dns.lookup",
    "client.rack",
    "connections.max.idle.ms",
    "metadata.max.age.ms",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "socket.connection.setup.timeout.ms",
    "ssl.keystore.location",
    "ssl.keystore.password",
}
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_ONE_SIDED = "would apply to librdkafka alone, because Spark's Kafka client has no such property; leave it out"
_RESTRICT_THE_BROKER = f"{_ONE_SIDED}, and restrict what the brokers offer"
# By another protocol, or in an eager group, single partitions could not be handed over. A static member does not leave
# the group when it stops.
_SET_BY_SERVICE = "is set by the service, because its group membership depends on it; leave it out"
_REFUSED = {
    "group.instance.id": _SET_BY_SERVICE,
    "group.protocol": _SET_BY_SERVICE,
    "partition.assignment.strategy": _SET_BY_SERVICE,
    # Two producers with the same user-chosen id would fence each other.
    "transactional.id": "is set by the service, so that only the owner of a partition writes; leave it out",
    "ssl.cipher.suites": _RESTRICT_THE_BROKER,
    "ssl.curves.list": _RESTRICT_THE_BROKER,
    "ssl.sigalgs.list": _RESTRICT_THE_BROKER,
    "ssl.crl.location": _ONE_SIDED,
    "ssl.engine.location": _ONE_SIDED,
    "ssl.engine.id": _ONE_SIDED,
    "sasl.oauthbearer.assertion.file": _ONE_SIDED,
}
_LOGIN_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "OAUTHBEARER": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule",
}
_OAUTH_HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class PropertyError(ConfigurationError):
    """A Kafka property is wrong; the message names it and the remedy."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name} {message}")
        self.name = name


class KafkaSettings(BaseSettings):
    """Contradicting settings, and properties that one of the clients does not support, are refused in one sentence."""

    bootstrap_servers: str = Field(
        "localhost:9092", description="Kafka brokers for the first connection.", min_length=1
    )
    schema_registry_url: str | None = Field(
        None, repr=False, description="Confluent-compatible schema registry. Only Avro topics need one.", pattern=HTTP
    )
    schema_registry_user: str | None = Field(
        None, pattern=WITHOUT_COLON, description="Basic-auth user of the registry; goes together with the password."
    )
    schema_registry_password: SecretStr | None = Field(None, description="Basic-auth password of the registry.")
    schema_registry_token: SecretStr | None = Field(
        None, min_length=1, description="Bearer token for the registry, in place of user and password."
    )
    schema_registry_ca_file: Path | None = Field(
        None, description="PEM file of the CAs that sign the registry's certificate; certifi's when unset."
    )
    kafka_config: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        repr=False,
        description="Kafka client properties by librdkafka's names (TLS, SASL), translated for Spark's client.",
    )
    kafka_config_file: Path | None = Field(
        None,
        description="File with more of them, a line `name=value` each; keeps secrets out of the environment.",
    )

    @field_validator("kafka_config", mode="before")
    @classmethod
    def _parse_kafka_config(cls, value: Any) -> Any:
        return parse_json(value) if isinstance(value, str) else value

    @field_validator("schema_registry_url", mode="before")
    @classmethod
    def _is_unset_by_an_empty_text(cls, value: Any) -> Any:
        # Environments that extend others cannot remove a variable.
        return None if value == "" else value

    @model_validator(mode="after")
    def _credentials_are_whole(self) -> Self:
        if (self.schema_registry_user is None) != (self.schema_registry_password is None):
            raise ValueError(f"{_P}SCHEMA_REGISTRY_USER and {_P}SCHEMA_REGISTRY_PASSWORD go together; set both or none")
        return self

    @model_validator(mode="after")
    def _registry_is_secured_in_one_way(self) -> Self:
        url = self.schema_registry_url or ""
        ways = {
            f"{_P}SCHEMA_REGISTRY_USER": self.schema_registry_user is not None,
            f"{_P}SCHEMA_REGISTRY_TOKEN": self.schema_registry_token is not None,
            f"a user in {_P}SCHEMA_REGISTRY_URL": "@" in urlsplit(url).netloc,
        }
        if len(given := [way for way, is_given in ways.items() if is_given]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one")
        if self.schema_registry_ca_file is not None:
            if not url.startswith("https://"):
                raise ValueError(f"{_P}SCHEMA_REGISTRY_CA_FILE is not used while {_P}SCHEMA_REGISTRY_URL is not https")
            try:
                ssl.create_default_context(cafile=self.schema_registry_ca_file)
            except (OSError, ssl.SSLError) as error:
                reason = "holds no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
                raise ValueError(
                    f"{_P}SCHEMA_REGISTRY_CA_FILE: {self.schema_registry_ca_file} cannot be used: {reason}"
                ) from None
        return self

    @model_validator(mode="after")
    def _kafka_properties_suit_both_clients(self) -> Self:
        name = f"{_P}KAFKA_CONFIG_FILE"
        try:
            given = self.kafka_properties
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        try:
            jvm_properties(given)
        except PropertyError as error:
            setting = f"{_P}KAFKA_CONFIG" if error.name in self.kafka_config or not self.kafka_config_file else name
            raise ValueError(f"{setting}: {error}") from None
        return self

    @cached_property
    def kafka_properties(self) -> dict[str, str]:
        """The properties of the setting and of the file. Raises ValueError for a wrong file."""
        if self.kafka_config_file is None:
            return dict(self.kafka_config)
        of_file = read_properties(self.kafka_config_file)
        if both := sorted(of_file.keys() & self.kafka_config.keys()):
            raise ValueError(f"{both[0]} is in {_P}KAFKA_CONFIG too; keep one")
        return of_file | self.kafka_config


def parse_json(text: str) -> dict[str, str]:
    """Parses properties from a JSON object. Raises ValueError, whose message never holds a value."""
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ValueError("not JSON; give an object of property names and values") from error
    if not isinstance(parsed, dict):
        raise ValueError("not a JSON object; give an object of property names and values")
    for name, v in parsed.items():
        if not isinstance(v, (str, int, float)):  # a bool is an int
            raise ValueError(f"property '{name}' is neither a string nor a number nor a boolean")
    return {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in parsed.items()}


def read_properties(path: Path) -> dict[str, str]:
    """Reads a file of lines `name=value`, without escapes or spaces around both; `#` begins a comment.

    Raises:
        ValueError: the message has the number of the wrong line, never its content.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8") from error
    properties: dict[str, str] = {}
    # Not `splitlines`: a password may hold Unicode's line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _PROPERTY.fullmatch(line.strip(" \t\r"))
        if match is None:
            raise ValueError(f"line {number} of {path} is not name=value")
        if match["name"] in properties:
            raise ValueError(f"{path} has {match['name']} twice; keep one")
        properties[match["name"]] = match["value"]
    return properties


def printable_properties(properties: Mapping[str, str]) -> str:
    """The properties as JSON, with secrets hidden."""
    return json.dumps({name: HIDDEN if _is_secret(name) else value for name, value in properties.items()})


def _is_secret(name: str) -> bool:
    return name not in _NO_SECRETS and any(word in name.lower() for word in _SECRET_WORDS)


def jvm_properties(config: Mapping[str, str]) -> dict[str, str]:
    """Translates librdkafka's properties for Spark's Kafka client.

    Raises:
        PropertyError: a property is wrong, names an unreadable file, is not supported by both clients, or is set by
            the service itself.
    """
    for name, why in _REFUSED.items():
        if name in config:
            raise PropertyError(name, why)
    protocol = config.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise PropertyError("security.protocol", f"must be one of {', '.join(_PROTOCOLS)}")
    jvm = {name: value for name, value in config.items() if name in _SAME}
    if "security.protocol" in config:
        jvm["security.protocol"] = protocol
    return jvm | _trust(config) | _key_store(config) | _login(config, protocol)


def _trust(config: Mapping[str, str]) -> dict[str, str]:
    if config.get("enable.ssl.certificate.verification", "true").lower() in ("false", "0", "f"):
        name = "enable.ssl.certificate.verification"
        raise PropertyError(name, f"{_ONE_SIDED}, and name the brokers' CA in ssl.ca.location")
    trust = _trusted(config, "ssl.ca")
    identification = config.get("ssl.endpoint.identification.algorithm")
    if identification is not None:
        trust["ssl.endpoint.identification.algorithm"] = "" if identification == "none" else identification
    return trust


def _trusted(config: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The trust store with the certificates of `<prefix>.location` and `<prefix>.pem`; empty for the system's CAs."""
    where, pem = f"{prefix}.location", f"{prefix}.pem"
    given = {where: _content(where, config[where])} if config.get(where, "probe") not in ("", "probe") else {}
    given |= {pem: config[pem]} if pem in config else {}
    certificates = [block for name, text in given.items() for block in _certificates(name, text)]
    if not certificates:
        return {}
    return {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": "\n".join(certificates)}


def _key_store(config: Mapping[str, str]) -> dict[str, str]:
    password = config.get("ssl.key.password")
    if "ssl.keystore.location" in config:
        _content("ssl.keystore.location", config["ssl.keystore.location"], is_text=False)
        return {"ssl.keystore.type": "PKCS12"} | ({} if password is None else {"ssl.key.password": password})
    chain, key = _given(config, "ssl.certificate"), _given(config, "ssl.key")
    if chain is None and key is None:
        return {}
    if chain is None or key is None:
        has, lacks = ("ssl.key", "ssl.certificate") if chain is None else ("ssl.certificate", "ssl.key")
        raise PropertyError(f"{has}.location", f"goes together with {lacks}.location; set both or none")
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "\n".join(_certificates(*chain)),
        "ssl.keystore.key": _plain_key(*key, password),
    }


def _plain_key(name: str, pem: str, password: str | None) -> str:
    """The key in the one form that the JVM's client always reads: PKCS#8, not encrypted."""
    try:
        key = load_pem_private_key(pem.encode(), None)
    except TypeError:  # it is encrypted
        if password is None:
            raise PropertyError(name, "holds an encrypted key; set ssl.key.password") from None
        try:
            key = load_pem_private_key(pem.encode(), password.encode())
        except ValueError:
            raise PropertyError("ssl.key.password", f"does not open the key of {name}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise PropertyError(name, "holds no private key in PEM") from None
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _login(config: Mapping[str, str], protocol: str) -> dict[str, str]:
    mechanisms = {config[name] for name in ("sasl.mechanism", "sasl.mechanisms") if name in config}
    if not protocol.startswith("SASL_"):
        unused = next((name for name in config if name.startswith("sasl.")), None)
        if unused is not None:
            raise PropertyError(unused, f"is not used while security.protocol is {protocol}; make that SASL_SSL")
        return {}
    if len(mechanisms) != 1 or not mechanisms <= _LOGIN_MODULES.keys():
        raise PropertyError("sasl.mechanism", f"must be one of {', '.join(_LOGIN_MODULES)}, in capitals")
    (mechanism,) = mechanisms
    jvm = {"sasl.mechanism": mechanism}
    if mechanism == "OAUTHBEARER":
        jvm |= _oauth_endpoint(config)
        options = _oauth_options(config)
    else:
        options = {
            "username": _required(config, "sasl.username", mechanism),
            "password": _required(config, "sasl.password", mechanism),
        }
    rendered = " ".join(f"{name}={_quoted(value)}" for name, value in options.items())
    return jvm | {"sasl.jaas.config": f"{_LOGIN_MODULES[mechanism]} required {rendered};"}


def _oauth_endpoint(config: Mapping[str, str]) -> dict[str, str]:
    if config.get("sasl.oauthbearer.method", "default").lower() != "oidc":
        raise PropertyError("sasl.oauthbearer.method", "must be oidc with sasl.mechanism OAUTHBEARER")
    if config.get("sasl.oauthbearer.grant.type", "client_credentials") != "client_credentials":
        raise PropertyError(
            "sasl.oauthbearer.grant.type", "must be client_credentials: Spark's client supports no other"
        )
    if config.get("sasl.oauthbearer.metadata.authentication.type", "none") != "none":
        raise PropertyError("sasl.oauthbearer.metadata.authentication.type", _ONE_SIDED)
    url = _required(config, "sasl.oauthbearer.token.endpoint.url", "OAUTHBEARER")
    jvm = {"sasl.login.callback.handler.class": _OAUTH_HANDLER, "sasl.oauthbearer.token.endpoint.url": url}
    claim = config.get("sasl.oauthbearer.sub.claim.name")
    return jvm | ({} if claim is None else {"sasl.oauthbearer.sub.claim.name": claim})


def _oauth_options(config: Mapping[str, str]) -> dict[str, str]:
    options = {
        "clientId": _required(config, "sasl.oauthbearer.client.id", "OAUTHBEARER"),
        "clientSecret": _required(config, "sasl.oauthbearer.client.secret", "OAUTHBEARER"),
    }
    if scope := config.get("sasl.oauthbearer.scope"):
        options["scope"] = scope
    for extension in filter(None, config.get("sasl.oauthbearer.extensions", "").split(",")):
        name, _, value = extension.partition("=")
        options[f"extension_{name.strip()}"] = value.strip()
    return options | _trusted(config, "https.ca")


def _required(config: Mapping[str, str], name: str, mechanism: str) -> str:
    value = config.get(name)
    if not value:
        raise PropertyError(name, f"is missing; sasl.mechanism {mechanism} needs it")
    return value


def _given(config: Mapping[str, str], prefix: str) -> tuple[str, str] | None:
    """The property that gives the PEM, `<prefix>.pem` or `<prefix>.location`, and the PEM."""
    where, pem = f"{prefix}.location", f"{prefix}.pem"
    if pem in config:
        return pem, config[pem]
    return (where, _content(where, config[where])) if where in config else None


def _certificates(name: str, text: str) -> list[str]:
    blocks = [match[0] for match in _CERTIFICATE.finditer(text)]
    if not blocks:
        raise PropertyError(name, "holds no certificate in PEM")
    return blocks


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _content(name: str, path: str, *, is_text: bool = True) -> str:
    try:
        content = Path(path).read_bytes()
    except IsADirectoryError as error:
        raise PropertyError(name, f"{path} is a directory, and Spark's client reads files; name one file") from error
    except OSError as error:
        raise PropertyError(name, f"{path} cannot be read: {error.strerror}") from error
    return content.decode("utf-8", errors="replace") if is_text else ""
