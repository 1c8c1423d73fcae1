"""Invalid settings: exit code 2 and one error line. An instance waits for servers that are down."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from balance_service.devtools.local.processes import HOST, free_port
from tests.support.commands import assert_refused, run
from tests.support.kafka import create_topic
from tests.support.service import STOP_SECONDS, application, new_instance, on, terminate
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

_REFUSED = 2
_KEEP_ALL = {"retention.ms": "-1"}
_SECRET = "open-sesame"


@pytest.fixture
def settings(stack: LocalStack, tmp_path: Path) -> dict[str, str]:
    """Valid settings; each test spoils one of them."""
    port = free_port()
    return on(stack, application()) | {
        "BALANCE_HTTP_PORT": str(port),
        "BALANCE_APPLICATION_SERVER": f"{HOST}:{port}",
        "BALANCE_STATE_DIR": str(tmp_path / "state"),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BALANCE_KAFKA_CONFIG", '{"security.protocol": '),
        ("BALANCE_KAFKA_CONFIG", '["security.protocol"]'),
        ("BALANCE_PARTITIONS", "0"),
        ("BALANCE_PARTITIONS", "two"),
        ("BALANCE_APPLICATION_SERVER", "0.0.0.0:5051"),
        ("BALANCE_APPLICATION_SERVER", "[::]:5051"),
        ("BALANCE_HTTP_HOST", "0.0.0.0"),
        ("BALANCE_APPLICATION_SERVER", "no-such-host.invalid:5051"),
        ("BALANCE_SCHEMA_REGISTRY_URL", "localhost:8081"),
    ],
)
def test_an_invalid_setting_is_named(settings: dict[str, str], name: str, value: str) -> None:
    done = run(settings | {name: value}, "serve")

    assert_refused(done, _REFUSED, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no.such.property", "1"),
        # Only consumers refuse these, in relation to other properties.
        ("fetch.max.bytes", "2"),
        ("max.poll.interval.ms", "5"),
    ],
)
def test_an_invalid_kafka_property_is_named_with_its_setting(settings: dict[str, str], name: str, value: str) -> None:
    done = run(settings | {"BALANCE_KAFKA_CONFIG": json.dumps({name: value})}, "serve")

    assert_refused(done, _REFUSED, "BALANCE_KAFKA_CONFIG", name)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("BALANCE_TLS_CERTIFICATE", {"BALANCE_TLS_KEY": "{}"}),
        ("BALANCE_TOKENS_FILE", {"BALANCE_PEER_SECRET": _SECRET * 4}),
        (
            "BALANCE_JWKS_FILE",
            {"BALANCE_JWT_ISSUER": "i", "BALANCE_JWT_AUDIENCE": "a", "BALANCE_PEER_SECRET": _SECRET * 4},
        ),
        ("BALANCE_SCHEMA_REGISTRY_CA_FILE", {"BALANCE_SCHEMA_REGISTRY_URL": "https://localhost:8081"}),
        ("BALANCE_KAFKA_CONFIG_FILE", {}),
    ],
)
def test_an_invalid_security_file_is_named_with_its_setting(
    settings: dict[str, str], tmp_path: Path, name: str, others: dict[str, str]
) -> None:
    path = tmp_path / "letter.txt"
    path.write_text(_SECRET)
    others = {other: value.format(path) for other, value in others.items()}

    done = run(settings | others | {name: str(path)}, "serve")

    assert_refused(done, _REFUSED, name, str(path))
    assert _SECRET not in done.stderr


_MODEL = """
from dataclasses import dataclass
from balance_service import Count, ReadModel, Stream

@dataclass
class Placed:
    customerId: str
    items: set[str]

class Orders(ReadModel):
    name = "{name}"
    source = Stream("{topic}", "{record}")
    key = "customerId"
    state = {state}

    additions = Count("{record}")
