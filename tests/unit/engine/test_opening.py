"""The store of a task whose partitioner has changed."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.inheritance import check_owner
from balance_service.engine.opening import open_store, starting_position
from balance_service.engine.records import POSITION_KEY, Position, TaskId
from balance_service.errors import TaskHaltedError
from balance_service.kafka.topics import Topic
from balance_service.model.stage import Stage
from tests.support.fakes import position_codec

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.model.stream import Partitioner

TASK = TaskId("balance", 0)
SOURCE, CHANGELOG = Topic("balance", "source", 2), Topic("changelog", "changelog", 2)
CODEC = position_codec()
HALTED = "folded with partitioner murmur2, and it is crc32 now; declare murmur2 again; or stop all instances"


def hosted(path: Path, partitioner: Partitioner) -> Any:
    return SimpleNamespace(
        settings=SimpleNamespace(application_id="app"),
        stage=SimpleNamespace(retries=False, mark="app\0balance"),
        source=SOURCE,
        partitioner=partitioner,
        processor=SimpleNamespace(position_codec=CODEC),
        state_directory=SimpleNamespace(store_path=lambda _task: path / "store"),
        topics=SimpleNamespace(offsets=lambda _name, partitions, **_: dict.fromkeys(partitions, 0)),
    )


def fold(path: Path, declared: Partitioner, folded: Partitioner) -> None:
    """Opens the store with the declared partitioner, and writes the position of states that another one may have."""
    stands_at = Position(7, 1, SOURCE.topic_id, source="balance:0", partitioner=folded)
    with closing(open_store(TASK, hosted(path, declared), CHANGELOG)) as store:
        store.write([(POSITION_KEY, CODEC.encode(stands_at.record()))], 1)


# A store that is restored while crc32 is declared gets its identity first.
@pytest.mark.shows("partitioner")
@pytest.mark.parametrize("declared", ["murmur2", "crc32"])
def test_a_store_of_another_partitioner_is_refused_until_it_is_declared_again(
    tmp_path: Path, declared: Partitioner
) -> None:
    fold(tmp_path, declared, "murmur2")

    for _ in range(2):
        with pytest.raises(TaskHaltedError, match=HALTED):
            open_store(TASK, hosted(tmp_path, "crc32"), CHANGELOG)

    with closing(open_store(TASK, hosted(tmp_path, "murmur2"), CHANGELOG)) as store:
        assert store.position is not None
        assert store.position.offset == 7
        assert store.identity is not None
        assert store.identity.partitioner == "murmur2"


def test_after_a_rebuild_the_store_is_restored_from_the_new_changelog(tmp_path: Path) -> None:
    fold(tmp_path, "murmur2", "murmur2")

    with closing(open_store(TASK, hosted(tmp_path, "crc32"), Topic("changelog", "another", 2))) as store:
        assert (store.position, store.changelog_offset) == (None, 0)


@pytest.mark.shows("partitioner")
def test_a_position_of_another_partitioner_is_refused(tmp_path: Path) -> None:
    stands_at = Position(0, 1, SOURCE.topic_id, source="balance:0", partitioner="murmur2")

    with pytest.raises(TaskHaltedError, match=HALTED):
        starting_position(stands_at, hosted(tmp_path, "crc32"), 0, CHANGELOG.topic_id, 1)

    assert starting_position(stands_at, hosted(tmp_path, "murmur2"), 0, CHANGELOG.topic_id, 1).epoch == 2


def test_a_changelog_of_another_application_is_refused_and_an_old_record_is_not() -> None:
    stage = Stage(name="balance", owner="balance", source="balance", application_id="pay-eu")
    same_topic = Stage(name="eu-balance", owner="eu-balance", source="balance", application_id="pay")
    assert stage.changelog == same_topic.changelog

    for position in (None, Position(0, 1, "id"), Position(0, 1, "id", owner=stage.mark)):
        check_owner(stage, position)
    told = "belongs to 'eu-balance' of application id 'pay', and 'balance' of 'pay-eu'"
    with pytest.raises(TaskHaltedError, match=told):
        check_owner(stage, Position(0, 1, "id", owner=same_topic.mark))
