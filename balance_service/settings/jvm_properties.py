"""Librdkafka's properties as the Kafka client of the JVM, inside Spark, wants them.

Properties of trust and identity are translated or refused; those that only tune librdkafka are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from balance_service.settings.kafka_properties import PropertyError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
_ONE_SIDED = "would hold for librdkafka alone, for Spark's Kafka client has no such property; leave it out"
_RESTRICT_THE_BROKER = f"{_ONE_SIDED}, and restrict what the brokers offer"
# By another protocol, or in an eager group, no partition could be handed over alone. A static member does not leave
# when it stops.
_OUR_CHOICE = "is the service's own choice, on which its membership in the group rests; leave it out"
_REFUSED = {
    "group.instance.id": _OUR_CHOICE,
    "group.protocol": _OUR_CHOICE,
    "partition.assignment.strategy": _OUR_CHOICE,
    # Of two producers with one of a user's choice, each would fence the other.
    "transactional.id": "is the service's own choice, by which only the owner of a partition writes; leave it out",
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


def jvm_properties(config: Mapping[str, str]) -> dict[str, str]:
    """The properties for the JVM's client.

    Raises:
        PropertyError: one is wrong, names a file that cannot be read, cannot be honoured by both clients, or is not
            the user's to choose.
    """
    for name, why in _REFUSED.items():
        if name in config:
            raise PropertyError(name, why)
    protocol = config.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise PropertyError("security.protocol", f"is none of {', '.join(_PROTOCOLS)}")
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
    """The trust store of what `<prefix>.location` and `<prefix>.pem` hold; nothing for what the machine trusts."""
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
    """The key in the one form that the JVM's client reads for sure: PKCS#8, not encrypted."""
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
        raise PropertyError("sasl.mechanism", f"is none of {', '.join(_LOGIN_MODULES)}; set one, in capitals")
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
    told = " ".join(f"{name}={_quoted(value)}" for name, value in options.items())
    return jvm | {"sasl.jaas.config": f"{_LOGIN_MODULES[mechanism]} required {told};"}


def _oauth_endpoint(config: Mapping[str, str]) -> dict[str, str]:
    if config.get("sasl.oauthbearer.method", "default").lower() != "oidc":
        raise PropertyError("sasl.oauthbearer.method", "must be oidc with sasl.mechanism OAUTHBEARER")
    if config.get("sasl.oauthbearer.grant.type", "client_credentials") != "client_credentials":
        raise PropertyError("sasl.oauthbearer.grant.type", "must be client_credentials: Spark's client knows no other")
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
        raise PropertyError(name, f"is missing, which sasl.mechanism {mechanism} needs")
    return value


def _given(config: Mapping[str, str], prefix: str) -> tuple[str, str] | None:
    """The PEM of `<prefix>.pem` or of the file `<prefix>.location`, and which of them it is."""
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
