"""Rebuild: drops the read model and folds it again, exactly; refused while an instance runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import NewPartitions

from tests.support.commands import Done, assert_refused, run, started
from tests.support.kafka import admin, changelogs_of, ends_of, in_changelog, recounted
from tests.support.service import PARTITIONS, all_balances, application, new_instance, on, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from decimal import Decimal
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalStack

_CUSTOMERS = 500
_FEW, _EVENTS = 2_000, 100_000
_REFUSED = 2
# Small enough that the test can interrupt a replay in its middle.
_RECORDS_PER_BATCH = "2000"
_FOLDED = 1_500


class Application:
    """A topic with a history, an instance that has folded its beginning, and a separate directory for rebuilds."""

    def __init__(self, stack: LocalStack, state_dir: Path) -> None:
        self.stack = stack
        self.settings = application(BALANCE_MAX_RECORDS_PER_BATCH=_RECORDS_PER_BATCH)
        self.instance = new_instance(stack, self.settings)
        self.environment = on(stack, self.settings) | {"BALANCE_STATE_DIR": str(state_dir)}

    @property
    def changelogs(self) -> list[str]:
        return changelogs_of(self.stack, self.settings)

    def run(self, *arguments: str) -> Done:
        return run(self.environment, *arguments, seconds=120)

    def load(self, events: int) -> None:
        done = self.run("load", "--events", str(events), "--customers", str(_CUSTOMERS))
        assert done.code == 0, done

    def recounted(self) -> dict[str, Decimal]:
        return recounted(self.stack, self.settings)

    def answered(self) -> dict[str, Decimal]:
        customers = (f"customer-{n}" for n in range(_CUSTOMERS))
        return all_balances(self.instance, customers, ends_of(self.stack, self.settings["BALANCE_TOPIC"]))


@pytest.fixture(scope="module")
def app(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """The application while its instance runs."""
    app = Application(stack, tmp_path_factory.mktemp("rebuild") / "state")
    app.load(_FEW)
    with running(app.instance):
        yield app


@pytest.fixture(scope="module")
def stopped(app: Application) -> Application:
    """The application after its instance was stopped and many events were appended."""
    app.instance.stop()
    app.load(_EVENTS - _FEW)
    return app


def test_a_rebuild_is_refused_while_an_instance_runs(app: Application) -> None:
    before = app.answered()

    done = app.run("rebuild", "--offline")

    assert_refused(done, _REFUSED, app.settings["BALANCE_APPLICATION_ID"])
    assert app.answered() == before == app.recounted()


@pytest.mark.shows("deterministic")
def test_a_rebuild_counts_every_event_and_equals_a_recount(stopped: Application) -> None:
    assert in_changelog(stopped.stack, stopped.settings) != stopped.recounted(), "the changelog lacks the later events"

    done = stopped.run("rebuild", "--offline")

    assert done.code == 0, done
    outcome = f"{_EVENTS} events applied, 0 records of other types ignored, 0 duplicates skipped, 0 dead-lettered"
    assert outcome in done.stdout
    assert len(stopped.changelogs) == 1, "the former generation's is deleted"
    assert in_changelog(stopped.stack, stopped.settings) == stopped.recounted()


def test_an_interrupted_rebuild_succeeds_when_run_again(stopped: Application) -> None:
    (former,) = stopped.changelogs
    with started(stopped.environment, "rebuild", "--offline") as rebuilding:
        eventually(lambda: stopped.changelogs[-1] != former, "another generation has a changelog")
        eventually(lambda: _records(stopped) >= _FOLDED, "the replay is in its middle")
        rebuilding.interrupt()
        interrupted = rebuilding.wait(20)
    assert interrupted.code != 0
    assert "Traceback" not in interrupted.stderr, interrupted.stderr
    assert in_changelog(stopped.stack, stopped.settings) != stopped.recounted(), "the replay was interrupted"

    done = stopped.run("rebuild", "--offline")

    assert done.code == 0, done
    assert f"{_EVENTS} events applied" in done.stdout
    assert len(stopped.changelogs) == 1, "those of all former generations are deleted"
    assert in_changelog(stopped.stack, stopped.settings) == stopped.recounted()


def test_an_instance_replaces_an_outdated_state_directory_after_a_rebuild(stopped: Application) -> None:
    def stores() -> set[str]:
        return {path.name for path in stopped.instance.state_dir.rglob("balance*_*")}

    before = stores()
    assert before
    stopped.instance.launch()
    stopped.instance.wait_ready()

    assert stopped.answered() == stopped.recounted()
    assert stores(), "the stores of the present generation"
    assert not stores() & before, "those of the former one are removed"


def test_a_rebuild_is_refused_after_partitions_were_added(stack: LocalStack, tmp_path: Path) -> None:
    app = Application(stack, tmp_path / "state")
    app.load(100)
    more = NewPartitions(app.settings["BALANCE_TOPIC"], PARTITIONS + 1)
    admin(stack).create_partitions([more])[app.settings["BALANCE_TOPIC"]].result(10)

    done = app.run("rebuild", "--offline")

    assert_refused(done, _REFUSED, app.settings["BALANCE_TOPIC"], "partitions")
    assert _records(app) == 0


def _records(app: Application) -> int:
    """Returns the number of records in the changelog of the last generation; 0 while it is being made."""
    try:
        return sum(ends_of(app.stack, app.changelogs[-1]).values())
    except (KafkaException, IndexError):
        return 0
