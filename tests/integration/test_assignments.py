"""How the groups of topics spread partitions over instances that join and leave: evenly, and with few moves."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import NewTopic

from balance_service.cluster.membership import Membership, consumer_config, group_of
from tests.support.fakes import GUARDED
from tests.support.kafka import admin
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from balance_service.cluster.membership import Partitions
    from balance_service.devtools.local.stack import LocalStack

# Of each unit. Both sides of a multiple of each number of instances are among them.
PARTITIONS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 15, 32, 64)
MOST_INSTANCES = 7
SESSION_MS = 6_000
_SECONDS = 60.0


class Owners:
    """Notes which partitions the group has an instance own and release, in place of its engine."""

    def __init__(self, releases_within: float = 0.0) -> None:
        """Args:
        releases_within: the seconds that the release of partitions takes.
        """
        self.owned: set[tuple[str, int]] = set()
        self.changed_at = 0.0
        self._releases_within = releases_within

    def assigned(self, topic: str, partitions: Partitions) -> None:
        if partitions:
            self.changed_at = time.monotonic()
        self.owned |= {(topic, number) for number in partitions}

    def revoked(self, topic: str, partitions: Partitions) -> None:
        time.sleep(self._releases_within)
        self.changed_at = time.monotonic()
        self.owned -= {(topic, number) for number in partitions}

    lost = revoked


class Instance:
    """The memberships of an instance, without an engine."""

    def __init__(
        self, stack: LocalStack, application_id: str, topics: Sequence[str], releases_within: float = 0.0
    ) -> None:
        self.owners = Owners(releases_within)
        self.members = [
            Membership(
                config=consumer_config(
                    {"bootstrap.servers": stack.bootstrap_servers}, group_of(application_id, topic), SESSION_MS
                ),
                topic=topic,
                session_timeout_ms=SESSION_MS,
                listener=self.owners,
                positions=lambda _topic: {},
                guarded=GUARDED,
            )
            for topic in topics
        ]
        for member in self.members:
            member.start()

    def of(self, topic: str) -> set[int]:
        return {number for name, number in self.owners.owned.copy() if name == topic}

    def leave(self) -> None:
        for member in self.members:
            member.leave()
        for member in self.members:
            member.stop()


@pytest.fixture(scope="module")
def topics(stack: LocalStack) -> dict[str, int]:
    """Topic → partitions, of twelve units."""
    found = {f"unit-{number}-{uuid.uuid4().hex[:8]}": number for number in PARTITIONS}
    for made in admin(stack).create_topics([NewTopic(name, number, 1) for name, number in found.items()]).values():
        made.result(30)
    return found


class Application:
    """The instances of one application."""

    def __init__(self, stack: LocalStack, topics: dict[str, int]) -> None:
        self._stack, self.topics = stack, topics
        self._application_id = f"app-{uuid.uuid4().hex[:8]}"
        self.instances: list[Instance] = []

    def join(self) -> None:
        self.instances.append(Instance(self._stack, self._application_id, [*self.topics]))

    def leave(self, which: int) -> None:
        self.instances.pop(which).leave()

    def plan(self) -> dict[tuple[str, int], int]:
        """Returns the instance of each partition."""
        return {place: id(one) for one in self.instances for place in one.owners.owned.copy()}

    def uneven(self) -> list[str]:
        """Returns what is not as even as it can be."""
        found = []
        for topic, partitions in self.topics.items():
            owned = [one.of(topic) for one in self.instances]
            sizes = sorted(map(len, owned))
            if sum(sizes) != partitions or set().union(*owned) != {*range(partitions)} or sizes[-1] - sizes[0] > 1:
                found.append(f"{topic}: {sizes}")
        return found

    def settle(self, change: str) -> None:
        since = None

        def is_settled() -> bool:
            nonlocal since
            since = None if self.uneven() else since or time.monotonic()
            return since is not None and time.monotonic() - since > 1.0

        eventually(is_settled, lambda: f"{change}: {self.uneven()}", _SECONDS)


@pytest.fixture
def application(stack: LocalStack, topics: dict[str, int]) -> Iterator[Application]:
    made = Application(stack, topics)
    with ExitStack() as leaving:
        yield made
        for one in made.instances:
            leaving.callback(one.leave)


def least_moves(before: dict[tuple[str, int], int], instances: Sequence[int], topic: str, partitions: int) -> int:
    """Returns how many partitions of a topic have to move so that instances own numbers that differ by one at most."""
    kept = Counter(owner for (name, _), owner in before.items() if name == topic)
    quota, more = divmod(partitions, len(instances))
    # Those that own the most keep one more.
    most = sorted((kept[one] for one in instances), reverse=True)
    return partitions - sum(min(owned, quota + (rank < more)) for rank, owned in enumerate(most))


@pytest.mark.shows("spread")
@pytest.mark.timeout(600)
def test_partitions_spread_evenly_over_one_to_seven_instances_with_few_moves(application: Application) -> None:
    """Twelve units of 1 to 64 partitions."""
    application.join()
    application.settle("one instance")
    excess: dict[str, int] = {}
    steps = [*[None] * (MOST_INSTANCES - 1), 0, 3, 1, None, 2]
    for step in steps:
        before = application.plan()
        if step is None:
            application.join()
        else:
            application.leave(step)
        change = f"{'one joins' if step is None else 'one leaves'}, {len(application.instances)} in all"
        application.settle(change)
        after, instances = application.plan(), [*map(id, application.instances)]
        for topic, partitions in application.topics.items():
            moved = sum(before[place] != after[place] for place in after if place[0] == topic)
            least = least_moves(before, instances, topic, partitions)
            if moved > least + 1:
                excess[f"{change}, {partitions} partitions"] = moved - least
    assert not excess


@pytest.mark.parametrize("releases_within", [0.0, 0.1])
def test_a_new_instance_owns_partitions_soon_after_another_has_released_them(
    stack: LocalStack, topics: dict[str, int], releases_within: float
) -> None:
    """librdkafka joins again only a second after it joined last."""
    topic = next(name for name, partitions in topics.items() if partitions == 4)

    def seconds() -> float:
        application_id = f"app-{uuid.uuid4().hex[:8]}"
        with ExitStack() as leaving:
            first = Instance(stack, application_id, [topic], releases_within)
            leaving.callback(first.leave)
            eventually(lambda: len(first.of(topic)) == 4, "the first instance owns all partitions", _SECONDS)
            # Otherwise its own pause would count too.
            time.sleep(1.5)
            second = Instance(stack, application_id, [topic])
            leaving.callback(second.leave)
            eventually(lambda: len(second.of(topic)) == 2, "the second instance owns half of them", _SECONDS)
            return second.owners.changed_at - first.owners.changed_at

    assert min(seconds() for _ in range(3)) < 0.3
