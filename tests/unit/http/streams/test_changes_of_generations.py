"""Streams of changes through switches of generations, at the owner and through an instance that asks it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from balance_service.cluster.directory import PublishedModel
from balance_service.http.streams import event_stream
from tests.unit.http.streaming import BUSY_SECONDS, CHANGES, KEY, Event, Listener, Owner, stage, state, until

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.engine.records import TaskSnapshot
    from balance_service.http.model_queries import ModelAnswers, ModelQueries
    from balance_service.http.peers.proxy import Proxy
    from balance_service.observability.metrics import Metrics

PATHS = pytest.mark.parametrize("path", [KEY, CHANGES])
SECOND = "balance.g2"


@dataclass
class Both(Owner):
    """An instance that hosts two generations of `balance`, and has heard which one serves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.second = Owner(self.path.with_name(f"{self.path.name}-g2"), owns=self.owns, generation=2)
        self.second.servers = self.servers
        self.serves = 1
        self.live = [1, 2]
        self.of_second: ModelAnswers

    def models(self, proxy: Proxy, metrics: Metrics | None = None) -> ModelQueries:
        self.second.address, self.second.trust = self.address, self.trust
        self.of_second = self.second.models(proxy).hosted["balance"]
        models = super().models(proxy, metrics)
        models.hosted = {"balance": models.hosted["balance"], SECOND: self.of_second}
        models.serving, models.live = lambda _model: self.serves, lambda _model: self.live
        return models

    def hosts_none(self) -> None:
        """Makes this the view of an instance whose peers alone host the read model."""
        models = self.model_queries
        answers, models.hosted = models.hosted, {}
        models.elsewhere = lambda: {name: PublishedModel(name, 1, "murmur2") for name in answers}
        models.of_peers = lambda name, *_: answers[name]

    def published(self) -> list[TaskSnapshot]:
        return [*super().published(), *self.second.published()]


@pytest.fixture(autouse=True)
def _sweeps_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "_SWEEP_SECONDS", 0.05)


@pytest.fixture
def owner(tmp_path: Path) -> Both:
    return Both(tmp_path / "owner")


@pytest.fixture
def other(tmp_path: Path) -> Both:
    """An instance that has no partition."""
    return Both(tmp_path / "other", owns=False)


def generation_of(event: Event) -> int:
    return int(json.loads(event.data)["generation"])


async def after_a_switch(listener: Listener, path: str, generation: int) -> dict[str, str | None]:
    """Reads what a stream sends at a switch: the state of its key, or a snapshot. Returns the states by key."""
    if path == KEY:
        events = [await listener.next()]
    else:
        assert (begin := await listener.next()).name == "snapshot-begin"
        assert generation_of(begin) == generation
        events = []
        while (event := await listener.next()).name != "snapshot-end":
            events.append(event)
        assert event.event_id is not None
        assert event.event_id.startswith(f"{generation}/")
    assert [(event.name, generation_of(event)) for event in events] == [("state", generation)] * len(events)
    return dict(event.entry for event in events)


@PATHS
@pytest.mark.parametrize("through", ["the owner", "another instance", "an instance that does not host the model"])
@pytest.mark.shows("listener")
def test_a_stream_goes_on_with_the_generation_that_serves_and_back(
    owner: Both, other: Both, path: str, through: str
) -> None:
    asked = owner if through == "the owner" else other

    async def run() -> None:
        owner.show({"c1": "1.00"})
        owner.second.show({"c1": "2.00"})
        async with stage(owner, other) as on, AsyncExitStack() as stack:
            if through == "an instance that does not host the model":
                other.hosts_none()
            listener = await stack.enter_async_context(on.listening(asked, path))
            assert await after_a_switch(listener, path, 1) == {"c1": "1.00"}
            asked.serves = 2
            assert await after_a_switch(listener, path, 2) == {"c1": "2.00"}
            owner.commit({"c1": "1.50"})
            assert await listener.silent()
            owner.second.commit({"c1": "2.50"})
            assert await listener.next() == state("2/0:11@c", "c1", "2.50", 2)
            asked.serves = 1
            # This position was reached before the switch, and the state since then was another one.
            assert await after_a_switch(listener, path, 1) == {"c1": "1.50"}
            owner.commit({"c1": "1.75"})
            assert await listener.next() == state("1/0:12@c", "c1", "1.75")

    asyncio.run(run())


