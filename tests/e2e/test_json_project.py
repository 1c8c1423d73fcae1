"""A project that `init --format json` writes, without a registry: tested, tried, served by two instances, killed."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import fastavro
import httpx
import psutil
import pytest

from balance_service.devtools.local.stack import LocalStack
from tests.e2e.projects import Project
from tests.support.commands import Command, run, started
from tests.support.kafka import read_topic
from tests.support.service import application, new_instance, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.timeout(900)
_READY_SECONDS = 240.0
_SERVICE = ("-m", "balance_service")
_PRODUCE = ("produce", "orders", "--key-separator", "|")
_TEXT = b"\xffschema/"
# Of the ten sample events; the negative amount is a dead letter.
SAMPLES = {
    "ada": {"orders": 3, "total": "166.00", "largest": "129.00"},
    "bob": {"orders": 3, "total": "53.70", "largest": "42.50"},
    "carol": {"orders": 2, "total": "115.70", "largest": "99.95"},
    "dave": {"orders": 1, "total": "310.00", "largest": "310.00"},
}


@pytest.fixture
def project(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The project that `init` writes into an empty folder, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BALANCE_SCHEMA_REGISTRY_URL", raising=False)
    paths = os.pathsep.join(map(str, (installed, tmp_path / "shop")))
    environment = {"PYTHONPATH": paths, "BALANCE_MODELS": "shop.orders:Orders"}
    done = run(environment, "init", "--format", "json", "shop")
    assert done.code == 0, done
    monkeypatch.chdir(tmp_path / "shop")
    return Project(tmp_path / "shop", environment)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A broker, and no registry."""
    with LocalStack(tmp_path_factory.mktemp("broker"), registry_port=None) as running:
        yield running


def test_the_project_is_tested_tried_and_served_without_a_registry(project: Project, tmp_path: Path) -> None:
    tested = project.run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    tried = project.run(*_SERVICE, "try", "shop.orders:Orders", "--events", "samples/orders.jsonl")
    assert tried.returncode == 0, tried.stderr
    assert "166.00" in tried.stdout

    ports = ["--kafka-port", "0", "--http-port", "0", "--data-dir", str(tmp_path / "data")]
    with started({**project.environment, "BALANCE_PARTITIONS": "2"}, "local", "--instances", "2", *ports) as local:
        eventually(lambda: ended(local) or "ready; Ctrl-C" in local.stdout, lambda: local.stdout, _READY_SECONDS)
        assert not ended(local), local.wait(1)
        assert "registry" not in local.stdout.lower()
        assert not [one for one in children(local) if "apicurio" in " ".join(one.cmdline()).lower()]
        (exported,) = re.findall(r"export (.*)", local.stdout)
        addresses = dict(one.split("=", 1) for one in exported.split())
        urls = re.findall(r"instance-\d +(\S+) +log: ", local.stdout)
        assert len(urls) == 2

        lines = (project.folder / "samples/orders.jsonl").read_bytes()
        sent = run({**project.environment, **addresses}, *_PRODUCE, stdin=lines)
        assert sent.code == 0, sent
        for url in urls:
            eventually(lambda: answers(url) == SAMPLES, lambda: f"{url}: {answers(url)}")  # noqa: B023

        kill(local, urls[0])
        eventually(lambda: "has ended" in local.stdout, lambda: local.stdout)
        eventually(lambda: answers(urls[1]) == SAMPLES, lambda: str(answers(urls[1])), _READY_SECONDS)
        more = run({**project.environment, **addresses}, *_PRODUCE, stdin=lines)
        assert more.code == 0, more
        eventually(lambda: answers(urls[1]).get("ada", {}).get("orders") == 6, lambda: str(answers(urls[1])))
        local.interrupt()
        done = local.wait(60)
    assert done.code == 0, done


