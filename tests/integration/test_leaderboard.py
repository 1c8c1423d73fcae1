"""The leaderboard on a broker: scores joined with players and games as of their time, exactly once."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.engine.joined_tables import JoinedTables
from balance_service.engine.table_partition import TableRows
from balance_service.errors import NotAuthorizedError, RetriableError
from balance_service.kafka.log_reader import reader_to_end
from balance_service.model.keys import ColumnKey
from tests.integration.engines import running_engine, settings_for
from tests.support.kafka import Rows
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from confluent_kafka import Message

    from balance_service.devtools.local.stack import LocalStack
    from balance_service.engine.table_store import Version
    from balance_service.hosting.engine import Engine
    from balance_service.settings import Settings

SECONDS = 60.0
# A waiting task retries after two seconds; the test observes it for five.
_LOOKED_AT_AGAIN_SECONDS = 5.0
KEY = ColumnKey("product_id", is_number=True)
_ids = itertools.count(random.randrange(1 << 40))


class Games:
    """Produces players, games and scores. All tests share the topics; each test uses its own ids."""

    def __init__(self, stack: LocalStack) -> None:
        self.players = Rows(stack, "players", "Player")
        self.products = Rows(stack, "products", "Product")
        self.scores = Rows(stack, "score-events", "ScoreEvent")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rows in (self.players, self.products, self.scores):
            rows.__exit__()

    def player(self, player: int, name: str | None, **more: Any) -> None:
        self.players.put(str(player), None if name is None else {"id": player, "name": name}, **more)
        self.players.flush()

    def game(self, name: str) -> int:
        """Produces a game and returns its id."""
        product = next(_ids)
        self.products.put(str(product), {"id": product, "name": name})
        self.products.flush()
        return product

    def score(self, product: int, player: int, score: float, **more: Any) -> None:
        self.scores.put(None, {"score": score, "product_id": product, "player_id": player}, **more)
        self.scores.flush()


@pytest.fixture
def games(stack: LocalStack) -> Iterator[Games]:
    with Games(stack) as told:
        yield told


@pytest.fixture
def settings(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> Settings:
    return settings_for(stack, names, tmp_path / "first", models="leaderboard")


def test_a_grant_revoked_while_a_task_waits_for_a_table_is_reported_and_waited_for(
    settings: Settings, games: Games, monkeypatch: pytest.MonkeyPatch
) -> None:
    catches_up, away = JoinedTables.catch_up, [RetriableError("the broker is away"), NotAuthorizedError("no grant")]

    def catch_up(joined: JoinedTables, partition: int, should_stop: Callable[[], bool]) -> None:
        for error in away[:1]:
            raise error
        catches_up(joined, partition, should_stop)

    with running_engine(settings) as engine:
        game, player = games.game("Slow"), next(_ids)
        games.player(player, "Slow")
        joining = engine.stages["leaderboard-by-product_id"]
        eventually(lambda: {task.state for task in joining.snapshots()} == {"RUNNING"}, "all tasks run", SECONDS)
        monkeypatch.setattr(JoinedTables, "catch_up", catch_up)
        games.score(game, player, 1.0)
        while away:
            eventually(
                lambda: str(away[0]) in [task.reason for task in joining.snapshots() if task.state == "WAITING"],
                lambda: str(joining.snapshots()),
                SECONDS,
            )
            away.pop(0)
        wait_for(engine, game, [("Slow", "Slow", 1.0)])


def best(engine: Engine, product: int) -> list[tuple[str, str, float]]:
    """Returns player, game and score of a game's high scores in the stores of the engine."""
    tasks = engine.models["leaderboard"]
    for task in tasks.all():
        view = task.view
        frame = None if view is None else view.get(KEY.encode(product))
        if frame is not None:
            entries = tasks.hosted.state(frame)["entries"]
            return [(entry["playerName"], entry["gameName"], entry["score"]) for entry in entries]
    return []