@PATHS
def test_a_state_that_the_switch_does_not_change_is_sent_with_the_new_generation(owner: Both, path: str) -> None:
    async def run() -> None:
        owner.show({"c1": "1.00"})
        owner.second.show({"c1": "1.00"})
        async with stage(owner) as on, on.listening(owner, path) as listener:
            await after_a_switch(listener, path, 1)
            owner.serves = 2
            assert await after_a_switch(listener, path, 2) == {"c1": "1.00"}

    asyncio.run(run())


@PATHS
@pytest.mark.shows("listener")
def test_an_instance_that_hears_of_the_switch_first_or_last_sends_one_generation_after_the_other(
    owner: Both, other: Both, path: str
) -> None:
    async def run() -> None:
        owner.show({"c1": "1.00"})
        owner.second.show({"c1": "2.00"})
        async with (
            stage(owner, other) as on,
            on.listening(owner, path) as late,
            on.listening(other, path) as early,
        ):
            for listener in (late, early):
                await after_a_switch(listener, path, 1)
            other.serves = 2
            assert await after_a_switch(early, path, 2) == {"c1": "2.00"}
            for number in (1, 2, 3):
                owner.commit({"c1": f"1.{number}0"})
                owner.second.commit({"c1": f"2.{number}0"})
                assert (await late.next()).entry == ("c1", f"1.{number}0")
                assert await early.next() == state(f"2/0:{owner.second.offset}@c", "c1", f"2.{number}0", 2)
            owner.serves = 2
            assert await after_a_switch(late, path, 2) == {"c1": "2.30"}
            assert await early.silent()

    asyncio.run(run())


@PATHS
@pytest.mark.shows("listener")
def test_a_client_that_comes_back_after_a_switch_gets_the_states_of_the_new_generation(owner: Both, path: str) -> None:
    """Both generations have the client's position in memory, and the states at it differ."""

    async def run() -> None:
        owner.show({"c1": "1.00"})
        owner.second.show({"c1": "2.00"})
        async with stage(owner) as on:
            async with on.listening(owner, path) as listener, on.listening(owner, f"{path}?generation=2") as second:
                await after_a_switch(listener, path, 1)
                await after_a_switch(second, path, 2)
                owner.commit({"c1": "1.50"})
                owner.second.commit({"c1": "2.50"})
                last = (await listener.next()).event_id
                assert (last, (await second.next()).event_id) == ("1/0:11@c", "2/0:11@c")
            owner.serves = 2
            async with on.listening(owner, path, last) as listener:
                assert await after_a_switch(listener, path, 2) == {"c1": "2.50"}
            async with on.listening(owner, path, "2/0:11@c") as listener:
                assert await listener.silent()
            owner.serves = 1
            async with on.listening(owner, path, "1/0:11@c") as listener:
                assert await listener.silent()
                owner.commit({"c1": "1.75"})
                assert (await listener.next()).event_id == "1/0:12@c"

    asyncio.run(run())


@PATHS
@pytest.mark.shows("listener")
def test_a_position_from_before_a_switch_says_nothing_after_the_way_back(owner: Both, path: str) -> None:
    """The client has had a state of the other generation since, though its own has not changed."""

    async def run() -> None:
        owner.show({"c1": "1.00"})
        owner.second.show({"c1": "2.00"})
        async with stage(owner) as on, on.listening(owner, path) as first:
            await after_a_switch(first, path, 1)
            async with on.listening(owner, path, "1/0:10@c") as listener:
                assert await listener.silent()
                owner.serves = 2
                assert await after_a_switch(listener, path, 2) == {"c1": "2.00"}
                owner.serves = 1
                assert await after_a_switch(listener, path, 1) == {"c1": "1.00"}

    asyncio.run(run())


