"""How many members a group has, while the broker that has the group is being found."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from balance_service.errors import RetriableError
from balance_service.kafka import topics as module
from balance_service.kafka.topics import Topics
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.usefixtures("no_environment")

TWO_MEMBERS = SimpleNamespace(members=[None, None])


class Admin:
    """Describes every group by these answers in turn; the last of them is given again and again."""

    def __init__(self, *answers: KafkaError | SimpleNamespace) -> None:
        self._next: Iterator[KafkaError | SimpleNamespace] = iter(answers)
        self._last = answers[-1]

    def describe_consumer_groups(self, groups: list[str], **_: float) -> Mapping[str, Future[Any]]:
        answer = next(self._next, self._last)
        future: Future[Any] = Future()
        if isinstance(answer, KafkaError):
            future.set_exception(KafkaException(answer))
        else:
            future.set_result(answer)
        return dict.fromkeys(groups, future)

    def poll(self, _seconds: float) -> None: ...


def topics_of(monkeypatch: pytest.MonkeyPatch, admin: Admin) -> Topics:
    monkeypatch.setattr(module, "new_client", lambda *_: admin)
    return Topics(load_settings(bootstrap_servers="127.0.0.1:1"))


@pytest.mark.parametrize(
    "code",
    [KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS],
)
def test_a_broker_that_does_not_have_the_group_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    assert topics_of(monkeypatch, Admin(KafkaError(code), TWO_MEMBERS)).group_members() == 2


def test_where_nobody_has_it_in_time_that_is_an_error_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FOUND_WITHIN_SECONDS", 0.2)

    with pytest.raises(RetriableError, match="describing group"):
        topics_of(monkeypatch, Admin(KafkaError(KafkaError.NOT_COORDINATOR))).group_members()
