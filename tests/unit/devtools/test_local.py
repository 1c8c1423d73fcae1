"""`balance-service local`: instances that end and are started again, and lines while one waits."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.devtools.local.processes import ChildProcess
from balance_service.devtools.local.run import Supervisor, restart, telling
from balance_service.errors import ConfigurationError
from tests.support.scripted_server import Scripted, problem, scripted
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_environment")

READY = Scripted(body=b'{"status": "ready", "problems": []}')


class Instance(ChildProcess):
    """A process that does nothing, in place of an instance."""

    def __init__(self, number: int, folder: Path, url: str = "http://127.0.0.1:1") -> None:
        super().__init__(f"instance-{number}", folder, folder / f"instance-{number}.log")
        self.url = url
        self.launches = 0

    def launch(self) -> None:
        self.launches += 1
        self.run([sys.executable, "-c", "import time; time.sleep(600)"])


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    """A data directory that is locked, as by a running stack."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield tmp_path
    os.close(lock)


def supervised(data_dir: Path, *instances: Any) -> Supervisor:
    return Supervisor(instances, data_dir)


@pytest.fixture
def two(data_dir: Path) -> Iterator[list[Instance]]:
    instances = [Instance(number, data_dir) for number in (1, 2)]
    for instance in instances:
        instance.launch()
    yield instances
    for instance in instances:
        instance.kill()


def test_a_killed_instance_leaves_the_others_running_and_its_restart_is_named(
    data_dir: Path, two: list[Instance], capsys: pytest.CaptureFixture[str]
) -> None:
    with supervised(data_dir, *two) as supervisor:
        supervisor.look()
        assert capsys.readouterr().out == ""

        two[1].kill()
        supervisor.look()
        supervisor.look()

    assert capsys.readouterr().out == (
        f"instance-2 has ended (log: {data_dir}/instance-2.log); the others take its partitions over; start it again: "
        f"`balance-service local restart 2 --data-dir {data_dir}`\n"
    )
    assert two[0].running


def test_restart_starts_a_killed_instance_and_waits_until_it_is_ready(data_dir: Path) -> None:
    with scripted(problem(503, "it starts"), READY) as (url, _):
        instance = Instance(1, data_dir, url)
        with supervised(data_dir, instance) as supervisor:
            stopping = threading.Event()

            def look() -> None:
                while not stopping.wait(0.05):
                    supervisor.look()

            looking = threading.Thread(target=look)
            looking.start()
            try:
                done = CliRunner().invoke(cli, ["local", "restart", "1", "--data-dir", str(data_dir)])
            finally:
                stopping.set()
                looking.join()
                instance.kill()

    assert (done.exit_code, instance.launches) == (0, 1), done.output
    assert f"instance 1 is ready: {url}" in done.output


def test_restart_without_a_stack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="start one by `balance-service local`, or name its --data-dir"):
        restart(tmp_path, 1)


def test_restart_of_an_instance_that_there_is_not_names_those_that_there_are(
    data_dir: Path, two: list[Instance]
) -> None:
    with supervised(data_dir, *two), pytest.raises(ConfigurationError, match="has no instance 3; its instances: 1, 2"):
        restart(data_dir, 3)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((), "Missing argument 'N'"),
        (("x",), "'x' is not a valid integer"),
        (("0",), "0 is not in the range x>=1"),
        (("1", "2"), "Got unexpected extra argument (2)"),
    ],
)
def test_restart_takes_one_number(given: tuple[str, ...], why: str) -> None:
    refused = CliRunner().invoke(cli, ["local", "restart", *given])

    assert refused.exit_code == 2
    assert why in refused.output


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_restart_has_a_help_of_its_own(option: str) -> None:
    told = CliRunner().invoke(cli, ["local", "restart", option], prog_name="balance-service")

    assert told.exit_code == 0
    assert "Usage: balance-service local restart [OPTIONS] N\n" in told.output
    assert "Start instance N of a running `local` again" in told.output
    assert "--data-dir" in told.output
    assert "--kafka-port" not in told.output


def test_the_help_of_local_names_restart() -> None:
    told = CliRunner().invoke(cli, ["local", "--help"], prog_name="balance-service").output

    assert told.startswith("Usage: balance-service local [OPTIONS] [MODEL]...")
    assert re.search(r"Commands:\n  restart  ", told)


def test_options_of_restart_follow_it(data_dir: Path) -> None:
    refused = CliRunner().invoke(cli, ["local", "--data-dir", str(data_dir), "restart", "2"])

    assert refused.exit_code == 2
    assert "write `local restart N --data-dir PATH`" in refused.output


def test_models_are_given_as_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted: list[str] = []
    monkeypatch.setenv("BALANCE_MODELS", "balance")
    monkeypatch.setattr(
        "balance_service.devtools.local.run.run_local", lambda *_, **__: hosted.append(os.environ["BALANCE_MODELS"])
    )

    assert CliRunner().invoke(cli, ["local", "activity", "purchases"]).exit_code == 0
    assert hosted == ["activity,purchases"]


def test_a_line_is_printed_again_and_again_while_something_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""

    def shown() -> bool:
        nonlocal printed
        printed += capsys.readouterr().out
        return printed.count(": instances start\n") > 1

    with telling("instances start", every_seconds=0.02):
        eventually(shown, lambda: printed, 30)
    capsys.readouterr()
    time.sleep(0.1)

    assert capsys.readouterr().out == ""
