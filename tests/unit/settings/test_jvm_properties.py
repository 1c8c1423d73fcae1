"""Librdkafka's properties in translation: what each means to the JVM's client, and what has to be refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from balance_service.settings.jvm_properties import jvm_properties
from balance_service.settings.kafka_properties import PropertyError

if TYPE_CHECKING:
    from pathlib import Path

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nQ0E=\n-----END CERTIFICATE-----"
OTHER = "-----BEGIN CERTIFICATE-----\nT1RIRVI=\n-----END CERTIFICATE-----"
_KEY = ec.generate_private_key(ec.SECP256R1())
SASL = {"security.protocol": "SASL_SSL"}
LOGIN = {**SASL, "sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": "pass"}
OIDC = {
    **SASL,
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "OIDC",
    "sasl.oauthbearer.client.id": "me",
    "sasl.oauthbearer.client.secret": "s",
    "sasl.oauthbearer.token.endpoint.url": "https://idp/token",
}
_OAUTH = "org.apache.kafka.common.security.oauthbearer"


def pem(form: PrivateFormat, password: str | None) -> str:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
    return _KEY.private_bytes(Encoding.PEM, form, encryption).decode()


def test_properties_of_the_same_name_go_to_the_jvm_as_they_are() -> None:
    config = {"security.protocol": "SSL", "client.rack": "r1", "reconnect.backoff.max.ms": "1000"}

    assert jvm_properties(config) == config


def test_the_jvm_wants_its_security_protocol_in_capitals() -> None:
    assert jvm_properties({"security.protocol": "ssl"}) == {"security.protocol": "SSL"}


def test_properties_that_only_tune_librdkafka_do_not_reach_the_jvm() -> None:
    assert jvm_properties({"socket.nagle.disable": "true", "debug": "all"}) == {}


def test_ca_certificates_are_a_pem_trust_store_whatever_is_written_around_them(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(f"# the CA\nissuer: x\n{CERTIFICATE}\n\n{OTHER}\n")

    assert jvm_properties({"ssl.ca.location": str(tmp_path / "ca.pem")}) == {
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": f"{CERTIFICATE}\n{OTHER}",
    }
    both = jvm_properties({"ssl.ca.location": str(tmp_path / "ca.pem"), "ssl.ca.pem": OTHER})
    assert both["ssl.truststore.certificates"] == f"{CERTIFICATE}\n{OTHER}\n{OTHER}"


def test_what_the_machine_trusts_is_left_to_the_jvm() -> None:
    assert jvm_properties({"ssl.ca.location": "probe"}) == {}


def test_a_key_store_is_a_pkcs12_one_to_the_jvm(tmp_path: Path) -> None:
    (tmp_path / "k.p12").write_bytes(b"\x30\x82\xff")
    where = str(tmp_path / "k.p12")

    assert jvm_properties({"ssl.keystore.location": where, "ssl.keystore.password": "s"}) == {
        "ssl.keystore.location": where,
        "ssl.keystore.password": "s",
        "ssl.keystore.type": "PKCS12",
    }


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
@pytest.mark.parametrize("password", [None, "s"])
def test_a_client_certificate_and_its_key_become_a_pem_key_store_with_a_plain_key(
    tmp_path: Path, form: PrivateFormat, password: str | None
) -> None:
    key = pem(form, password)
    (tmp_path / "c.pem").write_text(CERTIFICATE)
    (tmp_path / "k.pem").write_text(f"Bag Attributes\n{key}\n")
    wanted = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": CERTIFICATE,
        "ssl.keystore.key": pem(PrivateFormat.PKCS8, None),
    }
    files = {"ssl.certificate.location": str(tmp_path / "c.pem"), "ssl.key.location": str(tmp_path / "k.pem")}
    given = {} if password is None else {"ssl.key.password": password}

    assert jvm_properties({**files, **given}) == wanted
    assert jvm_properties({"ssl.certificate.pem": CERTIFICATE, "ssl.key.pem": key, **given}) == wanted


def test_the_password_of_a_key_that_is_not_encrypted_does_no_harm() -> None:
    config = {"ssl.certificate.pem": CERTIFICATE, "ssl.key.pem": pem(PrivateFormat.PKCS8, None)}

    assert jvm_properties({**config, "ssl.key.password": "s"}) == jvm_properties(config)


def test_no_host_name_check_means_the_same_to_the_jvm() -> None:
    name = "ssl.endpoint.identification.algorithm"

    assert jvm_properties({name: "none"}) == {name: ""}
    assert jvm_properties({name: "https"}) == {name: "https"}


@pytest.mark.parametrize("name", ["sasl.mechanism", "sasl.mechanisms"])
@pytest.mark.parametrize(
    ("mechanism", "module"),
    [
        ("PLAIN", "org.apache.kafka.common.security.plain.PlainLoginModule"),
        ("SCRAM-SHA-256", "org.apache.kafka.common.security.scram.ScramLoginModule"),
        ("SCRAM-SHA-512", "org.apache.kafka.common.security.scram.ScramLoginModule"),
    ],
)
def test_a_user_and_a_password_log_in_to_the_jvm(name: str, mechanism: str, module: str) -> None:
    assert jvm_properties({**SASL, name: mechanism, "sasl.username": "me", "sasl.password": "pass"}) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{module} required username="me" password="pass";',
    }


def test_a_password_cannot_break_out_of_its_quotes() -> None:
    told = jvm_properties({**LOGIN, "sasl.password": 'a"; \\ evil\r\nb'})["sasl.jaas.config"]

    assert told.endswith(' password="a\\"; \\\\ evil\\r\\nb";')


def test_client_credentials_log_in_to_the_jvm() -> None:
    config = {
        **OIDC,
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "logicalCluster=lkc-1, pool=p",
        "sasl.oauthbearer.sub.claim.name": "azp",
        "https.ca.pem": CERTIFICATE,
    }

    assert jvm_properties(config) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.login.callback.handler.class": f"{_OAUTH}.OAuthBearerLoginCallbackHandler",
        "sasl.oauthbearer.token.endpoint.url": "https://idp/token",
        "sasl.oauthbearer.sub.claim.name": "azp",
        "sasl.jaas.config": (
            f'{_OAUTH}.OAuthBearerLoginModule required clientId="me" clientSecret="s" scope="kafka" '
            'extension_logicalCluster="lkc-1" extension_pool="p" ssl.truststore.type="PEM" '
            f'ssl.truststore.certificates="{CERTIFICATE}";'.replace("\n", "\\n")
        ),
    }


@pytest.mark.parametrize(
    ("config", "name", "sentence"),
    [
        ({"security.protocol": "TLS"}, "security.protocol", "is none of PLAINTEXT, SSL, "),
        (SASL, "sasl.mechanism", "is none of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER; set one"),
        ({**LOGIN, "sasl.mechanism": "GSSAPI"}, "sasl.mechanism", "is none of PLAIN"),
        ({**LOGIN, "sasl.mechanisms": "SCRAM-SHA-256"}, "sasl.mechanism", "is none of PLAIN"),
        ({**LOGIN, "sasl.password": ""}, "sasl.password", "is missing, which sasl.mechanism PLAIN needs"),
        ({**LOGIN, "security.protocol": "SSL"}, "sasl.mechanism", "is not used while security.protocol is SSL"),
        ({"sasl.username": "me"}, "sasl.username", "is not used while security.protocol is PLAINTEXT; make that SASL"),
        ({**OIDC, "sasl.oauthbearer.method": "default"}, "sasl.oauthbearer.method", "must be oidc"),
        ({**OIDC, "sasl.oauthbearer.grant.type": "jwt-bearer"}, "sasl.oauthbearer.grant.type", "client_credentials"),
        ({**OIDC, "sasl.oauthbearer.client.secret": ""}, "sasl.oauthbearer.client.secret", "is missing"),
        (
            {**OIDC, "sasl.oauthbearer.metadata.authentication.type": "azure_imds"},
            "sasl.oauthbearer.metadata.authentication.type",
            "would hold for librdkafka alone",
        ),
        ({"enable.ssl.certificate.verification": "false"}, "enable.ssl.certificate.verification", "ssl.ca.location"),
        ({"ssl.cipher.suites": "HIGH"}, "ssl.cipher.suites", "restrict what the brokers offer"),
        ({"ssl.crl.location": "/crl"}, "ssl.crl.location", "would hold for librdkafka alone"),
        ({"ssl.ca.pem": "hunter2"}, "ssl.ca.pem", "holds no certificate in PEM"),
        ({"ssl.ca.location": "/no/ca.pem"}, "ssl.ca.location", "/no/ca.pem cannot be read: No such file or directory"),
        ({"ssl.ca.location": "/"}, "ssl.ca.location", "/ is a directory, and Spark's client reads files; name one"),
        ({"ssl.key.location": "/no/k.pem"}, "ssl.key.location", "/no/k.pem cannot be read: No such file or directory"),
        ({"ssl.keystore.location": "/no/k.p12"}, "ssl.keystore.location", "/no/k.p12 cannot be read"),
        ({"ssl.certificate.pem": CERTIFICATE}, "ssl.certificate.location", "goes together with ssl.key.location"),
        (
            {"ssl.certificate.pem": CERTIFICATE, "ssl.key.pem": "hunter2"},
            "ssl.key.pem",
            "holds no private key in PEM",
        ),
        (
            {"ssl.certificate.pem": CERTIFICATE, "ssl.key.pem": pem(PrivateFormat.PKCS8, "s")},
            "ssl.key.pem",
            "holds an encrypted key; set ssl.key.password",
        ),
        (
            {"ssl.certificate.pem": CERTIFICATE, "ssl.key.pem": pem(PrivateFormat.PKCS8, "s")}
            | {"ssl.key.password": "hunter2"},
            "ssl.key.password",
            "does not open the key of ssl.key.pem",
        ),
    ],
)
def test_what_would_not_hold_for_both_clients_is_refused_by_name(
    config: dict[str, str], name: str, sentence: str
) -> None:
    with pytest.raises(PropertyError) as caught:
        jvm_properties(config)

    assert caught.value.name == name
    assert str(caught.value).startswith(f"{name} ")
    assert sentence in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["group.instance.id", "group.protocol", "partition.assignment.strategy", "transactional.id"]
)
def test_what_is_not_the_users_to_choose_is_refused_by_name(name: str) -> None:
    with pytest.raises(PropertyError, match="is the service's own choice") as refused:
        jvm_properties({name: "any"})

    assert refused.value.name == name
