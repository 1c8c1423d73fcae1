"""The files of a generation are deleted once it has all of them, or is dropped, and not before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.bulk.folder import Folder
from balance_service.cluster.directory import ServerTable
from balance_service.errors import InvalidInputError, RetriableError
from balance_service.hosting.loaded_files import LoadedFiles
from balance_service.hosting.rebuild_checks import RebuildChecks
from balance_service.model.generations import Generations, Load, Switch
from balance_service.settings import load_settings
from tests.support.fakes import DECLARED, Clock
from tests.support.loads import write_folder
from tests.unit.hosting.rebuilding import BUILT, FIRST, Engine, Here, Standing, publish, running

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from balance_service.engine.records import TaskSnapshot

SETTINGS = load_settings()
PARTS = running(2)
STAGE = replace(FIRST.of_generation(2), application_id=SETTINGS.application_id)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_folder(tmp_path, STAGE, SETTINGS, DECLARED, "id", 1, [(5, []), (5, [])])
    return tmp_path


def loaded_from(files: Path, *, keeps: bool = False) -> Generations:
    load = Load(2, str(files), "a digest", keeps)
    return Generations("rewards").begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, None, "", "", load)


def deleting(now: Generations, tasks: Sequence[TaskSnapshot]) -> tuple[LoadedFiles, Engine, RebuildChecks]:
    table = ServerTable(Clock())
    publish(table, tasks)
    engine = Engine(now, Here(1, Standing(1, sends=True)))
    engine.settings = cast("Any", SETTINGS)
    checks = RebuildChecks(cast("Any", engine), table)
    return LoadedFiles(cast("Any", engine), checks), engine, checks


def left(files: Path) -> bool:
    return any(path.is_file() for path in files.rglob("*"))


@pytest.mark.shows("load")
def test_files_are_deleted_once_all_partitions_have_them(files: Path) -> None:
    now, found = loaded_from(files), []
    # A task that loads has no epoch yet.
    loading = replace(PARTS[1], epoch=0, state="RESTORING")
    for tasks in ([], [PARTS[0], loading], PARTS):
        deletion, engine, checks = deleting(now, tasks)
        deletion.delete(now)
        found.append((left(files), bool(engine.now.loads), checks.is_loaded(now, 2)))

    assert found == [(True, True, False), (True, True, False), (False, False, True)]
    assert (engine.now.action, engine.now.reason) == ("load", "generation 2 is loaded, and its files are deleted")


@pytest.mark.shows("load")
@pytest.mark.parametrize("keeps", [True, False])
def test_files_of_a_dropped_generation_are_deleted_unless_they_are_to_be_kept(files: Path, *, keeps: bool) -> None:
    now = loaded_from(files, keeps=keeps).dropped(2, "", "")
    deletion, engine, _ = deleting(now, [])
    deletion.delete(now)

    assert left(files) is keeps
    what = "kept" if keeps else "deleted"
    assert (engine.now.loads, engine.now.reason) == ((), f"generation 2 is dropped, and its files are {what}")


def test_files_that_cannot_be_deleted_are_named_and_tried_again(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = loaded_from(files), []

    def fail(folder: Folder) -> None:
        calls.append(folder.uri)
        raise RetriableError(f"{folder.uri} cannot be deleted")

    deletion, engine, _ = deleting(now, PARTS)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "delete", fail)
        for _ in range(3):
            with pytest.raises(RetriableError, match=r"rewards\.g2 cannot be deleted"):
                deletion.delete(now)
    # Not four times a second.
    assert len(calls) == 1
    assert engine.now.loads
    monkeypatch.setattr("balance_service.hosting.loaded_files._DELETE_AGAIN_SECONDS", 0.0)
    deletion.delete(now)
    assert not left(files)


@pytest.mark.shows("load")
def test_a_generation_that_has_a_part_of_its_states_does_not_serve_whoever_says_so(files: Path) -> None:
    now = loaded_from(files)
    _, _, checks = deleting(now, PARTS[:1])

    for anyway in (True, False):
        with pytest.raises(InvalidInputError, match="is being loaded from files"):
            checks.check_switch(now, 2, anyway=anyway)


def test_files_of_another_number_are_refused(files: Path) -> None:
    load = Load(2, str(files), "a digest")

    with pytest.raises(InvalidInputError, match="the files are of generation 2 of 'rewards', and 3 is next"):
        BUILT.dropped(2, "", "").rebuilt(DECLARED, None, 0, None, "", "", load)


def test_the_record_of_the_topic_has_what_generations_are_loaded_from(files: Path) -> None:
    now = loaded_from(files, keeps=True)

    assert Generations.of(now.record(), model="rewards") == now