"""
_VALID = {"name": "orders", "topic": "balance", "record": "FundsAdded", "state": '"Activity"'}


@pytest.mark.parametrize(
    ("models", "changed", "said"),
    [
        ("shop.order", {}, ["'shop.order' is not found: there is no order in", "which has orders"]),
        ("shop.orders:Order", {}, ["shop/orders.py has no class Order; it defines Orders"]),
        ("shop.orders:Placed", {}, ["Placed in ", "shop/orders.py is not a subclass of ReadModel"]),
        ("shop.orders", {"record": "X}"}, ["cannot be imported: ", "shop/orders.py:12"]),
        (
            "shop.orders",
            {"name": "Orders"},
            ["Orders (", "shop/orders.py:10) has the name 'Orders': a name consists"],
        ),
        (
            "balance,shop.orders",
            {"name": "balance"},
            ["shop/orders.py:10) both have the name 'balance' and the version 1; rename one"],
        ),
        ("shop.orders", {"state": "Placed"}, ["the dataclass Placed (", "shop/orders.py:5)", "'items'"]),
        (
            "shop.orders",
            {"topic": "orders", "record": "OrderPlaced"},
            [
                "shop/orders.py:10) names the schema OrderPlaced: there is no OrderPlaced.avsc in ",
                "register the schema",
            ],
        ),
    ],
    ids=["module", "class", "no model", "import", "name", "two of a name", "state", "schema"],
)
def test_an_invalid_model_is_refused_with_its_place_and_a_remedy(
    settings: dict[str, str], tmp_path: Path, models: str, changed: dict[str, str], said: list[str]
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    text = _MODEL.format(**_VALID | changed)
    (tmp_path / "shop" / "orders.py").write_text(text.replace('Stream("balance", "X}")', "Stream(balance)"))

    done = run(settings | {"BALANCE_MODELS": models, "PYTHONPATH": str(tmp_path)}, "serve")

    assert_refused(done, _REFUSED, *said)


def test_a_state_directory_below_a_file_is_refused(settings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")

    done = run(settings | {"BALANCE_STATE_DIR": str(tmp_path / "file" / "state")}, "serve")

    assert_refused(done, _REFUSED, "BALANCE_STATE_DIR", str(tmp_path / "file" / "state"))


def test_a_directory_with_foreign_files_is_refused_and_left_unchanged(settings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear diary")

    done = run(settings | {"BALANCE_STATE_DIR": str(tmp_path)}, "serve")

    assert_refused(done, _REFUSED, "BALANCE_STATE_DIR", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


def test_a_state_directory_of_another_application_is_refused(settings: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "state-directory.json").write_text('{"format": 1, "application_id": "another"}')

    done = run(settings, "serve")

    assert_refused(done, _REFUSED, "BALANCE_STATE_DIR", "another")


def test_a_port_in_use_is_refused(settings: dict[str, str]) -> None:
    with socket.create_server((HOST, int(settings["BALANCE_HTTP_PORT"]))):
        done = run(settings, "serve")

    assert_refused(done, _REFUSED, "BALANCE_HTTP_PORT", settings["BALANCE_HTTP_PORT"])


def test_a_missing_topic_is_refused_if_creation_is_disabled(settings: dict[str, str]) -> None:
    done = run(settings | {"BALANCE_CREATE_TOPICS": "false"}, "serve")

    assert_refused(done, _REFUSED, settings["BALANCE_TOPIC"], "BALANCE_CREATE_TOPICS")


@pytest.mark.parametrize(
    "config",
    [{**_KEEP_ALL, "cleanup.policy": "compact"}, {"retention.ms": "1000000"}, {**_KEEP_ALL, "retention.bytes": "9999"}],
)
def test_a_source_with_finite_retention_is_refused(
    stack: LocalStack, settings: dict[str, str], config: dict[str, str]
) -> None:
    create_topic(stack, settings["BALANCE_TOPIC"], config)

    done = run(settings, "serve")

    assert_refused(done, _REFUSED, settings["BALANCE_TOPIC"], "BALANCE_ALLOW_FINITE_RETENTION")


def test_a_changelog_that_is_not_compacted_is_refused(stack: LocalStack, settings: dict[str, str]) -> None:
    changelog = f"{settings['BALANCE_APPLICATION_ID']}-balance-changelog"
    create_topic(stack, changelog, {"cleanup.policy": "delete"})

    done = run(settings, "serve")

    assert_refused(done, _REFUSED, changelog, "cleanup.policy")


@pytest.mark.parametrize(
    ("model", "stage", "other"), [("rewards", "customerCardNo", "pos"), ("leaderboard", "player_id", "players")]
)
def test_a_topic_between_two_stages_with_another_partition_count_is_refused(
    stack: LocalStack, settings: dict[str, str], model: str, stage: str, other: str
) -> None:
    rekeyed = f"{settings['BALANCE_APPLICATION_ID']}-{model}-by-{stage}"
    create_topic(stack, rekeyed, _KEEP_ALL, partitions=7)

    done = run(settings | {"BALANCE_MODELS": model}, "serve")

    assert_refused(done, _REFUSED, rekeyed, other, "7 partitions", "BALANCE_APPLICATION_ID")


def test_more_replicas_than_brokers_are_refused(settings: dict[str, str]) -> None:
    done = run(settings | {"BALANCE_REPLICATION_FACTOR": "3"}, "serve")

    assert_refused(done, _REFUSED, "BALANCE_REPLICATION_FACTOR", settings["BALANCE_TOPIC"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("BALANCE_BOOTSTRAP_SERVERS", "{}:{}"), ("BALANCE_SCHEMA_REGISTRY_URL", "http://{}:{}")],
)
def test_an_instance_waits_for_a_server_that_is_down_and_stops_on_sigterm(
    stack: LocalStack, name: str, value: str
) -> None:
    nowhere = value.format(HOST, free_port())
    instance = new_instance(stack, application(**{name: nowhere}))
    instance.launch()
    try:
        eventually(lambda: '"event": "waiting"' in instance.log.read_text(), "the instance reports that it waits")
        time.sleep(1.0)
        live, ready = (httpx.get(f"{instance.url}/health/{what}") for what in ("live", "ready"))
        assert (live.status_code, ready.status_code) == (200, 503)
        assert "starting" in ready.json()["detail"]

        code, seconds = terminate(instance)

        assert code == 0, instance.log.read_text()
        assert seconds < STOP_SECONDS
    finally:
        instance.stop()
    said = instance.log.read_text()
    assert "Traceback" not in said
    assert nowhere in said


@pytest.mark.parametrize(
    ("name", "value"),
    [("BALANCE_BOOTSTRAP_SERVERS", "{}:{}"), ("BALANCE_SCHEMA_REGISTRY_URL", "http://{}:{}")],
)
def test_a_command_that_reaches_no_server_fails_with_one_error_line(
    settings: dict[str, str], name: str, value: str
) -> None:
    nowhere = value.format(HOST, free_port())

    done = run(settings | {name: nowhere}, "add-funds", "c1", "1")

    assert_refused(done, 1)
    said = [line for line in done.stderr.splitlines() if not line.startswith("waiting for ")]
    assert said == done.errors, "only error lines"
    assert done.seconds < 30


def test_printed_settings_hide_every_secret(settings: dict[str, str]) -> None:
    settings |= {
        "BALANCE_SCHEMA_REGISTRY_USER": "ali-baba",
        "BALANCE_SCHEMA_REGISTRY_PASSWORD": _SECRET,
        "BALANCE_PEER_SECRET": f"{_SECRET}-{_SECRET}",
        "BALANCE_TOKEN": _SECRET,
        "BALANCE_TLS_CERTIFICATE": "instance.pem",
        "BALANCE_TLS_KEY": "instance.key",
        "BALANCE_TLS_KEY_PASSWORD": _SECRET,
        "BALANCE_KAFKA_CONFIG": json.dumps(
            {
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "ali-baba",
                "sasl.password": _SECRET,
            }
        ),
    }

    done = run(settings, "serve", "--print-config")

    assert done.code == 0, done
    assert _SECRET not in done.stdout + done.stderr
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert shown["BALANCE_TOPIC"] == settings["BALANCE_TOPIC"]
    assert shown["BALANCE_STATE_DIR"] == settings["BALANCE_STATE_DIR"]
    assert "ali-baba" in shown["BALANCE_KAFKA_CONFIG"]
