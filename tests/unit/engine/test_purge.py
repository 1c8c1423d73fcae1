"""What is deleted of a topic between two stages: what was applied, and nothing that may be yet."""

from __future__ import annotations

from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.engine.records import Role
from balance_service.engine.source_watch import Purge
from balance_service.errors import RetriableError
from balance_service.kafka.topics import Topic
from balance_service.read_models.balance import Balance
from balance_service.testing import Driver, event

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = "app-model-by-key"


class Broker:
    """Notes what it is to delete; away, it does not answer."""

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []
        self.is_away = False

    def delete_before(self, name: str, offsets: dict[int, int]) -> None:
        assert name == SOURCE
        if self.is_away:
            raise RetriableError("it does not answer")
        self.asked.append(offsets)


class Purged:
    """A purge of partition 3, on which the driver has folded."""

    def __init__(self, driver: Driver) -> None:
        self.broker = Broker()
        self.role = Role.ACTIVE
        self._stage = driver._last
        self.hosted = SimpleNamespace(
            topics=self.broker, source=Topic(SOURCE, "id", 4), processor=self._stage._processor
        )
        self._purge = Purge(cast("Any", self))

    def answering(self) -> dict[int, Any]:
        return {3: SimpleNamespace(role=self.role, view=self._stage.store.view)}

    def look(self) -> list[dict[int, int]]:
        """What it asks the broker for."""
        self.broker.asked.clear()
        self._purge.run_once()
        return [asked for asked in self.broker.asked if asked]


def funds(unreadable: str | None = None) -> Any:
    return event("FundsAdded", {"customerId": "alice", "amount": Decimal("1.00")}, unreadable=unreadable)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with Driver(Balance()) as driver:
        yield driver


@pytest.fixture
def purged(driver: Driver) -> Purged:
    return Purged(driver)


def test_what_is_below_the_position_is_deleted_once(driver: Driver, purged: Purged) -> None:
    driver.given(funds(), funds(), funds())

    assert purged.look() == [{3: 3}]
    assert purged.look() == []


def test_a_standby_deletes_nothing(driver: Driver, purged: Purged) -> None:
    driver.given(funds())
    purged.role = Role.STANDBY

    assert purged.look() == []


def test_a_record_is_kept_while_its_letter_is_open(driver: Driver, purged: Purged) -> None:
    driver.given(funds(), funds(unreadable="schema-id-unknown"), funds())
    assert purged.look() == [{3: 1}]

    driver.mend("schema-id-unknown").advance(minutes=5)

    assert purged.look() == [{3: 3}]


def test_what_the_broker_did_not_delete_is_deleted_later(driver: Driver, purged: Purged) -> None:
    driver.given(funds())
    purged.broker.is_away = True
    purged.look()
    purged.broker.is_away = False

    assert purged.look() == [{3: 1}]
