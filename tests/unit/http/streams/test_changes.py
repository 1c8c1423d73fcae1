"""Streams of changes over real HTTP: of a key and of a range, after a new connection, and across moves."""

from __future__ import annotations

import asyncio
import random
import weakref
from typing import TYPE_CHECKING

import pytest

from balance_service.engine.records import Position
from balance_service.http.streams import changes, feed, part
from tests.support.collector import no_collector
from tests.support.querying import OneTask, UnknownSchemas
from tests.unit.http.streaming import (
    BUSY_SECONDS,
    CHANGES,
    KEY,
    Event,
    Listener,
    Owner,
    Stage,
    stage,
    state,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from balance_service.http.routing import LocalCopy


def test_a_stream_of_a_key_has_its_state_now_and_each_change(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"c1": "1.10"})
        async with stage(owner) as on, on.listening(owner) as listener:
            assert await listener.next() == Event(
                "state", "1/0:10@c", '{"key":"c1","value":{"amount":1.10},"generation":1}'
            )
            assert listener.comments == [f"partition 0 epoch 4 at {owner.address}"]
            owner.commit({"c2": "7.00"})
            owner.commit({"c1": "2.20"})
            assert await listener.next() == Event(
                "state", "1/0:12@c", '{"key":"c1","value":{"amount":2.20},"generation":1}'
            )
            owner.commit({"c1": None})
            assert (await listener.next()).entry == ("c1", None)

    asyncio.run(run())


def test_a_key_without_a_state_has_null(owner: Owner) -> None:
    async def run() -> None:
        async with stage(owner) as on, on.listening(owner) as listener:
            assert (await listener.next()).entry == ("c1", None)
            owner.commit({"c1": "5.00"})
            assert (await listener.next()).entry == ("c1", "5.00")

    asyncio.run(run())


def test_changes_that_come_faster_than_they_are_sent_become_the_newest_and_are_counted(owner: Owner) -> None:
    async def run() -> None:
        async with stage(owner) as on, on.listening(owner) as listener:
            await listener.next()
            for amount in range(1, 51):
                owner.commit({"c1": f"{amount}.00"})
            got: list[str | None] = []
            while not got or got[-1] != "50.00":
                got.append((await listener.next()).entry[1])
            assert len(got) < 50
            assert sum(owner.coalesced) == 50 - len(got)

    asyncio.run(run())


@pytest.mark.parametrize("path", [KEY, CHANGES])
def test_another_thread_asks_the_registry_for_the_schema_of_a_state_in_a_stream(owner: Owner, path: str) -> None:
    owner.schemas = schemas = UnknownSchemas()
    schemas.is_away = True

    async def run() -> None:
        owner.show({"c2": "7.00"})
        async with stage(owner) as on, on.listening(owner, path) as listener:
            owner.commit({"c1": "1.00"})
            await until(lambda: bool(schemas.threads))
            schemas.is_away = False
            while '"key":"c1","value":{"amount":1.00}' not in (await listener.next()).data:
                pass

    asyncio.run(run())
    assert {name.rpartition("_")[0] for name in schemas.threads} == {"schemas"}


def test_a_client_that_comes_back_gets_a_state_only_if_it_has_changed(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner) as on:
            async with on.listening(owner) as listener:
                last = (await listener.next()).event_id
            assert last is not None
            # A stream of a range names all partitions.
            async with on.listening(owner, last=last.replace("/", "/7:1,")) as listener:
                assert await listener.silent()
                owner.commit({"c2": "9.00"})
                assert await listener.silent()
            owner.commit({"c1": "2.00"})
            async with on.listening(owner, last=last) as listener:
                assert (await listener.next()).entry == ("c1", "2.00")
            # A position of another partition, or from beyond the end, says nothing.
            async with on.listening(owner, last="1/7:1") as listener:
                assert (await listener.next()).entry == ("c1", "2.00")

    asyncio.run(run())


