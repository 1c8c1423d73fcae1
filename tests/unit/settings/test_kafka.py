"""Kafka properties: as settings, from a file in Java's format, and in translation for the JVM's client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from balance_service.settings import load_settings
from balance_service.settings.kafka import PropertyError, jvm_properties, parse_json, read_properties
from tests.support.fakes import refusal

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_environment")

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


def test_kafka_properties_are_converted_to_librdkafkas_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_KAFKA_CONFIG", '{"enable.x": true, "socket.timeout.ms": 5, "a": "B"}')

    assert load_settings().kafka_config == {"enable.x": "true", "socket.timeout.ms": "5", "a": "B"}


def test_properties_of_the_setting_and_of_the_file_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text("security.protocol=SSL\n")
    monkeypatch.setenv("BALANCE_KAFKA_CONFIG_FILE", str(file))
    monkeypatch.setenv("BALANCE_KAFKA_CONFIG", '{"client.rack": "r1"}')

    settings = load_settings()

    assert settings.kafka_properties == {"security.protocol": "SSL", "client.rack": "r1"}
    assert settings.printable()["BALANCE_KAFKA_CONFIG_FILE"] == str(file)


_LOGIN = '"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "me"'


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"BALANCE_KAFKA_CONFIG_FILE": "{dir}/none"}, "BALANCE_KAFKA_CONFIG_FILE: {dir}/none cannot be read: No such"),
        ({"BALANCE_KAFKA_CONFIG_FILE": "{dir}"}, "BALANCE_KAFKA_CONFIG_FILE: {dir} cannot be read: Is a directory"),
        (
            {"BALANCE_KAFKA_CONFIG_FILE": "{dir}/odd"},
            "BALANCE_KAFKA_CONFIG_FILE: line 2 of {dir}/odd is not name=value",
        ),
        (
            {"BALANCE_KAFKA_CONFIG_FILE": "{dir}/good", "BALANCE_KAFKA_CONFIG": '{"sasl.password": "hunter2"}'},
            "BALANCE_KAFKA_CONFIG_FILE: sasl.password is in BALANCE_KAFKA_CONFIG too; keep one",
        ),
        (
            {"BALANCE_KAFKA_CONFIG_FILE": "{dir}/bare"},
            "BALANCE_KAFKA_CONFIG_FILE: sasl.mechanism must be one of PLAIN, ",
        ),
        (
            {"BALANCE_KAFKA_CONFIG": '{"security.protocol": "TLS"}'},
            "BALANCE_KAFKA_CONFIG: security.protocol must be one of",
        ),
        (
            {"BALANCE_KAFKA_CONFIG": '{"group.protocol": "consumer"}'},
            "BALANCE_KAFKA_CONFIG: group.protocol is set by the service, ",
        ),
        ({"BALANCE_KAFKA_CONFIG": "{" + _LOGIN + "}"}, "BALANCE_KAFKA_CONFIG: sasl.password is missing"),
        ({"BALANCE_SCHEMA_REGISTRY_TOKEN": ""}, "BALANCE_SCHEMA_REGISTRY_TOKEN: "),
        (
            {"BALANCE_SCHEMA_REGISTRY_TOKEN": "hunter2", "BALANCE_SCHEMA_REGISTRY_USER": "me"}
            | {"BALANCE_SCHEMA_REGISTRY_PASSWORD": "hunter2"},
            "BALANCE_SCHEMA_REGISTRY_USER and BALANCE_SCHEMA_REGISTRY_TOKEN exclude each other; keep one",
        ),
        (
            {"BALANCE_SCHEMA_REGISTRY_TOKEN": "hunter2", "BALANCE_SCHEMA_REGISTRY_URL": "https://me:hunter2@r"},
            "BALANCE_SCHEMA_REGISTRY_TOKEN and a user in BALANCE_SCHEMA_REGISTRY_URL exclude each other; keep one",
        ),
        (
            {"BALANCE_SCHEMA_REGISTRY_USER": "me:you", "BALANCE_SCHEMA_REGISTRY_PASSWORD": "hunter2"},
            "BALANCE_SCHEMA_REGISTRY_USER: ",
        ),
        (
            {"BALANCE_SCHEMA_REGISTRY_CA_FILE": "{dir}/good"},
            "BALANCE_SCHEMA_REGISTRY_CA_FILE is not used while BALANCE_SCHEMA_REGISTRY_URL is not https",
        ),
        (
            {"BALANCE_SCHEMA_REGISTRY_CA_FILE": "{dir}/none", "BALANCE_SCHEMA_REGISTRY_URL": "https://r"},
            "BALANCE_SCHEMA_REGISTRY_CA_FILE: {dir}/none cannot be used: No such file or directory",
        ),
        (
            {"BALANCE_SCHEMA_REGISTRY_CA_FILE": "{dir}/good", "BALANCE_SCHEMA_REGISTRY_URL": "https://r"},
            "BALANCE_SCHEMA_REGISTRY_CA_FILE: {dir}/good cannot be used: holds no certificate in PEM",
        ),
    ],
)
def test_a_wrong_kafka_setting_is_refused_in_one_sentence_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sentence: str
) -> None:
    (tmp_path / "good").write_text("security.protocol=SASL_SSL\nsasl.password=hunter2\n")
    (tmp_path / "odd").write_text("security.protocol=SASL_SSL\nhunter2\n")
    (tmp_path / "bare").write_text("security.protocol=SASL_SSL\nsasl.password=hunter2\n")

    message = refusal(monkeypatch, **{name: v.replace("{dir}", str(tmp_path)) for name, v in environment.items()})

    assert message.startswith(sentence.replace("{dir}", str(tmp_path)))
    assert "hunter2" not in message
    assert "\n" not in message


# The properties file


def read(folder: Path, text: str) -> dict[str, str]:
    file = folder / "kafka.properties"
    file.write_text(text, encoding="utf-8", newline="")
    return read_properties(file)


@pytest.mark.parametrize("line", ["sasl.password=a b", "sasl.password = a b", "  sasl.password\t=a b \r"])
def test_spaces_around_name_and_value_are_ignored(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line) == {"sasl.password": "a b"}


def test_comments_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    assert read(tmp_path, "# a=b\r\n\r\n  # c=d\n   \na=1\r\nb=2") == {"a": "1", "b": "2"}


@pytest.mark.parametrize("value", ["x=y:z # w!", "", "back\\\\slash\\", '"quoted"', "x\u2028y\x0bz"])
def test_a_value_is_taken_as_it_is(tmp_path: Path, value: str) -> None:
    assert read(tmp_path, f"a={value}\nb=1\n") == {"a": value, "b": "1"}


@pytest.mark.parametrize("line", ["hunter2", "=hunter2", "sasl.password: hunter2=", "sasl.password hunter2="])
def test_a_malformed_line_is_refused_by_its_number_without_its_content(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match=r"line 2 of .*kafka\.properties is not name=value") as caught:
        read(tmp_path, f"a=1\n{line}\n")

    assert "hunter2" not in str(caught.value)


def test_a_duplicate_property_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a twice; keep one"):
        read(tmp_path, "a=1\na=2")


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"a=\xff")

    with pytest.raises(ValueError, match="is not UTF-8"):
        read_properties(tmp_path / "k")


def test_json_values_are_converted_to_librdkafkas_strings() -> None:
    assert parse_json('{"a": true, "b": 1.5, "c": "X"}') == {"a": "true", "b": "1.5", "c": "X"}


# Translation for the JVM's client


def pem(form: PrivateFormat, password: str | None) -> str:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password.encode())
    return _KEY.private_bytes(Encoding.PEM, form, encryption).decode()


def test_properties_with_the_same_name_are_passed_to_the_jvm_unchanged() -> None:
    config = {"security.protocol": "SSL", "client.rack": "r1", "reconnect.backoff.max.ms": "1000"}

    assert jvm_properties(config) == config


def test_the_security_protocol_is_passed_to_the_jvm_in_capitals() -> None:
    assert jvm_properties({"security.protocol": "ssl"}) == {"security.protocol": "SSL"}


def test_properties_that_only_tune_librdkafka_are_not_passed_to_the_jvm() -> None:
    assert jvm_properties({"socket.nagle.disable": "true", "debug": "all"}) == {}


def test_ca_certificates_become_a_pem_trust_store_without_surrounding_text(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(f"# the CA\nissuer: x\n{CERTIFICATE}\n\n{OTHER}\n")

    assert jvm_properties({"ssl.ca.location": str(tmp_path / "ca.pem")}) == {
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": f"{CERTIFICATE}\n{OTHER}",
    }
    both = jvm_properties({"ssl.ca.location": str(tmp_path / "ca.pem"), "ssl.ca.pem": OTHER})
    assert both["ssl.truststore.certificates"] == f"{CERTIFICATE}\n{OTHER}\n{OTHER}"


def test_the_system_trust_store_is_left_to_the_jvm() -> None:
    assert jvm_properties({"ssl.ca.location": "probe"}) == {}


def test_a_key_store_is_passed_to_the_jvm_as_pkcs12(tmp_path: Path) -> None:
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


def test_the_password_of_an_unencrypted_key_is_ignored() -> None:
    config = {"ssl.certificate.pem": CERTIFICATE, "ssl.key.pem": pem(PrivateFormat.PKCS8, None)}

    assert jvm_properties({**config, "ssl.key.password": "s"}) == jvm_properties(config)


def test_disabled_host_name_verification_is_translated() -> None:
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
def test_a_user_and_a_password_become_a_jaas_login(name: str, mechanism: str, module: str) -> None:
    assert jvm_properties({**SASL, name: mechanism, "sasl.username": "me", "sasl.password": "pass"}) == {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{module} required username="me" password="pass";',
    }


def test_a_password_cannot_break_out_of_its_quotes() -> None:
    told = jvm_properties({**LOGIN, "sasl.password": 'a"; \\ evil\r\nb'})["sasl.jaas.config"]

    assert told.endswith(' password="a\\"; \\\\ evil\\r\\nb";')


def test_oauth_client_credentials_become_a_jaas_login() -> None:
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
        ({"security.protocol": "TLS"}, "security.protocol", "must be one of PLAINTEXT, SSL, "),
        (SASL, "sasl.mechanism", "must be one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER, in capitals"),
        ({**LOGIN, "sasl.mechanism": "GSSAPI"}, "sasl.mechanism", "must be one of PLAIN"),
        ({**LOGIN, "sasl.mechanisms": "SCRAM-SHA-256"}, "sasl.mechanism", "must be one of PLAIN"),
        ({**LOGIN, "sasl.password": ""}, "sasl.password", "is missing; sasl.mechanism PLAIN needs it"),
        ({**LOGIN, "security.protocol": "SSL"}, "sasl.mechanism", "is not used while security.protocol is SSL"),
        ({"sasl.username": "me"}, "sasl.username", "is not used while security.protocol is PLAINTEXT; make that SASL"),
        ({**OIDC, "sasl.oauthbearer.method": "default"}, "sasl.oauthbearer.method", "must be oidc"),
        ({**OIDC, "sasl.oauthbearer.grant.type": "jwt-bearer"}, "sasl.oauthbearer.grant.type", "client_credentials"),
        ({**OIDC, "sasl.oauthbearer.client.secret": ""}, "sasl.oauthbearer.client.secret", "is missing"),
        (
            {**OIDC, "sasl.oauthbearer.metadata.authentication.type": "azure_imds"},
            "sasl.oauthbearer.metadata.authentication.type",
            "would apply to librdkafka alone",
        ),
        ({"enable.ssl.certificate.verification": "false"}, "enable.ssl.certificate.verification", "ssl.ca.location"),
        ({"ssl.cipher.suites": "HIGH"}, "ssl.cipher.suites", "restrict what the brokers offer"),
        ({"ssl.crl.location": "/crl"}, "ssl.crl.location", "would apply to librdkafka alone"),
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
def test_a_property_that_one_client_does_not_support_is_refused_by_name(
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
def test_a_property_that_the_service_sets_is_refused_by_name(name: str) -> None:
    with pytest.raises(PropertyError, match="is set by the service") as refused:
        jvm_properties({name: "any"})

    assert refused.value.name == name
