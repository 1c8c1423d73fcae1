"""What an instance says of all keys that it owns."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from balance_service.http.peers.proxy import Proxy
from balance_service.http.scan import Count
from balance_service.http.scatter import ScanThreads, Scatter
from balance_service.http.server.problems import Problem
from balance_service.state.records import POSITION_KEY, Position, Role
from tests.support.querying import EPOCH, PARTITION, POSITIONS, Instance

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def instance(tmp_path: Path) -> Instance:
    return Instance(tmp_path / "store")


def owned_by(instance: Instance) -> int:
    """How many keys it says that it owns."""

    async def ask() -> int:
        scatter = Scatter(
            routing=instance.routing,
            proxy=Proxy(),
            address=instance.address,
            path="/api/models/balance",
            view=lambda _: {},
            render=json.dumps,
            on_damage=lambda *_: None,
            timeout_seconds=1.0,
            threads=ScanThreads(),
        )
        count = json.loads((await scatter.answer_owned(Count())).body)["count"]
        await scatter.proxy.close()
        return int(count)

    return asyncio.run(ask())


def test_an_owner_counts_what_it_has(instance: Instance) -> None:
    position = Position(10, EPOCH, "t", keys=3)
    instance.store.write([(POSITION_KEY, POSITIONS.encode(position.record()))], 1)

    assert owned_by(instance) == 3


@pytest.mark.parametrize("of_none", [{"owns": False}, {"role": Role.STANDBY}])
def test_who_owns_nothing_counts_none(tmp_path: Path, of_none: dict[str, object]) -> None:
    assert owned_by(Instance(tmp_path / "store", **of_none)) == 0  # type: ignore[arg-type]


def test_what_is_owned_and_cannot_be_read_is_not_counted_as_none(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = instance.task(PARTITION)
    assert task is not None
    task.view = None
    monkeypatch.setattr(instance, "task", lambda partition: task if partition == PARTITION else None)

    with pytest.raises(Problem, match="cannot be read here now") as refused:
        owned_by(instance)

    assert refused.value.status == 503