def wait_for(engine: Engine, product: int, expected: list[tuple[str, str, float]]) -> None:
    eventually(
        lambda: best(engine, product) == expected,
        lambda: f"{best(engine, product)} {engine.problems} {engine.tables.snapshots()}",
        SECONDS,
    )


def records(engine: Engine, name: str) -> list[Message]:
    """Returns all committed records of a topic."""
    topic = engine.topics.find(name)
    assert topic is not None
    with reader_to_end(engine.settings, engine.topics, topic) as reader:
        return list(reader)


def joined_of(engine: Engine, product: int) -> int:
    """Returns the number of joined scores of a game that were passed on."""
    passed_on = records(engine, engine.stages["leaderboard-by-product_id"].hosted.stage.rekeyed)
    return sum(message.key() == KEY.encode(product) for message in passed_on)


def letters(engine: Engine, player: int) -> list[str]:
    """Returns the causes of the dead letters of a player's scores."""
    source = engine.stages["leaderboard-by-product_id"].hosted.stage.dead_letters
    causes = []
    for message in records(engine, source):
        if message.key() == str(player).encode():
            cause = dict(message.headers() or [])["dead-letter-cause"]
            assert isinstance(cause, bytes)
            causes.append(cause.decode())
    return causes


@pytest.mark.shows("joined")
def test_scores_are_joined_ranked_and_emitted_with_their_versions(settings: Settings, games: Games) -> None:
    racer, isabelle, kazuya = next(_ids), next(_ids), next(_ids)
    with running_engine(settings) as engine:
        game = games.game("Racing")
        games.player(isabelle, "Isabelle")
        games.player(kazuya, "Kazuya")
        games.player(racer, "Racer")
        for player, score in [(isabelle, 1000.0), (kazuya, 3000.0), (racer, 2500.0), (isabelle, 2000.0), (racer, 5.0)]:
            games.score(game, player, score)

        wait_for(
            engine, game, [("Kazuya", "Racing", 3000.0), ("Racer", "Racing", 2500.0), ("Isabelle", "Racing", 2000.0)]
        )
        # The last score changes nothing of the ranking, so the ranking does not show that it was joined.
        eventually(lambda: joined_of(engine, game) == 5, "all scores are joined", SECONDS)
        joined = [
            dict(message.headers() or [])
            for message in records(engine, engine.stages["leaderboard-by-product_id"].hosted.stage.rekeyed)
            if message.key() == KEY.encode(game)
        ]
        assert all(headers.keys() == {"origin", "sent-by", "playerVersion", "productVersion"} for headers in joined)
        sent = [message for message in records(engine, "high-scores") if message.key() == KEY.encode(game)]
        schema = load_schema("HighScores")
        codec = AvroCodec(engine.registry, subject_of("high-scores", schema), schema)
        value = sent[-1].value()
        assert value is not None
        assert [entry["score"] for entry in codec.decode(value)["entries"]] == [3000.0, 2500.0, 2000.0]


@pytest.mark.shows("joined")
def test_a_score_that_follows_its_player_always_finds_it(settings: Settings, games: Games) -> None:
    with running_engine(settings) as engine:
        game = games.game("Rush")
        for number in range(30):
            player = next(_ids)
            games.player(player, f"player {number}")
            games.score(game, player, float(number))
            wait_for(engine, game, [(f"player {n}", "Rush", float(n)) for n in range(number, max(-1, number - 3), -1)])


def test_a_score_of_an_unknown_or_deleted_player_is_a_dead_letter(settings: Settings, games: Games) -> None:
    known, unknown, gone = next(_ids), next(_ids), next(_ids)
    with running_engine(settings) as engine:
        game = games.game("Lost")
        games.player(known, "Known")
        games.player(gone, "Gone")
        games.player(gone, None)
        games.score(game, unknown, 9.0)
        games.score(game, gone, 8.0)
        games.score(game, known, 1.0)

        wait_for(engine, game, [("Known", "Lost", 1.0)])
        eventually(
            lambda: letters(engine, unknown) == letters(engine, gone) == ["join-missing"],
            "both scores are dead letters",
        )


