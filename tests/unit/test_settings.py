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
    producer_config,
    reader_config,
    transactional_config,
)
from balance_service.kafka.properties import printable
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
        "max_records_per_batch": 500_000,
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
        ("BALANCE_SPARK_DRIVER_MEMORY", "448m", "Spark does not start with less"),
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


@pytest.mark.parametrize("variable", ["BALANCE_SCHEMA_REGISTRY_URL", "BALANCE_TRACING_ENDPOINT"])
@pytest.mark.parametrize("url", ["ftp://me:hunter2@there", "me:hunter2@there:8081", "ftp://me:a/hunter2@there"])
def test_a_url_with_credentials_is_not_told_when_refused(
    monkeypatch: pytest.MonkeyPatch, variable: str, url: str
) -> None:
    message = refusal(monkeypatch, **{variable: url})

    assert "hunter2" not in message
    assert "@there" in message


@pytest.mark.parametrize("password", ["hunter2", "a/hunter2", "a@hunter2"])
def test_a_url_with_credentials_is_printed_without_them(password: str) -> None:
    shown = load_settings(schema_registry_url=f"https://me:{password}@there:8081/v7").printable()

    assert shown["BALANCE_SCHEMA_REGISTRY_URL"] == "https://********@there:8081/v7"


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
    login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "me"}
    secrets = {
        "sasl.password": "hunter2",
        "ssl.key.password": "hunter2",
        "ssl.keystore.password": "hunter2",
        "sasl.oauthbearer.client.secret": "hunter2",
        "sasl.oauthbearer.config": "principal=me secret=hunter2",
        "sasl.oauthbearer.assertion.private.key.passphrase": "hunter2",
        "sasl.jaas.config": "password=hunter2",
    }
    settings = load_settings(
        schema_registry_url="https://me:hunter2@hunter2@registry:8081/path",
        peer_secret="hunter2-hunter2-hunter2",
        kafka_config={**secrets, **login},
    )
    other = load_settings(schema_registry_token="hunter2")

    printed = settings.printable()

    assert "hunter2" not in str(printed) + str(other.printable())
    assert "hunter2" not in repr(settings) + repr(other)
    assert json.loads(printed["BALANCE_KAFKA_CONFIG"])["sasl.username"] == "me"
    assert set(json.loads(printed["BALANCE_KAFKA_CONFIG"])) == {*secrets, *login}
    assert printed["BALANCE_SCHEMA_REGISTRY_URL"].endswith("@registry:8081/path")


def test_where_a_key_lies_is_no_secret(tmp_path: Path) -> None:
    config = {"ssl.key.location": "/k", "ssl.keystore.location": "/s", "ssl.key.pem": "hunter2"}

    assert json.loads(printable(config)) == {**config, "ssl.key.pem": "********"}


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


def test_properties_come_from_the_setting_and_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "kafka.properties"
    file.write_text("security.protocol=SSL\n")
    monkeypatch.setenv("BALANCE_KAFKA_CONFIG_FILE", str(file))
    monkeypatch.setenv("BALANCE_KAFKA_CONFIG", '{"client.rack": "r1"}')

    settings = load_settings()

    assert settings.kafka_properties == {"security.protocol": "SSL", "client.rack": "r1"}
    assert common_config(settings)["security.protocol"] == "SSL"
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
        ({"BALANCE_KAFKA_CONFIG_FILE": "{dir}/bare"}, "BALANCE_KAFKA_CONFIG_FILE: sasl.mechanism is none of PLAIN, "),
        (
            {"BALANCE_KAFKA_CONFIG": '{"security.protocol": "TLS"}'},
            "BALANCE_KAFKA_CONFIG: security.protocol is none of",
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
def test_a_wrong_security_setting_is_named_in_one_sentence_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], sentence: str
) -> None:
    (tmp_path / "good").write_text("security.protocol=SASL_SSL\nsasl.password=hunter2\n")
    (tmp_path / "odd").write_text("security.protocol=SASL_SSL\nhunter2\n")
    (tmp_path / "bare").write_text("security.protocol=SASL_SSL\nsasl.password=hunter2\n")

    message = refusal(monkeypatch, **{name: v.replace("{dir}", str(tmp_path)) for name, v in environment.items()})

    assert message.startswith(sentence.replace("{dir}", str(tmp_path)))
    assert "hunter2" not in message
    assert "\n" not in message
