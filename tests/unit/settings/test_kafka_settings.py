"""The user's own Kafka properties, as settings: whom they reach, and how a wrong one is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from balance_service.errors import RetriableError
from balance_service.kafka.clients import (
    common_config,
    new_client,
    producer_config,
    reader_config,
    transactional_config,
)
from balance_service.settings import load_settings
from tests.support.fakes import refusal

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("no_environment")


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
    }
    settings = load_settings(kafka_config=weak)

    produced, read = transactional_config(settings, "task"), reader_config(settings)
    assert (produced["acks"], produced["enable.idempotence"], produced["partitioner"]) == (
        "all",
        True,
        "murmur2_random",
    )
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
        (
            {"BALANCE_KAFKA_CONFIG": '{"group.protocol": "consumer"}'},
            "BALANCE_KAFKA_CONFIG: group.protocol is the service's own choice, ",
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


def test_a_client_that_the_machine_has_no_threads_for_is_made_again_later() -> None:
    def short_of_threads(_config: object) -> None:
        raise KafkaException(KafkaError(KafkaError._CRIT_SYS_RESOURCE, "Failed to create thread"))

    with pytest.raises(RetriableError, match="Failed to create thread"):
        new_client(short_of_threads, {})
