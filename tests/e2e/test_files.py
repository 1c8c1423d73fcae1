"""Files of an instance: limits on open files, permissions, and clean-up after a kill."""

from __future__ import annotations

import stat
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from balance_service.process.open_files import need_of
from tests.support.commands import run
from tests.support.service import application, new_instance, on, running, tasks, warm_up
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

PARTITIONS = 100
EVENTS = 2_000
MIB = 1 << 20
# Starting a hundred Spark queries takes 40 s on an idle machine; the first event of each is slow as well.
_START_SECONDS = _FOLD_SECONDS = 300


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application(BALANCE_PARTITIONS=str(PARTITIONS), BALANCE_SESSION_TIMEOUT_MS="30000")


@contextmanager
def limited(instance: LocalInstance, soft: int, hard: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the service process under file limits."""
    command = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "{sys.executable}" -m balance_service serve'
    environment = {**psutil.Process().environ(), **instance.environment}
    instance.log.parent.mkdir(exist_ok=True)
    with instance.log.open("wb") as log:
        process = subprocess.Popen(["bash", "-c", command], env=environment, stderr=log, stdout=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)


def is_ready(instance: LocalInstance) -> bool:
    try:
        return httpx.get(f"{instance.url}/health/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.shows("floods")
def test_an_instance_ends_and_names_its_need_if_the_hard_limit_is_too_low(
    stack: LocalStack, settings: dict[str, str]
) -> None:
    instance = new_instance(stack, settings)

    with limited(instance, 512, 600) as process:
        code = process.wait(90)

    log = instance.log.read_text()
    assert code == 2, log
    assert f"Error: this instance needs {need_of(PARTITIONS)} open files for the {PARTITIONS} tasks" in log
    assert "`ulimit -Hn` allows 600: raise it" in log


@pytest.mark.shows("floods")
@pytest.mark.timeout(900)
def test_an_instance_raises_a_low_soft_limit_and_folds_a_hundred_partitions(
    stack: LocalStack, settings: dict[str, str]
) -> None:
    instance = new_instance(stack, settings)
    with limited(instance, 512, need_of(PARTITIONS)) as process:
        began = time.monotonic()
        most = 0

        def folds() -> bool:
            nonlocal most
            most = max(most, psutil.Process(process.pid).num_fds())
            return is_ready(instance) and len(tasks(instance, "active", "RUNNING")) == PARTITIONS

        eventually(folds, "the instance is ready and owns all partitions", _START_SECONDS)
        environment = on(stack, settings)
        done = run(environment, "load", "--events", str(EVENTS), "--customers", "500", seconds=120)
        assert done.code == 0, done

        def position() -> int:
            return sum(task["position"] for task in tasks(instance, "active", "RUNNING").values())

        eventually(lambda: position() >= EVENTS, lambda: f"{position()} of {EVENTS} are folded", _FOLD_SECONDS)
        (jvm,) = psutil.Process(process.pid).children()
        counts = psutil.Process(process.pid).num_fds(), jvm.num_fds(), most
        log = instance.log.read_bytes()
        assert max(counts) <= need_of(PARTITIONS), counts
        assert [line for line in log.splitlines() if b"Too many open files" in line] == []
        assert len(log) <= MIB * max(1.0, (time.monotonic() - began) / 60)


@pytest.mark.shows("local-users")
def test_a_restart_after_a_kill_removes_old_files_and_all_files_are_private(
    stack: LocalStack,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        temporary = Path(folder)
        instance = new_instance(stack, application(TMPDIR=folder, XDG_RUNTIME_DIR=""))
        scratch = instance.state_dir / "scratch"
        with running(instance):
            warm_up(instance.url)
            left = {path.name for path in scratch.iterdir()}
            assert any(name.startswith("blockmgr-") for name in left), left
            (sockets,) = temporary.iterdir()
            left_sockets = {path.name for path in sockets.iterdir()}
            instance.kill()
            instance.launch()
            instance.wait_ready()
            warm_up(instance.url)

            assert [path.name for path in scratch.iterdir() if path.name in left] == []
            assert list(temporary.iterdir()) == [sockets]
            assert [path.name for path in sockets.iterdir() if path.name in left_sockets] == []
            open_to_others = [
                path
                for path in (sockets, instance.state_dir, *instance.state_dir.rglob("*"))
                if stat.S_IMODE(path.lstat().st_mode) & 0o077
            ]
            assert open_to_others == []
        assert list(temporary.iterdir()) == []
