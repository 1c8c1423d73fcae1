"""Disk faults under a store: no wrong answers, and recovery without intervention."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.database import Database
from balance_service.engine.decisions import Decision, Verdict
from balance_service.engine.task import TaskState
from balance_service.errors import StoreCorruptedError, StoreFullError
from balance_service.kafka.topics import Topics
from tests.integration.engines import (
    balance,
    catch_up,
    counted,
    hosted,
    prepare,
    running_engine,
    settings_for,
    tasks_of,
)
from tests.support.kafka import Writer
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.store import StoreView
    from balance_service.engine.task import Task
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

CUSTOMERS = [f"c{n}" for n in range(300)]
_MIB = 1 << 20


def flip_bytes_in_tables(store: Path) -> None:
    tables = list(store.glob("*.sst"))
    assert tables
    for table in tables:
        damaged = bytearray(table.read_bytes())
        # The first blocks hold the states.
        for at in range(16, min(len(damaged) // 2, 4_000), 64):
            damaged[at] ^= 0xFF
        table.write_bytes(damaged)


def cut_write_ahead_log(store: Path) -> None:
    for log in store.glob("*.log"):
        assert log.stat().st_size
        os.truncate(log, log.stat().st_size // 2)


def lose_manifest(store: Path) -> None:
    for manifest in store.glob("MANIFEST-*"):
        manifest.unlink()


def delete(store: Path) -> None:
    shutil.rmtree(store)


def write_all(stack: LocalStack, settings: Settings, amount: str) -> None:
    prepare(Topics(settings), settings)
    with Writer(stack, settings.topic) as writer:
        for customer in CUSTOMERS:
            writer.send(customer, writer.frame(customer, amount))


@pytest.mark.shows("damaged-store")
@pytest.mark.parametrize("damage", [flip_bytes_in_tables, lose_manifest, delete])
def test_a_store_damaged_between_runs_is_restored_and_never_answers(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    write_all(stack, settings, "0.10")
    # RocksDB moves the data of one run into tables in the next run.
    for _ in range(2):
        with running_engine(settings) as engine:
            catch_up(engine)
    damage(settings.state_dir / "balance_0")

    with running_engine(settings) as engine, recorded_answers(engine) as answered:
        write_all(stack, settings, "0.20")
        catch_up(engine)
        wrong = {c: b for c in CUSTOMERS if (b := balance(engine, c)) != Decimal("0.30")}
        assert wrong == {}
        eventually(lambda: counted(engine, "applied") == len(CUSTOMERS), "the events are counted")
        (task,) = tasks_of(engine).snapshots()
        assert task.restored >= len(CUSTOMERS)
    assert answered
    assert answered <= {Decimal("0.10"), Decimal("0.30")}


@pytest.mark.shows("damaged-store")
def test_a_truncated_log_is_completed_by_a_restore(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    store, killed = settings.state_dir / "balance_0", tmp_path / "killed"
    write_all(stack, settings, "0.10")
    with running_engine(settings) as engine:
        catch_up(engine)
        # A closed store has everything in tables, so the copy is made while it is open.
        shutil.copytree(store, killed)
    delete(store)
    killed.rename(store)
    cut_write_ahead_log(store)

    with running_engine(settings) as engine, recorded_answers(engine) as answered:
        catch_up(engine)
        (task,) = tasks_of(engine).snapshots()
        assert task.restored > 0
        assert counted(engine, "applied") == 0
        assert {balance(engine, customer) for customer in CUSTOMERS} == {Decimal("0.10")}
    assert answered == {Decimal("0.10")}


@contextmanager
def recorded_answers(engine: Engine) -> Iterator[set[Decimal | None]]:
    """Records all answers about customers with a balance; None stands for "unknown"."""
    answered: set[Decimal | None] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            for customer in CUSTOMERS:
                task = tasks_of(engine).task(0)
                view = None if task is None else task.view
                if view is not None:
                    # Detected damage is no answer.
                    with suppress(StoreCorruptedError):
                        frame = view.get(customer.encode())
                        answered.add(None if frame is None else hosted(engine).state(frame)["amount"])
                del view

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield answered
        finally:
            is_over.set()
            looking.result()


def test_a_store_found_damaged_by_two_queries_is_restored(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    write_all(stack, settings, "0.10")
    with running_engine(settings) as engine:
        catch_up(engine)
    with running_engine(settings) as engine:
        catch_up(engine)
        task = tasks_of(engine).task(0)
        assert task is not None
        views = [task.view, task.view]
        wait_until_compacted(task)
        flip_bytes_in_tables(settings.state_dir / "balance_0")
        while views:
            report_damage(engine, task, views.pop())
            # Long enough that the task is closing, short enough that no other has replaced it.
            time.sleep(0.1)

        catch_up(engine)
        assert tasks_of(engine).task(0) is not task
        assert all(balance(engine, c) == Decimal("0.10") for c in CUSTOMERS)


def wait_until_compacted(task: Task) -> None:
    """Waits until RocksDB has finished its compactions after opening, so that its tables no longer change."""
    store = task.replica.store
    assert store is not None
    database = store._db
    assert isinstance(database, Database)
    doing = ("compaction-pending", "num-running-compactions", "mem-table-flush-pending", "num-running-flushes")
    eventually(
        lambda: not any(database._db.property_int_value(f"rocksdb.{what}") for what in doing),
        "all compactions have finished",
    )


def report_damage(engine: Engine, task: Task, view: StoreView | None) -> None:
    assert view is not None
    try:
        for customer in CUSTOMERS:
            view.get(customer.encode())
    except StoreCorruptedError as error:
        tasks_of(engine).failed(task, error)
    else:
        pytest.fail("no damage was found")


@pytest.mark.shows("damaged-store")
def test_a_store_deleted_under_a_running_task_is_restored(
    stack: LocalStack, names: dict[str, str], tmp_path: Path
) -> None:
    settings = settings_for(stack, names, tmp_path / "state", partitions=1)
    write_all(stack, settings, "0.10")
    with running_engine(settings) as engine:
        catch_up(engine)
        before = tasks_of(engine).task(0)
        shutil.rmtree(settings.state_dir / "balance_0")
        write_all(stack, settings, "0.20")
        catch_up(engine)

        assert all(balance(engine, c) == Decimal("0.30") for c in CUSTOMERS)
        assert tasks_of(engine).task(0) is not before


@pytest.mark.shows("full-disk")
def test_folding_stops_on_a_full_disk_until_there_is_room_while_answers_continue(
    stack: LocalStack, names: dict[str, str], small_disk: Path
) -> None:
    settings = settings_for(stack, names, small_disk / "state", partitions=1)
    write_all(stack, settings, "0.10")
    with running_engine(settings) as engine:
        catch_up(engine)
        filling = small_disk / "filling"
        filling.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4 * _MIB))
        write_all(stack, settings, "0.20")
        task = tasks_of(engine).task(0)
        assert task is not None
        eventually(lambda: task.state is TaskState.WAITING, "the task waits for disk space")
        assert "make room" in task.snapshot().reason
        assert all(balance(engine, c) == Decimal("0.10") for c in CUSTOMERS)

        filling.unlink()
        catch_up(engine)
        assert all(balance(engine, c) == Decimal("0.30") for c in CUSTOMERS)
        eventually(lambda: counted(engine, "applied") == 2 * len(CUSTOMERS), "the events are counted")


def test_a_decision_is_refused_on_a_full_disk_and_accepted_once_there_is_room(
    stack: LocalStack, names: dict[str, str], small_disk: Path
) -> None:
    settings = settings_for(stack, names, small_disk / "state", partitions=1)
    discard = Verdict(Decision.DISCARD, "me", "a test")
    prepare(Topics(settings), settings)
    with Writer(stack, settings.topic) as writer, running_engine(settings) as engine:
        writer.send("c1", b"no frame")
        catch_up(engine)
        filling = small_disk / "filling"
        filling.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4 * _MIB))
        with pytest.raises(StoreFullError, match="make room"):
            tasks_of(engine).decide(0, [0], discard)
        filling.unlink()

        assert tasks_of(engine).decide(0, [0], discard) == {}
        assert tasks_of(engine).decide(0, [0], discard) == {0: "it is discarded already"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with _mounted(tmp_path / "disk", 160) as disk:
        yield disk


@contextmanager
def _mounted(path: Path, mib: int) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        if os.environ.get("CI"):
            pytest.fail("a small disk cannot be mounted, so a full disk cannot be tested")
        pytest.skip("only root can mount a small disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