@pytest.mark.shows("exactly-once")
def test_a_kill_before_the_first_commit_leaves_one_text_of_each_schema(project: Project, broker: LocalStack) -> None:
    settings = {**application(BALANCE_PARTITIONS="2"), **project.environment}
    instance = new_instance(broker, settings)
    # Each of these kills while the text of a schema is in an open transaction, or is only in the changelog.
    for failpoint in ("generations-changed=kill", "produced=kill", "committed=kill"):
        instance.environment["BALANCE_FAILPOINTS"] = failpoint
        instance.launch()
        eventually(lambda: not instance.running, f"killed at {failpoint}", _READY_SECONDS)
        assert "a fail point strikes" in instance.log.read_text()
    del instance.environment["BALANCE_FAILPOINTS"]
    lines = (project.folder / "samples/orders.jsonl").read_bytes()
    with running(instance):
        sent = run({**settings, **broker.addresses}, *_PRODUCE, stdin=lines)
        assert sent.code == 0, sent
        eventually(lambda: answers(instance.url) == SAMPLES, lambda: str(answers(instance.url)))

        name = settings["BALANCE_APPLICATION_ID"]
        changelog = read_topic(broker, f"{name}-orders-changelog")
        for partition in range(2):
            keys = [one.key() for one in changelog if one.partition() == partition]
            texts = Counter(key for key in keys if key.startswith(_TEXT))
            assert len(texts) >= 4, keys
            assert set(texts.values()) == {1}, keys
            assert all(key.startswith(_TEXT) for key in keys[: len(texts)]), "the texts are first"
        assert states_of(changelog) == {
            customer: {"customerId": customer, "orders": one["orders"], **amounts(one)}
            for customer, one in SAMPLES.items()
        }
        for topic in ("generations", "application-servers"):
            of_topic = read_topic(broker, f"{name}-{topic}")
            assert any(one.key().startswith(_TEXT) for one in of_topic), topic
            assert all(one.key().startswith(_TEXT) or one.value()[:2] == b"\xc3\x01" for one in of_topic if one.value())

    refused = run({**settings, **broker.addresses, "BALANCE_MODELS": "balance"}, "serve", seconds=_READY_SECONDS)
    assert refused.code == 2, refused
    assert "'balance' has Avro on topic" in refused.stderr
    assert "BALANCE_SCHEMA_REGISTRY_URL is not set" in refused.stderr


def amounts(one: Mapping[str, Any]) -> dict[str, Decimal]:
    return {name: Decimal(one[name]) for name in ("total", "largest")}


def states_of(changelog: list[Any]) -> dict[str, dict[str, Any]]:
    """Returns the states in a changelog, as any reader of Avro's single-object encoding sees them."""
    found: dict[str, dict[str, Any]] = {}
    texts: dict[tuple[int, bytes], Any] = {}
    for one in changelog:
        if one.key().startswith(_TEXT):
            number = int(one.key()[len(_TEXT) :], 16).to_bytes(8, "little")
            texts[one.partition(), number] = fastavro.parse_schema(json.loads(one.value()))
        elif not one.key().startswith(b"\xff"):
            assert one.value()[:2] == b"\xc3\x01"
            schema = texts[one.partition(), one.value()[2:10]]
            record: Any = fastavro.schemaless_reader(io.BytesIO(one.value()[10:]), schema, None)
            found[one.key().decode()] = record
    return found


def answers(url: str) -> dict[str, Any]:
    """Returns what an instance answers for each customer, with the digits of numbers; empty if it does not."""
    found = {}
    for customer in SAMPLES:
        try:
            answer = httpx.get(f"{url}/api/orders.get", params={"customerId": customer}, timeout=30, trust_env=False)
        except httpx.HTTPError:
            return {}
        if not answer.is_success:
            return {}
        found[customer] = json.loads(answer.text, parse_float=str)
    return found


def ended(command: Command) -> bool:
    return command.process.poll() is not None


def children(command: Command) -> list[psutil.Process]:
    return psutil.Process(command.process.pid).children(recursive=True)


def kill(command: Command, url: str) -> None:
    """Kills the instance that answers at a URL."""
    port = url.rpartition(":")[2]
    for process in children(command):
        if (
            process.cmdline()[1:] == ["-m", "balance_service", "serve"]
            and process.environ()["BALANCE_HTTP_PORT"] == port
        ):
            process.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no instance answers at {url}")