@pytest.mark.shows("joined")
def test_a_score_is_joined_with_the_player_at_its_own_time(settings: Settings, games: Games) -> None:
    player, now = next(_ids), int(time.time() * 1000)
    with running_engine(settings) as engine:
        game = games.game("Then")
        games.player(player, "before", timestamp=now - 60_000)
        games.player(player, "after", timestamp=now)
        for score, at in [(1.0, now - 90_000), (2.0, now - 30_000), (3.0, now)]:
            games.score(game, player, score, timestamp=at)

        wait_for(engine, game, [("after", "Then", 3.0), ("before", "Then", 2.0), ("before", "Then", 1.0)])


@pytest.mark.shows("joined")
def test_a_restored_leaderboard_equals_the_original(settings: Settings, games: Games, tmp_path: Path) -> None:
    player = next(_ids)
    expected = [("first name", "Again", 2.0), ("first name", "Again", 1.0)]
    with running_engine(settings) as engine:
        game = games.game("Again")
        games.player(player, "first name")
        games.score(game, player, 1.0)
        games.score(game, player, 2.0)
        wait_for(engine, game, expected)
        joined = joined_of(engine, game)
    games.player(player, "second name")
    elsewhere = settings.model_copy(update={"state_dir": tmp_path / "second"})
    with running_engine(elsewhere) as engine:
        wait_for(engine, game, expected)
        games.score(game, player, 3.0)
        wait_for(engine, game, [("second name", "Again", 3.0), *expected])
        assert (joined, joined_of(engine, game)) == (2, 3)


@pytest.mark.shows("table-apart")
def test_a_table_that_is_not_read_blocks_only_the_stages_that_join_it(
    settings: Settings, games: Games, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, may_read, player = TableRows.of, threading.Event(), next(_ids)

    def read_once_allowed(rows: TableRows, message: Message) -> tuple[bytes, Version] | None:
        if message.key() == str(player).encode():
            may_read.wait(SECONDS)
        return reads(rows, message)

    monkeypatch.setattr(TableRows, "of", read_once_allowed)
    with running_engine(settings) as engine:
        game = games.game("Slow")
        games.player(player, "Slow")
        games.score(game, player, 1.0)
        joining = engine.stages["leaderboard-by-product_id"]

        def waits() -> bool:
            reasons = [task.reason for task in joining.snapshots() if task.state == "WAITING"]
            return any("the table players" in reason and "is not read to its end" in reason for reason in reasons)

        eventually(waits, lambda: str(joining.snapshots()), SECONDS)
        waiting = {task.task_id for task in joining.snapshots() if task.state == "WAITING"}
        seen, until = set(), time.monotonic() + _LOOKED_AT_AGAIN_SECONDS
        while time.monotonic() < until:
            seen |= {task.state for task in joining.snapshots() if task.task_id in waiting}
            time.sleep(0.02)
        assert seen == {"WAITING"}
        others = [tasks for tasks in engine.stages.values() if tasks is not joining]
        assert {task.state for tasks in others for task in tasks.snapshots()} == {"RUNNING"}
        may_read.set()
        wait_for(engine, game, [("Slow", "Slow", 1.0)])
        assert letters(engine, player) == []


@pytest.mark.shows("owner")
def test_a_stage_has_the_lease_of_the_topic_that_it_reads(settings: Settings) -> None:
    with running_engine(settings) as engine:
        of = engine.memberships.of
        eventually(
            lambda: not engine.memberships.unconfirmed and not engine.memberships.joining, "leases hold", SECONDS
        )
        for one in of.values():
            one.stop()
            without = {stage.hosted.source.name for stage in engine.stages.values() if not stage.hosted.lease.holds}
            assert without == {topic for topic, other in of.items() if not other.lease.holds}
            assert one._topic in without

    assert len(of) > 1