@PATHS
@pytest.mark.parametrize("through", ["the owner", "another instance"])
def test_a_stream_that_names_a_generation_keeps_it_and_ends_when_it_is_dropped(
    owner: Both, other: Both, path: str, through: str
) -> None:
    asked = owner if through == "the owner" else other

    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner, other) as on, on.listening(asked, f"{path}?generation=1") as listener:
            await after_a_switch(listener, path, 1)
            asked.serves = 2
            owner.commit({"c1": "1.50"})
            assert await listener.next() == state("1/0:11@c", "c1", "1.50")
            asked.live = [2]
            assert await listener.next() == Event("end", None, '{"detail":"generation 1 of \'balance\' is dropped"}')
            with pytest.raises(AssertionError, match="the stream ended"):
                await listener.next()
            await until(lambda: not asked.streams)

    asyncio.run(run())


@PATHS
def test_a_stream_waits_for_a_generation_that_no_instance_hosts_yet(owner: Both, path: str) -> None:
    async def run() -> None:
        owner.second.show({"c1": "2.00"})
        async with stage(owner) as on, on.listening(owner, path) as listener:
            await after_a_switch(listener, path, 1)
            models = owner.model_queries
            models.hosted = {"balance": models.hosted["balance"]}
            owner.serves = 2
            assert await listener.silent()
            models.hosted = {**models.hosted, SECOND: owner.of_second}
            assert await after_a_switch(listener, path, 2) == {"c1": "2.00"}

    asyncio.run(run())


@PATHS
def test_a_stream_finds_partitions_of_a_generation_that_its_instance_begins_to_host(owner: Both, path: str) -> None:
    """Until then, peers answer for the generation, and no instance is its own peer."""

    async def run() -> None:
        owner.second.show({"c1": "2.00"})
        async with stage(owner) as on, on.listening(owner, path) as listener:
            await after_a_switch(listener, path, 1)
            models = owner.model_queries
            of_peers = Owner(owner.path.with_name("nothing"), owns=False, generation=2)
            models.hosted = {"balance": models.hosted["balance"]}
            models.elsewhere = lambda: {SECOND: PublishedModel(SECOND, 1, "murmur2")}
            answers = of_peers.models(owner.of_second.queries.proxy).hosted["balance"]
            models.of_peers = lambda *_: answers
            owner.serves = 2
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while (await listener.next()).name != "state":
                        continue
                    pytest.fail("a state came from no instance")
            models.hosted = {**models.hosted, SECOND: owner.of_second}
            while (event := await listener.next()).name != "state":
                continue
            assert event.entry == ("c1", "2.00")
            of_peers.store.close()

    asyncio.run(run())


def test_a_switch_cuts_off_no_event_of_a_client_that_reads_slowly(owner: Both) -> None:
    keys = [f"{number:0200}" for number in range(3_000)]

    async def run() -> bytes:
        owner.show(dict.fromkeys(keys, "1.00"))
        owner.second.show(dict.fromkeys(keys, "2.00"))
        async with stage(owner):
            host, port = owner.address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            writer.write(f"GET {CHANGES} HTTP/1.0\r\nHost: x\r\n\r\n".encode())
            while await reader.readline() != b"\r\n":
                continue
            owner.serves, read = 2, b""
            await asyncio.sleep(0.3)
            while b"snapshot-end" not in read:
                some = await asyncio.wait_for(reader.read(60_000), BUSY_SECONDS)
                assert some, "the stream ended"
                read += some
            writer.transport.abort()
            return read

    events = [block.split("\n") for block in asyncio.run(run()).decode().split("\n\n") if not block.startswith(":")]
    sent = [json.loads(lines[-1].removeprefix("data: ")) for lines in events if lines != [""]]
    generations = [one["generation"] for one in sent]
    assert generations == sorted(generations)
    assert {*generations} == {1, 2}
    of_second = {one["key"]: one["value"] for one in sent if one["generation"] == 2 and "key" in one}
    assert of_second == {key: {"amount": 2.0} for key in keys}
    assert sum(one["generation"] == 1 for one in sent) < len(keys)