def test_a_retried_dead_letter_changes_a_state_at_the_same_position(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner) as on:
            async with on.listening(owner) as listener:
                last = (await listener.next()).event_id
                owner.commit({"c1": "2.00"}, records=0)
                event = await listener.next()
                assert event.entry == ("c1", "2.00")
                assert event.event_id == last
            async with on.listening(owner, last=last) as listener:
                assert (await listener.next()).entry == ("c1", "2.00")
            async with on.listening(owner, CHANGES) as listener:
                events = await listener.some(3)
                owner.commit({"c1": "3.00"}, records=0)
                assert (await listener.next()).entry == ("c1", "3.00")
            async with on.listening(owner, CHANGES, last=events[-1].event_id) as listener:
                assert (await listener.next()).entry == ("c1", "3.00")

    asyncio.run(run())


def test_a_range_has_a_snapshot_and_then_the_changes_in_it(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"a1": "1.00", "b1": "2.00", "b2": "3.00", "c1": "4.00"})
        async with stage(owner) as on, on.listening(owner, f"{CHANGES}?prefix=b") as listener:
            begin, *states, end = await listener.some(4)
            assert begin == Event("snapshot-begin", "", '{"generation":1}')
            assert [one.entry for one in states] == [("b1", "2.00"), ("b2", "3.00")]
            assert {one.event_id for one in states} == {None}
            assert end == Event("snapshot-end", "1/0:10@c", '{"generation":1}')
            owner.commit({"a1": "9.00", "b2": "5.00"})
            assert await listener.next() == Event(
                "state", "1/0:11@c", '{"key":"b2","value":{"amount":5.00},"generation":1}'
            )
            owner.commit({"b1": None})
            assert (await listener.next()).entry == ("b1", None)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("parameters", "keys"),
    [("from=b1&to=b2", ["b1", "b2"]), ("from=b2", ["b2", "c1"]), ("to=a1", ["a1"]), ("prefix=b&to=b1", ["b1"])],
)
def test_a_range_has_both_ends(owner: Owner, parameters: str, keys: list[str]) -> None:
    async def run() -> None:
        owner.show(dict.fromkeys(("a1", "b1", "b2", "c1"), "1.00"))
        async with stage(owner) as on, on.listening(owner, f"{CHANGES}?{parameters}") as listener:
            _, *states, end = await listener.some(len(keys) + 2)
            assert [one.entry[0] for one in states] == keys
            assert end.name == "snapshot-end"

    asyncio.run(run())


def test_a_range_goes_on_from_a_position_whose_changes_are_in_memory(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"a": "1.00", "b": "1.00"})
        async with stage(owner) as on:
            async with on.listening(owner, CHANGES) as listener:
                last = (await listener.some(4))[-1].event_id
            owner.commit({"a": "2.00"})
            owner.commit({"b": "2.00", "a": "3.00"})
            async with on.listening(owner, CHANGES, last) as listener:
                events = await listener.some(2)
                assert {event.entry for event in events} == {("a", "3.00"), ("b", "2.00")}
                assert [event.event_id for event in events] == [None, "1/0:12@c"]

    asyncio.run(run())


