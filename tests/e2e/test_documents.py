"""The quickstart, the tutorials and the README, run as written, each with a broker and an instance of its own."""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from balance_service.cli.init import write_project
from balance_service.cli.main import cli
from tests.support.commands import started
from tests.support.documents import ROOT, Shell, blocks, files_of
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_READY_SECONDS = 240.0
_STOP_SECONDS = 60.0
_SAMPLES = "make run"
_INSTALLS = "python3 -m venv"
_HOSTS = "balance-service local"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project of the quickstart, with the README's model, as the working directory."""
    write_project(tmp_path / "shop")
    monkeypatch.chdir(tmp_path / "shop")
    for file, text in files_of("README.md").items():
        (tmp_path / "shop" / file).write_text(text, encoding="utf-8")
    return tmp_path / "shop"


def scripts(path: str) -> list[str]:
    """The shell blocks of a document, except those that install and those that start servers."""
    found = [block.text for block in blocks(path) if block.language == "sh"]
    left_out = (_INSTALLS, _SAMPLES, _HOSTS, "pytest\n", "balance-service serve")
    return [text for text in found if not any(part in text for part in left_out)]


def words(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if "──" not in line]


@contextmanager
def local(folder: Path, models: str, *options: str) -> Iterator[Shell]:
    """`balance-service local` on free ports, and a shell that has its addresses in place of the documents'."""
    ports = ["--kafka-port", "0", "--registry-port", "0", "--http-port", "0"]
    with started({"BALANCE_MODELS": models}, "local", *options, *ports) as command:
        eventually(
            lambda: command.process.poll() is not None or "ready; Ctrl-C" in command.stdout,
            lambda: command.stdout,
            _READY_SECONDS,
        )
        printed = command.stdout
        (kafka,) = re.findall(r"Kafka +(\S+:\d+)", printed)
        instances = re.findall(r"instance-\d+ +http://(\S+)", printed)
        addresses = {f"127.0.0.1:{5051 + number}": address for number, address in enumerate(instances)}
        # There is none without an Avro topic.
        for registry in re.findall(r"schema registry +http://([^/]+)/", printed):
            addresses["127.0.0.1:8081"] = registry
        environment = {"BALANCE_BOOTSTRAP_SERVERS": kafka, "BALANCE_APPLICATION_SERVER": instances[0]}
        yield Shell(folder, addresses, environment)
        command.interrupt()
        assert command.wait(_STOP_SECONDS).code == 0


def test_the_quickstart_and_the_first_query_of_the_readme(project: Path) -> None:
    first = next(script for script in scripts("README.md") if "models/spent" in script)
    tries, sends = scripts("docs/quickstart.md")
    assert "balance-service init" in tries

    with local(project, "shop.orders:Orders,shop.spending:Spent", "--instances", "1") as shell:
        shell.run(sends.replace("MODELS=shop.orders:Orders", "MODELS=shop.orders:Orders,shop.spending:Spent"))
        shell.run(first)


def test_the_tutorial_on_joins(project: Path) -> None:
    for file, text in files_of("docs/tutorials/joins.md").items():
        (project / file).write_text(text, encoding="utf-8")

    with local(project, "shop.cities:Cities", "--instances", "1") as shell:
        for script in scripts("docs/tutorials/joins.md"):
            shell.run(script)


def test_the_tutorial_on_a_json_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/tutorials/json.md"
    write_project(tmp_path / "shop", "json")
    monkeypatch.chdir(tmp_path / "shop")
    for file, text in files_of(page).items():
        (tmp_path / "shop" / file).write_text(text, encoding="utf-8")
    inits, tries, sends, again = scripts(page)
    assert "balance-service init --format json" in inits
    (shown,) = [block.text for block in blocks(page) if block.text.startswith("payments: ")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        printed = CliRunner().invoke(cli, shlex.split(tries)[1:]).output
    assert words(printed) == words(shown)

    with local(tmp_path / "shop", "shop.payments:Payments", "--instances", "1") as shell:
        shell.run(sends)
        shell.run(again)


def test_the_tutorial_on_dead_letters(project: Path) -> None:
    sends, looks, decides = scripts("docs/tutorials/dead-letters.md")
    (host,) = [block.text for block in blocks("docs/tutorials/dead-letters.md") if _HOSTS in block.text]
    (models,) = re.findall(r"BALANCE_MODELS=(\S+)", host)
    (condition,) = [block.text for block in blocks("docs/tutorials/dead-letters.md") if block.language == "python"]
    model = project / "shop" / "orders.py"
    before = model.read_text(encoding="utf-8")
    after = re.sub(r"^ +if event\.amount .*\n", condition, before, flags=re.MULTILINE)
    assert after != before

    with local(project, models, "--instances", "1") as shell:
        shell.run(sends + looks)
    model.write_text(after, encoding="utf-8")
    with local(project, models, "--instances", "1") as shell:
        shell.run(re.findall(r"^export .*\n", sends)[0] + decides)


def test_the_readme_runs_two_instances_with_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "balance-service local --instances 2 --sample-events" in makefile
    (models,) = re.findall(r"^DEFAULT_MODELS := (\S+)$", makefile, re.MULTILINE)
    monkeypatch.chdir(tmp_path)

    (script,) = [script for script in scripts("README.md") if "addFunds" in script]
    with local(tmp_path, models, "--instances", "2", "--sample-events") as shell:
        shell.run(script)
