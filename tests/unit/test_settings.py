"""Settings: read from BALANCE_*, refused in sentences, printed without secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from balance_service.errors import ConfigurationError
from balance_service.kafka.clients import (
    common_config,
    jvm_properties,
    producer_config,
    reader_config,
    transactional_config,
)
from balance_service.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("BALANCE_"):
            monkeypatch.delenv(name)


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    return str(caught.value)


def test_the_defaults_are_those_of_the_design() -> None:
    settings = load_settings()

    assert {
        "bootstrap_servers": "localhost:9092",
        "schema_registry_url": "http://localhost:8081",
        "application_id": "balance-service",
        "topic": "balance",
        "partitions": 2,
        "replication_factor": 1,
        "application_server": "localhost:5051",
        "http_host": "127.0.0.1",
        "http_port": 5051,
        "state_dir": Path("state"),
        "session_timeout_ms": 10_000,
        "max_records_per_batch": 1_000_000,
        "spark_master": "local[2]",
        "spark_jars": None,
        "read_timeout_seconds": 5.0,
        "kafka_config": {},
    }.items() <= dict(settings).items()


def test_the_internal_topics_are_named_after_the_application() -> None:
    settings = load_settings(application_id="app", topic="funds")

    assert settings.changelog_topic == "app-balance-changelog"
    assert settings.application_servers_topic == "app-application-servers"
    assert settings.dead_letters_topic == "funds-dead-letters"


def test_a_setting_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_TOPIC", "funds")
    monkeypatch.setenv("BALANCE_PARTITIONS", "12")

    assert (load_settings().topic, load_settings().partitions) == ("funds", 12)


def test_a_variable_without_the_prefix_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPIC", "funds")

    assert load_settings().topic == "balance"


def test_the_read_timeout_is_read_from_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_READ_TIMEOUT", "2.5")

    assert load_settings().read_timeout_seconds == 2.5


def test_the_read_timeout_can_be_overridden_by_field_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(read_timeout_seconds=0.5).read_timeout_seconds == 0.5
    monkeypatch.setenv("BALANCE_READ_TIMEOUT", "2.5")
    assert load_settings(read_timeout_seconds=0.5).read_timeout_seconds == 0.5


def test_an_override_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_TOPIC", "funds")

    assert load_settings(topic="other").topic == "other"


def test_an_override_that_is_no_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="topci"):
        load_settings(topci="balance")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().topic = "other"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("BALANCE_PARTITIONS", "0", "Input should be greater than or equal to 1"),
        ("BALANCE_PARTITIONS", "many", "Input should be a valid integer"),
        ("BALANCE_REPLICATION_FACTOR", "0", "Input should be greater than or equal to 1"),
        ("BALANCE_HTTP_PORT", "65536", "Input should be less than or equal to 65535"),
        ("BALANCE_SESSION_TIMEOUT_MS", "10", "Input should be greater than or equal to 3000"),
        ("BALANCE_MAX_RECORDS_PER_BATCH", "0", "Input should be greater than or equal to 1"),
        ("BALANCE_READ_TIMEOUT", "0", "Input should be greater than 0"),
        ("BALANCE_READ_TIMEOUT", "nan", "Input should be"),
        ("BALANCE_READ_TIMEOUT", "soon", "Input should be a valid number"),
        ("BALANCE_CREATE_TOPICS", "perhaps", "Input should be a valid boolean"),
        ("BALANCE_BOOTSTRAP_SERVERS", "", "String should have at least 1 character"),
        ("BALANCE_SCHEMA_REGISTRY_URL", "localhost:8081", "String should match pattern"),
        ("BALANCE_APPLICATION_ID", "has space", "String should match pattern"),
        ("BALANCE_TOPIC", "a/b", "String should match pattern"),
        ("BALANCE_LOG_LEVEL", "LOUD", "String should match pattern"),
        ("BALANCE_SPARK_DRIVER_MEMORY", "lots", "String should match pattern"),
        ("BALANCE_APPLICATION_SERVER", "localhost", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", ":5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:0", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:70000", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "localhost:\uff15\uff10\uff15\uff11", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "http://localhost:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "user@localhost:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "::1:5051", "is not host:port"),
        ("BALANCE_APPLICATION_SERVER", "0.0.0.0:5051", "is a wildcard address"),
        ("BALANCE_APPLICATION_SERVER", "[::]:5051", "is a wildcard address"),
        ("BALANCE_APPLICATION_SERVER", "*:5051", "is a wildcard address"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0.256", "is no host name, *.domain, IP address or network"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0.1/8", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "10.0.0.0/33", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "peer:5051", "without ports"),
        ("BALANCE_PEER_ALLOW_LIST", "[::1]", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "*", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "peer.*", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "a..b", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "http://peer", "is no host name"),
        ("BALANCE_PEER_ALLOW_LIST", "localhost,bad host", "has 'bad host', which is no host name"),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence_that_names_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
) -> None:
    message = refusal(monkeypatch, **{variable: value})

    assert message.startswith(f"{variable}: ")
    assert sentence in message
    assert f"'{value}'" in message
    assert "\n" not in message
    assert message.count("BALANCE_") == 1


def test_a_refusal_reads_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(monkeypatch, BALANCE_PARTITIONS="0") == (
        "BALANCE_PARTITIONS: Input should be greater than or equal to 1, not '0'"
    )
    monkeypatch.delenv("BALANCE_PARTITIONS")
    assert refusal(monkeypatch, BALANCE_APPLICATION_SERVER="localhost") == (
        "BALANCE_APPLICATION_SERVER: 'localhost' is not host:port; give an address that peers can reach"
    )


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("{", "not JSON; give an object of property names and values"),
        ("[]", "not a JSON object; give an object of property names and values"),
        ('{"a": null}', "property 'a' is neither a string nor a number nor a boolean"),
        ('{"a": {"b": "hunter2"}}', "property 'a' is neither a string nor a number nor a boolean"),
        ('{"a": ["hunter2"]}', "property 'a' is neither a string nor a number nor a boolean"),
        ('{"sasl.password": "hunter2"', "not JSON; give an object of property names and values"),
    ],
)
def test_a_bad_kafka_config_is_refused_without_telling_its_secrets(
    monkeypatch: pytest.MonkeyPatch, value: str, sentence: str
) -> None:
    assert refusal(monkeypatch, BALANCE_KAFKA_CONFIG=value) == f"BALANCE_KAFKA_CONFIG: {sentence}"


@pytest.mark.parametrize("variable", ["BALANCE_SCHEMA_REGISTRY_USER", "BALANCE_SCHEMA_REGISTRY_PASSWORD"])
def test_half_a_credential_is_refused_without_telling_it(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    message = refusal(monkeypatch, **{variable: "hunter2"})

    assert message == (
        "BALANCE_SCHEMA_REGISTRY_USER and BALANCE_SCHEMA_REGISTRY_PASSWORD go together; set both or none"
    )


def test_every_bad_value_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, BALANCE_PARTITIONS="0", BALANCE_HTTP_PORT="x")

    assert "BALANCE_PARTITIONS: " in message
    assert "BALANCE_HTTP_PORT: " in message


def test_a_registry_url_with_credentials_is_not_told_when_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "hunter2" not in refusal(monkeypatch, BALANCE_SCHEMA_REGISTRY_URL="ftp://me:hunter2@registry")


@pytest.mark.parametrize("address", ["localhost:5051", "10.0.0.1:80", "[::1]:5051", "balance-1.internal:65535"])
def test_an_address_peers_can_reach_is_accepted(address: str) -> None:
    assert load_settings(application_server=address).application_server == address


def test_an_instance_can_advertise_its_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "3f9c0a51e2d4")

    assert load_settings(application_server="{hostname}:5051").application_server == "3f9c0a51e2d4:5051"


def test_peers_may_be_hosts_domains_addresses_and_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_PEER_ALLOW_LIST", " peer-1,*.svc.Cluster.local, 10.0.0.0/8 ,192.0.2.1,::1,fd00::/8,")

    assert load_settings().peer_allow_list == (
        "peer-1",
        "*.svc.Cluster.local",
        "10.0.0.0/8",
        "192.0.2.1",
        "::1",
        "fd00::/8",
    )


def test_no_list_of_peers_allows_any() -> None:
    assert load_settings().peer_allow_list == ()


def test_a_short_peer_secret_is_refused_without_telling_it(monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal(monkeypatch, BALANCE_PEER_SECRET="hunter2")

    assert message.startswith("BALANCE_PEER_SECRET: ")
    assert "hunter2" not in message


def test_every_setting_is_printed_by_its_variable() -> None:
    printed = load_settings().printable()

    assert len(printed) == len(Settings.model_fields)
    assert all(name.startswith("BALANCE_") for name in printed)
    assert printed["BALANCE_READ_TIMEOUT"] == "5.0"
    assert printed["BALANCE_SPARK_JARS"] == ""


def test_what_is_printed_can_be_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(kafka_config={"client.rack": "r1"}, read_timeout_seconds=1.5, create_topics=False)
    for name, value in settings.printable().items():
        if value:
            monkeypatch.setenv(name, value)

    assert load_settings() == settings


def test_secrets_are_never_printed() -> None:
    secrets = {
        "sasl.password": "hunter2",
        "ssl.key.password": "hunter2",
        "ssl.keystore.password": "hunter2",
        "ssl.key.pem": "hunter2",
        "sasl.oauthbearer.client.secret": "hunter2",
        "sasl.oauthbearer.config": "principal=me secret=hunter2",
        "sasl.oauthbearer.assertion.private.key.passphrase": "hunter2",
        "sasl.jaas.config": "password=hunter2",
    }
    settings = load_settings(
        schema_registry_url="https://me:hunter2@registry:8081/path",
        schema_registry_user="me",
        schema_registry_password="hunter2",
        kafka_config={**secrets, "sasl.username": "me"},
    )

    printed = settings.printable()

    assert "hunter2" not in str(printed)
    assert "hunter2" not in repr(settings.schema_registry_password)
    assert json.loads(printed["BALANCE_KAFKA_CONFIG"])["sasl.username"] == "me"
    assert set(json.loads(printed["BALANCE_KAFKA_CONFIG"])) == {*secrets, "sasl.username"}
    assert printed["BALANCE_SCHEMA_REGISTRY_URL"].endswith("@registry:8081/path")


def test_kafka_properties_are_told_as_librdkafka_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALANCE_KAFKA_CONFIG", '{"enable.x": true, "socket.timeout.ms": 5, "a": "B"}')

    assert load_settings().kafka_config == {"enable.x": "true", "socket.timeout.ms": "5", "a": "B"}


def test_every_client_gets_the_users_properties() -> None:
    settings = load_settings(kafka_config={"security.protocol": "SSL"})

    for config in (
        common_config(settings),
        producer_config(settings),
        reader_config(settings),
        transactional_config(settings, "t"),
    ):
        assert config["security.protocol"] == "SSL"
        assert config["bootstrap.servers"] == "localhost:9092"


def test_the_user_cannot_weaken_what_keeps_money_safe() -> None:
    weak: dict[str, Any] = {
        "acks": "1",
        "enable.idempotence": "false",
        "partitioner": "random",
        "isolation.level": "read_uncommitted",
        "auto.offset.reset": "latest",
        "enable.auto.commit": "true",
        "transactional.id": "mine",
    }
    settings = load_settings(kafka_config=weak)

    produced, read = transactional_config(settings, "task"), reader_config(settings)
    assert (produced["acks"], produced["enable.idempotence"], produced["partitioner"]) == (
        "all",
        True,
        "murmur2_random",
    )
    assert produced["transactional.id"] == "task"
    assert (read["isolation.level"], read["auto.offset.reset"], read["enable.auto.commit"]) == (
        "read_committed",
        "error",
        False,
    )


def test_properties_of_the_same_name_go_to_the_jvm_as_they_are() -> None:
    assert jvm_properties({"security.protocol": "SSL", "client.rack": "r1"}) == {
        "security.protocol": "SSL",
        "client.rack": "r1",
    }


def test_the_jvm_wants_its_security_protocol_in_capitals() -> None:
    assert jvm_properties({"security.protocol": "sasl_ssl"}) == {"security.protocol": "SASL_SSL"}


def test_properties_only_librdkafka_knows_do_not_reach_the_jvm() -> None:
    assert jvm_properties({"socket.nagle.disable": "true", "debug": "all"}) == {}


def test_a_ca_file_is_a_pem_trust_store_to_the_jvm() -> None:
    assert jvm_properties({"ssl.ca.location": "/ca.pem"}) == {
        "ssl.truststore.location": "/ca.pem",
        "ssl.truststore.type": "PEM",
    }


def test_a_key_store_is_a_pkcs12_one_to_the_jvm() -> None:
    assert jvm_properties({"ssl.keystore.location": "/k.p12", "ssl.keystore.password": "s"}) == {
        "ssl.keystore.location": "/k.p12",
        "ssl.keystore.password": "s",
        "ssl.keystore.type": "PKCS12",
    }


def test_a_client_certificate_and_its_key_become_a_pem_key_store(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("CERTIFICATE")
    (tmp_path / "k.pem").write_text("KEY")

    assert jvm_properties(
        {
            "ssl.certificate.location": str(tmp_path / "c.pem"),
            "ssl.key.location": str(tmp_path / "k.pem"),
            "ssl.key.password": "s",
        }
    ) == {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "CERTIFICATE",
        "ssl.keystore.key": "KEY",
        "ssl.key.password": "s",
    }


def test_a_key_file_that_cannot_be_read_is_the_settings_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"BALANCE_KAFKA_CONFIG: ssl.key.location .*k.pem cannot be read"):
        jvm_properties({"ssl.key.location": str(tmp_path / "k.pem")})


def test_no_host_name_check_means_the_same_to_the_jvm() -> None:
    assert jvm_properties({"ssl.endpoint.identification.algorithm": "none"}) == {
        "ssl.endpoint.identification.algorithm": ""
    }
    assert jvm_properties({"ssl.endpoint.identification.algorithm": "https"}) == {
        "ssl.endpoint.identification.algorithm": "https"
    }


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
    assert jvm_properties({name: mechanism, "sasl.username": "me", "sasl.password": "pass"}) == {
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{module} required username="me" password="pass";',
    }


def test_a_password_cannot_break_out_of_its_quotes() -> None:
    config = {"sasl.mechanism": "PLAIN", "sasl.username": "me", "sasl.password": 'a"; \\ evil'}

    assert jvm_properties(config)["sasl.jaas.config"].endswith(' password="a\\"; \\\\ evil";')