@pytest.mark.parametrize("why", ["too many changes", "too many keys in a commit", "another owner in between", "a gap"])
def test_a_range_begins_again_if_changes_may_be_missing(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(feed, "MOST_REMEMBERED", 2)

    async def run() -> None:
        owner.show({"a": "1.00"})
        async with stage(owner) as on:
            async with on.listening(owner, CHANGES) as listener:
                last = (await listener.some(3))[-1].event_id
            if why == "too many changes":
                for number in range(3):
                    owner.commit({f"k{number}": "1.00"})
            elif why == "too many keys in a commit":
                owner.commit({"k0": "1.00", "k1": "1.00", "k2": "1.00"}, too_many=True)
            elif why == "another owner in between":
                owner.one = OneTask(None, owner.role)
                owner.offset += 1
                owner.show({"k0": "1.00"})
            else:
                owner.offset += 1
                owner.show({"k0": "1.00"})
                owner.commit({"k1": "1.00"})
            async with on.listening(owner, CHANGES, last) as listener:
                assert (await listener.next()).name == "snapshot-begin"
                while (event := await listener.next()).name != "snapshot-end":
                    assert event.name == "state"

    asyncio.run(run())


def test_changes_of_other_keys_do_not_begin_an_idle_range_again(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_REMEMBERED", 2)

    async def run() -> None:
        owner.show({"a": "1.00"})
        async with stage(owner) as on, on.listening(owner, f"{CHANGES}?prefix=a") as listener:
            await listener.some(3)
            for amount in ("2.00", "3.00"):
                for number in range(5):
                    owner.commit({f"k{number}": amount})
                owner.commit({"k0": "9.00", "a": amount})
                assert (await listener.next()).entry == ("a", amount)

    asyncio.run(run())


@pytest.mark.parametrize("commits", [1, 3, 30])
def test_a_client_that_returns_gets_what_changed_after_its_position(
    owner: Owner, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    monkeypatch.setattr(feed, "MOST_REMEMBERED", 4)

    async def run() -> None:
        owner.show({"a": "1.00", "b": "1.00"})
        async with stage(owner) as on:
            async with on.listening(owner, CHANGES) as listener:
                await listener.some(4)
                for number in range(commits):
                    owner.commit({"a": f"{number + 2}.00"})
                while (event := await listener.next()).entry != ("a", f"{commits + 1}.00"):
                    continue
            owner.commit({"b": "5.00"})
            async with on.listening(owner, CHANGES, event.event_id) as listener:
                assert (await listener.next()).entry == ("b", "5.00")

    asyncio.run(run())


def test_a_snapshot_of_many_pages_ends_with_the_newest_states(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "PAGE", 3)
    scan, pages = part.LocalPart._scan, iter(range(100))

    def scan_and_commit(
        reading: part.LocalPart, copy: LocalCopy
    ) -> Generator[None, None, tuple[list[tuple[bytes, str]], bool]]:
        if next(pages) == 3:
            # Keys of a page that was sent, and one of a later page.
            owner.commit({"k00": "2.00", "k19": "3.00", "k01": None})
        return scan(reading, copy)

    monkeypatch.setattr(part.LocalPart, "_scan", scan_and_commit)

    async def run() -> None:
        keys = [f"k{number:02}" for number in range(20)]
        owner.show(dict.fromkeys(keys, "1.00"))
        async with stage(owner) as on, on.listening(owner, CHANGES) as listener:
            states: dict[str, str | None] = {}
            wanted = {**dict.fromkeys(keys, "1.00"), "k00": "2.00", "k19": "3.00", "k01": None}
            while states != wanted:
                event = await listener.next()
                if event.name == "state":
                    states[event.entry[0]] = event.entry[1]

    asyncio.run(run())


@pytest.mark.parametrize("path", [KEY, CHANGES])
@pytest.mark.parametrize("through", ["the old owner", "the new owner", "a third instance"])
def test_a_stream_follows_a_partition_that_moves(tmp_path: Path, path: str, through: str) -> None:
    old = Owner(tmp_path / "old")
    new, third = Owner(tmp_path / "new", owns=False, epoch=5), Owner(tmp_path / "third", owns=False)
    instances = {"the old owner": old, "the new owner": new, "a third instance": third}

    async def run() -> None:
        old.show({"c1": "1.00"})
        async with stage(old, new, third) as on, on.listening(instances[through], path) as listener:
            while (await listener.next()).name != ("state" if path == KEY else "snapshot-end"):
                continue
            old.commit({"c1": "2.00"})
            before = await listener.next()
            assert before.entry == ("c1", "2.00")
            old.owns = False
            new.offset = old.offset + 1
            new.show({"c1": "3.00", "c2": "1.00"})
            new.owns = True
            for instance in (old, new, third):
                for other in (old, new):
                    if other is not instance:
                        instance.hear(other)
            seen: list[Event] = []
            while not seen or seen[-1].name != "state" or seen[-1].entry != ("c1", "3.00"):
                seen.append(await listener.next())
            new.commit({"c1": "4.00"})
            while (event := await listener.next()).name != "state" or event.entry != ("c1", "4.00"):
                continue
            assert listener.comments[-1] == f"partition 0 epoch 5 at {new.address}"
            assert event.event_id == f"1/0:{new.offset}@c"

    asyncio.run(run())


def test_the_owner_sends_nothing_after_its_lease(owner: Owner) -> None:
    async def run() -> None:
        async with stage(owner) as on, on.listening(owner) as of_key, on.listening(owner, CHANGES) as of_range:
            await of_key.next()
            await of_range.some(2)
            owner.clock.now += 60
            owner.commit({"c1": "1.00"})
            assert await of_key.silent()
            assert await of_range.silent()
            owner.lease.renew(owner.clock.now)
            assert (await of_key.next()).entry == ("c1", "1.00")

    asyncio.run(run())


def test_a_task_without_followers_is_not_watched(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_KEEP_SECONDS", 0.1)

    async def run() -> None:
        async with stage(owner) as on:
            seen = [owner.one.is_watched]
            async with on.listening(owner) as listener:
                await listener.next()
                seen.append(owner.one.is_watched)
            await until(lambda: not owner.one.is_watched)
            assert seen == [False, True]

    asyncio.run(run())


@pytest.mark.shows("listener")
@pytest.mark.parametrize("seed", range(4))
def test_listeners_end_with_the_newest_states_whatever_happens(tmp_path: Path, seed: int) -> None:
    """Commits, retries, moves and listeners that come and go; each listener has a client's view of the range."""
    chance = random.Random(seed)
    one, two = Owner(tmp_path / "one", secret="s" * 20), Owner(tmp_path / "two", owns=False, epoch=1, secret="s" * 20)
    truth: dict[str, str | None] = {}
    keys = [f"k{number}" for number in range(12)]

    async def listen(on: Stage, instance: Owner, known: dict[str, str], ended: asyncio.Event) -> None:
        last: str | None = None
        while not ended.is_set():
            async with on.listening(instance, CHANGES, last or None) as listener:
                fresh: dict[str, str] | None = None
                for _ in range(chance.randint(5, 80)):
                    if ended.is_set():
                        break
                    try:
                        async with asyncio.timeout(0.5):
                            event = await listener.next()
                    except TimeoutError:
                        break
                    if event.event_id is not None:
                        if last and event.event_id:
                            assert int(event.event_id[4:-2]) >= int(last[4:-2])
                        last = event.event_id
                    into = known if fresh is None else fresh
                    if event.name == "snapshot-begin":
                        fresh = {}
                    elif event.name == "snapshot-end":
                        assert fresh is not None
                        known.clear()
                        known.update(fresh)
                        fresh = None
                    else:
                        key, amount = event.entry
                        into.pop(key, None)
                        if amount is not None:
                            into[key] = amount

    async def run() -> None:
        ended = asyncio.Event()
        async with stage(one, two) as on:
            views: list[dict[str, str]] = [{} for _ in range(4)]
            listeners = [
                asyncio.create_task(listen(on, instance, view, ended))
                for instance, view in zip((one, two, one, two), views, strict=True)
            ]
            owner, other = one, two
            for step in range(150):
                chosen = {key: chance.choice([f"{step}.00", f"{step}.50", None]) for key in chance.sample(keys, 3)}
                truth.update(chosen)
                owner.commit(chosen, records=chance.choice([0, 1, 1, 5]), too_many=chance.random() < 0.05)
                await asyncio.sleep(chance.choice([0, 0, 0.005, 0.03]))
                if chance.random() < 0.03:
                    owner.owns = False
                    other.epoch = owner.epoch + 1
                    other.offset = owner.offset
                    other.one = OneTask(None, other.role)
                    other.show(truth, letters=1)
                    other.owns = True
                    owner, other = other, owner
                    owner.hear(other)
                    other.hear(owner)
            wanted = {key: amount for key, amount in truth.items() if amount is not None}
            try:
                async with asyncio.timeout(BUSY_SECONDS):
                    while any(view != wanted for view in views):
                        for listener in listeners:
                            if listener.done():
                                listener.result()
                        await asyncio.sleep(0.02)
            finally:
                ended.set()
                await asyncio.gather(*listeners)

    asyncio.run(run())


def test_a_client_that_comes_back_gets_a_deletion(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner) as on:
            async with on.listening(owner) as listener:
                last = (await listener.next()).event_id
            async with on.listening(owner, last=last) as listener:
                assert await listener.silent()
                owner.commit({"c1": None})
                assert (await listener.next()).entry == ("c1", None)
            async with on.listening(owner, last=last) as listener:
                assert (await listener.next()).entry == ("c1", None)

    asyncio.run(run())


def test_a_position_beyond_the_end_says_nothing(owner: Owner) -> None:
    async def run() -> None:
        owner.show({"c1": "1.00"})
        async with stage(owner) as on:
            async with on.listening(owner, last="1/0:99@c") as listener:
                assert (await listener.next()).entry == ("c1", "1.00")
            async with on.listening(owner, CHANGES, last="1/0:99@c") as listener:
                assert (await listener.next()).name == "snapshot-begin"

    asyncio.run(run())


@pytest.mark.shows("listener")
@pytest.mark.parametrize("has_letters", [False, True])
def test_a_feed_begins_behind_a_retry_at_the_position_of_its_first_view(owner: Owner, *, has_letters: bool) -> None:
    async def run() -> None:
        begun = feed.Feed(owner.one, feed.Pace())
        # The latest commit of the view may have retried a dead letter. A client that has seen the position may not have
        # seen that.
        begun.begin(Position(10, 1, "t", letters={"a cause/scheduled": 1} if has_letters else {}))

        assert begun.number_at(feed.Point(10, "")) == (None if has_letters else 0)
        # Of the next positions it knows all.
        begun.note_commit(10, 11, [b"c1"])
        assert begun.number_at(feed.Point(11, "")) == 1
        begun.note_commit(11, 11, [b"c2"])
        assert begun.number_at(feed.Point(11, "")) == 1

    asyncio.run(run())


@pytest.mark.shows("listener", "deleted-keys")
def test_a_feed_of_states_that_were_begun_again_begins_behind_their_former_position(owner: Owner) -> None:
    async def run() -> None:
        begun = feed.Feed(owner.one, feed.Pace())
        # What was deleted at the beginning is in no commit.
        begun.begin(Position(0, 2, "t", emitted_up_to=10))
        begun.note_commit(0, 12, [b"c1"])

        assert [begun.number_at(feed.Point(at, "")) for at in (9, 10, 11)] == [None, None, 0]

    asyncio.run(run())


@pytest.mark.shows("listener")
@pytest.mark.parametrize("last", ["1/0:10@former", "1/0:10"])
@pytest.mark.parametrize("through_peer", [False, True])
def test_a_client_that_comes_back_after_a_build_gets_the_states(tmp_path: Path, last: str, through_peer: bool) -> None:
    owner, peer = Owner(tmp_path / "owner"), Owner(tmp_path / "peer", owns=False)
    asked = peer if through_peer else owner

    async def run() -> None:
        owner.show({"c1": "70.00"})
        async with stage(owner, peer) as on:
            async with on.listening(asked, last=last) as listener:
                assert await listener.next() == state("1/0:10@c", "c1", "70.00")
            async with on.listening(asked, CHANGES, last) as listener:
                assert [event.name for event in await listener.some(3)] == ["snapshot-begin", "state", "snapshot-end"]
                assert await listener.silent()

    asyncio.run(run())


@pytest.mark.shows("listener")
def test_a_page_ends_at_a_position_from_which_the_rest_of_its_last_commit_is_found_again(owner: Owner) -> None:
    class All:
        start, stop, is_of_key = b"", b"\xff", False

        def changed(self, before: int) -> None: ...

        def go(self) -> None: ...

    async def run() -> None:
        begun = feed.Feed(owner.one, feed.Pace())
        begun.begin(Position(10, 1, "t"))
        begun.note_commit(10, 11, [b"c1", b"c2"])
        begun.note_commit(11, 11, [b"c3", b"c4"])
        begun.note_commit(11, 12, [b"c5"])
        for limit in (1, 2, 3, 4, 5):
            page = begun.since(0, All(), limit)
            assert page is not None
            number = begun.number_at(feed.Point(page.position, ""))
            assert number is not None
            rest = begun.since(number, All(), 10)
            assert rest is not None
            assert {*page.keys, *rest.keys} == {b"c1", b"c2", b"c3", b"c4", b"c5"}

    asyncio.run(run())


@pytest.mark.shows("listener")
def test_a_stream_that_moves_to_another_build_gets_its_states(tmp_path: Path) -> None:
    old, new = Owner(tmp_path / "old"), Owner(tmp_path / "new", owns=False, epoch=5, changelog="d")
    asked = Owner(tmp_path / "asked", owns=False)

    async def run() -> None:
        old.show({"c1": "7.00"})
        new.show({"c1": "70.00"})
        async with (
            stage(old, new, asked) as on,
            on.listening(asked) as of_key,
            on.listening(asked, CHANGES) as of_range,
        ):
            assert await of_key.next() == state("1/0:10@c", "c1", "7.00")
            assert [event.event_id for event in await of_range.some(3)] == ["", None, "1/0:10@c"]
            old.owns, new.owns = False, True
            asked.hear(old)
            asked.hear(new)
            assert await of_key.next() == state("1/0:10@d", "c1", "70.00")
            assert [event.event_id for event in await of_range.some(3)] == ["", None, "1/0:10@d"]

    asyncio.run(run())


def test_the_id_of_an_event_has_each_partitions_changelog() -> None:
    points = {0: feed.Point(12, "a+/-_1"), 1: feed.Point(7, "b"), 2: feed.Point(40, "a+/-_1")}
    reached = part.EventId(3, points)
    assert reached.text == "3/0:12,2:40@a+/-_1;1:7@b"
    assert part.EventId.parse(reached.text) == reached
    assert part.EventId.parse("3/0:12,1:7") == part.EventId(3, {0: feed.Point(12, ""), 1: feed.Point(7, "")})
    assert part.EventId.parse("") is None


def test_an_id_that_no_header_can_have_is_empty_so_that_its_client_begins_with_a_snapshot() -> None:
    def of(partitions: int) -> str:
        return part.EventId(3, dict.fromkeys(range(partitions), feed.Point(10**9, "a" * 22))).text

    assert len(of(400)) > 5_000
    assert of(800) == ""


def test_a_feed_does_not_go_back_to_a_retry_before_its_first_view(owner: Owner) -> None:
    async def run() -> None:
        beginning = feed.Feed(owner.one, feed.Pace())
        owner.commit({"c1": "1.00"}, records=0)
        owner.commit({"c1": "2.00"})
        view = owner.one.view
        assert view is not None
        assert view.position is not None
        beginning.begin(view.position)
        ends = [beginning.end]
        beginning.note_commit(10, 10, [b"c1"])
        ends.append(beginning.end)
        beginning.note_commit(10, 11, [b"c1"])
        ends.append(beginning.end)
        assert ends == [11, 11, 11]

    asyncio.run(run())


def test_the_error_of_a_view_keeps_nothing_that_its_stream_has_read(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class View:
        pass

    views: list[weakref.ref[View]] = []

    def failing(*_: object) -> Generator[None, None, None]:
        view = View()
        views.append(weakref.ref(view))
        yield
        raise ValueError("the model's view")

    async def all_of(listener: Listener) -> None:
        while True:
            await listener.next()

    async def run() -> None:
        monkeypatch.setattr(part.LocalPart, "_scan", failing)
        async with stage(owner) as on:
            async with on.listening(owner, CHANGES) as listener:
                with pytest.raises(AssertionError, match="the stream ended"):
                    await all_of(listener)
            await until(lambda: views[0]() is None)

    with no_collector():
        asyncio.run(run())
