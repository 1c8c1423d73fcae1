"""The basis of benchmark results: events, medians, ratios, goals, and the order of checkouts."""

from __future__ import annotations

import asyncio
import io
import subprocess
import threading
import time
from contextlib import suppress
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import fastavro
import numpy as np
import pytest

from balance_service.avro.schemas import load_schema
from balance_service.devtools.local.stack import LocalStack
from balance_service.errors import BalanceServiceError
from bench import loads
from bench import run as bench_run
from bench.events import MAX_CENTS, customer_id, encoded
from bench.figures import NAMES, Figures, Key
from bench.first_event import CASE
from bench.generations import (
    CALM,
    OFFLINE,
    WITHOUT,
    Look,
    building_case,
    comparison_case,
    rate_of,
    rebuild_case,
    switch_case,
)
from bench.goals import goal_of, goals_beside
from bench.listeners import cost_case, delay_case
from bench.machine import commit_of
from bench.moves import many_case
from bench.plan import EVENTS, FULL, GENERATIONS, PAIRS, PROXIED, Plan, read_case, replay_case
from bench.plot import REPLAY, plot
from bench.reads import INGRESS_HEADERS
from bench.replay import Replay
from bench.report import Document, document
from bench.requests import ask_all
from bench.run import Run
from bench.schema_ids import Released, ids_case
from bench.sides import BEFORE, OURS, POSTGRESQL, QUIX, THEIRS, OurSide, Side
from bench.sweep import best, least_unless_alike, settings_of, try_all
from bench.tables import LATEST, MADE, PLOTS, SHORT, between_markers, latest, part_of, plot_of, short, whole
from bench.tasks import tasks_case
from bench.watch import Gaps, Watch, gaps_of
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

HEADER = b"\x00\x00\x00\x00\x07"
RATE = Key("replay", replay_case(FULL.events, 100_000), NAMES["rate"])


def test_events_encoded_in_bulk_match_the_schema() -> None:
    customers, cents = np.array([0, 63, 1_000_009, 5]), np.array([1, 127, 128, MAX_CENTS - 1])
    schema = fastavro.parse_schema(load_schema("FundsAdded"))
    ids = set()
    for number, amount, (key, frame) in zip(customers, cents, encoded(HEADER, customers, cents), strict=True):
        body = io.BytesIO(frame.removeprefix(HEADER))
        event = fastavro.schemaless_reader(body, schema, None)
        assert isinstance(event, dict)
        assert not body.read()
        assert key.decode() == event["customerId"] == customer_id(number)
        assert event["amount"] == Decimal(int(amount)).scaleb(-2)
        ids.add(event["id"])
    assert len(ids) == len(customers)


def test_a_ratio_is_the_median_of_the_ratios_of_pairs() -> None:
    figures = Figures()
    for ours, theirs in ((100.0, 50.0), (900.0, 100.0), (300.0, 300.0)):
        figures.add(OURS, "replay", RATE.case, rate=ours)
        figures.add(THEIRS, "replay", RATE.case, rate=theirs, evenness=None)
    assert figures.ratios(RATE) == [2.0, 9.0, 1.0]
    assert figures.ratio(RATE) == 2.0
    assert figures.measured() == [RATE]


def test_a_goal_for_each_pair_is_missed_if_a_value_is_missing() -> None:
    key = Key("restore", "1,000,000 keys", NAMES["keys"])
    figures = Figures()
    for ours in (300.0, 100.0, 500.0):
        figures.add(OURS, key.measure, key.case, keys=ours)
    for theirs in (None, 100.0, 100.0):
        figures.add(THEIRS, key.measure, key.case, keys=theirs)
    assert figures.ratios(key) == [3.0]
    goal = goal_of(key, THEIRS)
    assert goal is not None
    assert goal.is_met(figures, key) is False


def test_a_measurement_with_another_peer_is_compared_with_that_peer() -> None:
    figures = Figures()
    figures.add(OURS, "postgresql", RATE.case, rate=400.0)
    figures.add(POSTGRESQL, "postgresql", RATE.case, rate=100.0)
    key = Key("postgresql", RATE.case, RATE.name)
    assert figures.peer_of(key) == POSTGRESQL
    assert figures.ratio(key) == 4.0
    goal = goal_of(key, THEIRS)
    assert goal is not None
    assert goal.is_met(figures, key) is True


@pytest.mark.parametrize(("ours", "met"), [(249.0, False), (250.0, True)])
def test_a_goal_for_a_ratio_is_met_from_its_bound(ours: float, met: bool) -> None:
    figures = Figures()
    figures.add(OURS, "replay", RATE.case, rate=ours)
    figures.add(THEIRS, "replay", RATE.case, rate=100.0)
    goal = goal_of(RATE, THEIRS)
    assert goal is not None
    assert goal.is_met(figures, RATE) is met


def test_the_goal_for_a_restore_must_be_met_in_each_repetition() -> None:
    key = Key("restore", "1,000,000 keys", NAMES["keys"])
    goal = goal_of(key, THEIRS)
    assert goal is not None
    figures = Figures()
    for ours in (150.0, 130.0, 110.0):
        figures.add(OURS, key.measure, key.case, keys=ours)
        figures.add(THEIRS, key.measure, key.case, keys=100.0)
    assert goal.is_met(figures, key) is True
    figures.add(OURS, key.measure, key.case, keys=109.0)
    figures.add(THEIRS, key.measure, key.case, keys=100.0)
    assert goal.is_met(figures, key) is False


def test_a_comparison_with_an_earlier_checkout_has_the_ratio_to_it() -> None:
    key = Key("freshness", "1,000 events/s", NAMES["cpu_event"])
    figures = Figures(BEFORE)
    figures.add(OURS, key.measure, key.case, cpu_event=70.0)
    figures.add(BEFORE, key.measure, key.case, cpu_event=99.0)
    goal = goal_of(key, BEFORE)
    assert goal is not None
    assert goal.is_met(figures, key) is False
    figures.add(OURS, key.measure, key.case, cpu_event=70.0)
    figures.add(BEFORE, key.measure, key.case, cpu_event=103.0)
    assert goal.is_met(figures, key) is True
    assert goal_of(key, THEIRS) is None


@pytest.mark.parametrize(("peer", "plan"), [(THEIRS, FULL), (BEFORE, PAIRS)])
def test_a_full_run_measures_each_goal_and_each_row_of_the_readme(peer: str, plan: Plan) -> None:
    cases = {("replay", replay_case(plan.events, n)) for n in plan.customers}
    cases |= {("freshness", f"{rate:,} event{'s' if rate > 1 else ''}/s") for rate in plan.rates}
    cases |= {
        ("reads", read_case("local", connections, rate, headers=headers))
        for connections in plan.connections
        for rate in plan.read_rates
        for headers in plan.headers
    }
    assert {(key.measure, key.case) for key in goals_beside(peer)} >= {c for c in cases if c[0] != "reads"}
    if peer == THEIRS:
        cases |= {("replay", replay_case(plan.long_events, plan.customers[0]))}
        cases |= {(measure, replay_case(plan.events, plan.customers[0])) for measure in ("postgresql", "json")}
        cases |= {("scaling", f"{n} instances") for n in (2, 3)} | {("reads", read_case(PROXIED, 16, 0))}
        cases |= {(measure, f"{plan.cards:,} cards") for measure in ("rewards", "own")}
        cases |= {("purchases", f"{plan.invoices:,} invoices")}
        cases |= {("freshness", f"leaderboard, {plan.scores:,} scores/s")}
        cases |= {(GENERATIONS, rebuild_case(plan.events)), (GENERATIONS, comparison_case(plan.keys))}
        cases |= {(GENERATIONS, building_case(plan.tried_rate, bound)) for bound in (None, plan.max_rate)}
        cases |= {(GENERATIONS, switch_case(instances)) for instances in plan.switched}
    cases |= {("restore", f"{plan.keys:,} keys"), ("idle", "one instance"), ("start", "clean, jars present")}
    cases |= {("tasks", tasks_case(models * partitions)) for models, partitions in plan.tasks}
    models, partitions = plan.tasks[-2]
    cases |= {("moves", many_case(models * partitions, what)) for what in ("moves", "stays")}
    cases |= {("ids", ids_case(ids)) for ids in plan.schema_ids} | {("first", CASE)}
    few, many = plan.listeners
    cases |= {("listeners", delay_case(few)), ("listeners", cost_case(many))}
    wanted = {(key.measure, key.case) for key in goals_beside(peer)}
    wanted |= {(key.measure, key.case) for key in SHORT} if peer == THEIRS else set()
    # A goal for this service alone applies with each peer.
    assert {case for case in wanted if not case[1].startswith("leaderboard") or peer == THEIRS} <= cases


def test_the_best_setting_of_kafka_streams_counts_for_each_figure(tmp_path: Path) -> None:
    figures = Figures()
    settings = settings_of(LocalStack(tmp_path), FULL)
    rates, cpus = iter([1.0, 2.0, 9.0, 4.0, 5.0, 6.0]), iter([8.0, 7.0, 6.1, 5.0, 7.0, 7.0])

    def measure(side: Side, to: Figures) -> None:
        to.add(side.name, "replay", RATE.case, rate=next(rates), cpu_with_start=next(cpus))

    tried = try_all(settings, figures, measure)
    fast = best(tried, "rate", RATE.case)
    assert fast.side.variant == "cache on, commits every 1,000 ms"
    assert least_unless_alike(tried, fast, "cpu_with_start", RATE.case).side.variant == (
        "cache off, commits every 1,000 ms"
    )
    assert {key.case for key in figures.measured()} == {
        f"replay, {RATE.case}: cache {cache}, commits every {interval} ms"
        for interval in ("100", "1,000", "5,000")
        for cache in ("on", "off")
    }
    assert {key.measure for key in figures.measured()} == {"sweep"}


def test_a_setting_that_is_hardly_cheaper_is_not_run(tmp_path: Path) -> None:
    cpus = iter([10.2, 10.0, 11.0, 11.0, 11.0, 11.0])

    def measure(side: Side, to: Figures) -> None:
        to.add(side.name, "replay", RATE.case, cpu_with_start=next(cpus))

    tried = try_all(settings_of(LocalStack(tmp_path), FULL), Figures(), measure)
    assert least_unless_alike(tried, tried[0], "cpu_with_start", RATE.case) is tried[0]
    assert least_unless_alike(tried, tried[2], "cpu_with_start", RATE.case) is tried[1]


def test_results_are_saved_after_each_measurement_even_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(_stack: object, side: Side, _load: object, figures: Figures) -> None:
        figures.add(side.name, "restore", "keys", keys=1.0)
        raise BalanceServiceError("it does not get on")

    monkeypatch.setattr(loads, "generate", lambda *_, **__: SimpleNamespace(events=1))
    monkeypatch.setattr(bench_run, "measure_restore", measure)
    monkeypatch.setattr(bench_run, "measure_leaderboard", lambda *_: None)
    figures, kept = Figures(), []
    failures = Run(LocalStack(tmp_path), FULL, figures).measure(
        ["restore", "leaderboard"], lambda: kept.append(len(figures.measured()))
    )
    assert failures == ["restore: it does not get on"]
    assert figures.notes == ["failed: restore: it does not get on"]
    assert kept == [1, 1]


def _told() -> Document:
    figures = Figures()
    for rate in (200.0, 400.0, 300.0):
        figures.add(OURS, "replay", RATE.case, rate=rate)
        figures.add(THEIRS, "replay", RATE.case, rate=200.0)
    figures.add(OURS, "freshness", "1,000 events/s", p50=4.5)
    settings = {OURS: {"commit": "c0ffee"}}
    return document(figures, FULL, "2026-01-01T00:00:00+00:00", {}, settings)


def test_a_table_shows_repetitions_and_spread_and_marks_missed_goals() -> None:
    told = _told()
    assert told["commit"] == "c0ffee"
    table, x = short(told), "\u00d7"
    values = f"300 (200 to 400) | 200 (200 to 200) (Kafka Streams) | 1.50{x} (1.00 to 2.00) | 3"
    assert f"| replay, {RATE.case}: events/s | {values} | **≥ 2.5{x}: missed** |" in table
    # A single value has no median and no spread.
    assert "| freshness, 1,000 events/s: p50, ms | 4.50 |  |  | 1 | ≤ 25: met |" in table


@pytest.mark.parametrize("path", sorted(MADE), ids=lambda path: path.name)
def test_the_documents_show_the_tables_of_the_last_full_run(path: Path) -> None:
    assert between_markers(path.read_text(encoding="utf-8")) == part_of(path)


@pytest.mark.parametrize(
    ("measure", "case", "name", "side", "sentence"),
    [
        ("freshness", "leaderboard, 1,000 scores/s", "p50", OURS, "each with a transaction: {:.0f} ms"),
        ("reads", read_case(PROXIED, 16, 0), "requests", OURS, "takes one hop: {:,.0f} a second"),
        ("reads", read_case(PROXIED, 16, 0), "p99", OURS, "with a p99 of {:.1f} ms"),
        ("replay", replay_case(EVENTS, 10_000), "rate", "", "the rate is {:.2f} times Kafka Streams'"),
        ("replay", replay_case(EVENTS, 10_000), "rate_with_start", "", "{:.2f} times with process start included"),
        ("replay", replay_case(EVENTS, 10_000), "cpu_with_start", "", "the processor time {:.2f} times"),
        ("quix", replay_case(200_000, 100_000), "rate_with_start", QUIX, "200,000 events at {:,.0f} events/s"),
        ("rewards", "100,000 cards", "rate_with_start", "", "reaches {:.2f} times its rate"),
        ("rewards", "100,000 cards", "cpu_with_start", "", "with {:.2f} times the processor time"),
        ("scaling", "2 instances", "of_one", OURS, "together come to {:.2f} and"),
        ("scaling", "3 instances", "of_one", OURS, "and {:.2f} times one instance's rate"),
        ("start", "clean, jars present", "ready", OURS, "**Start**: {:.0f} s to ready"),
        ("start", "clean, jars present", "ready", THEIRS, "to ready, Kafka Streams {:.1f} s"),
        ("restore", "1,000,000 keys", "keys", "", "{:.2f} times as many as Kafka Streams"),
        ("idle", "one instance", "idle", OURS, "**Idle**: {:.1f}% of a core"),
    ],
)
def test_the_page_on_performance_quotes_the_last_full_run(
    measure: str, case: str, name: str, side: str, sentence: str
) -> None:
    key = [measure, case, NAMES[name]]
    (figure,) = [f for f in latest()["figures"] if [f["measure"], f["case"], f["figure"]] == key]
    value = figure["sides"][side]["median"] if side else figure["ratio"]
    page = " ".join((LATEST.parents[2] / "docs/performance.md").read_text(encoding="utf-8").split())

    assert sentence.format(value) in page


@pytest.mark.parametrize("path", sorted(PLOTS), ids=lambda path: path.name)
def test_the_plots_show_the_last_full_run(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == plot_of(path), "run `python -m bench.tables`"


def test_a_plot_has_a_bar_of_each_side_in_proportion() -> None:
    image = ElementTree.fromstring(plot(_told(), REPLAY))

    texts = [text.text for text in image.iter("{http://www.w3.org/2000/svg}text")]
    bars = [bar.get("width") for bar in image.iter("{http://www.w3.org/2000/svg}rect")]
    assert texts == [OURS, "Kafka Streams", "Replay: events/s", RATE.case, "300", "200"]
    assert bars[-2:] == ["410.0", "273.3"]


def test_the_first_side_of_a_pair_alternates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(loads, "generate", lambda *_, **__: None)
    monkeypatch.setattr(bench_run, "measure_freshness", lambda _, side, *__: measured.append(side.name))
    run = Run(LocalStack(tmp_path), PAIRS, Figures(BEFORE), tmp_path)
    assert run.measure(["freshness"]) == []
    assert measured == [OURS, BEFORE, BEFORE, OURS, OURS, BEFORE]


def test_a_partition_of_two_models_counts_once_both_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = OurSide(LocalStack(tmp_path), models=["balance", "activity"]).instance(1, "topic", "application")
    tasks = [
        {"partition": partition, "role": "active", "state": state, "position": position, "restored": 0}
        for partition, state, position in (
            (0, "RUNNING", 7),
            (0, "RUNNING", 5),
            (1, "RUNNING", 9),
            (1, "RESTORING", 0),
            (2, "RUNNING", 9),
        )
    ]
    monkeypatch.setattr(instance, "_tasks", lambda: tasks)
    progress = instance.progress()
    assert progress is not None
    assert progress.running == {0}
    assert progress.applied == instance.committed() == {0: 5, 1: 0}


def test_a_bounded_rate_counts_from_advance_to_advance() -> None:
    looks = [Look(0.0, 0), Look(0.5, 100), Look(1.0, 300), Look(1.5, 300), Look(3.0, 700), Look(3.9, 700)]
    assert rate_of(looks, partitions=1) == pytest.approx(400 / 2)
    assert rate_of(looks[:4], partitions=1) is None


def test_a_goal_with_two_bounds_is_met_between_them_in_each_repetition() -> None:
    key = Key(GENERATIONS, building_case(1_000, 20_000), NAMES["of_most"])
    goal = goal_of(key, THEIRS)
    assert goal is not None
    assert str(goal) == "0.9 to 1.02 in each"
    for values, met in (((0.9, 1.02), True), ((0.95, 0.89, 0.95), False), ((0.95, 1.03, 0.95), False)):
        figures = Figures()
        for value in values:
            figures.add(OURS, key.measure, key.case, of_most=value)
        assert goal.is_met(figures, key) is met


def test_the_longest_silence_of_all_switches_must_meet_its_goal() -> None:
    key = Key(GENERATIONS, switch_case(2), NAMES["silence"])
    goal = goal_of(key, THEIRS)
    assert goal is not None
    figures = Figures()
    assert goal.is_met(figures, key) is None
    for silence in (100.0, 300.0, 100.0):
        figures.add(OURS, key.measure, key.case, silence=silence)
        figures.add(CALM, key.measure, key.case, silence=20.0)
    assert goal.is_met(figures, key) is True
    figures.add(OURS, key.measure, key.case, silence=301.0)
    figures.add(CALM, key.measure, key.case, silence=20.0)
    assert goal.is_met(figures, key) is False


def test_a_table_names_the_peers_of_a_measure_that_has_several() -> None:
    figures = Figures()
    for side, case in ((OFFLINE, rebuild_case(10)), (WITHOUT, building_case(1, None))):
        figures.add(OURS, GENERATIONS, case, rate=20.0)
        figures.add(side, GENERATIONS, case, rate=10.0)
    told = document(figures, FULL, "2026-01-01T00:00:00+00:00", {}, {OURS: {"commit": "c0ffee"}})
    told["machine"] = dict.fromkeys(("cores", "processor", "memory", "system", "Java"), "")
    assert "| 20.00 | 10.00 (rebuild --offline) |" in whole(told)
    assert "| 20.00 | 10.00 (without a rebuild) |" in whole(told)


def test_a_watch_asks_for_customers_in_turn_and_counts_what_is_refused() -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            customer = self.path.rpartition("=")[2]
            asked.append(customer)
            self.send_response(503 if customer == "c2" else 200)
            self.send_header("Balance-Position", f"0:{len(asked)}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    began = time.monotonic()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        instance: Any = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}")
        with Watch([instance], {0: ["c1", "c2"]}, 0.001) as watch:
            eventually(lambda: len(asked) > 10, "some requests were answered")
        server.shutdown()
    ended = time.monotonic()

    assert asked[:4] == ["c1", "c2", "c1", "c2"]
    assert watch.refused(began, ended) == asked.count("c2") * ["503 "]
    assert len(watch.seconds(began, ended)) == asked.count("c1")
    assert watch.refused(ended, ended + 1) == []
    assert watch.seconds(ended, ended + 1) == []
    assert 0 < watch.gaps(began, ended)[0].silence < ended - began


def test_a_gap_ends_with_an_answer_and_a_stall_with_an_answer_that_has_more_events() -> None:
    looks = [(0.0, 4), (1.5, 4), (2.0, 6), (2.5, 5), (4.0, 6), (4.5, 7)]
    assert gaps_of(looks, 1.0, 6.0) == Gaps(silence=1.5, stall=2.5)
    assert gaps_of([], 1.0, 6.0) == Gaps(silence=5.0, stall=5.0)


def test_events_under_another_version_have_its_id_and_its_optional_field() -> None:
    ((_, frame),) = encoded(HEADER, np.array([1]), np.array([100]))
    field = {"name": "release1", "type": ["null", "string"], "default": None}
    shipped = load_schema("FundsAdded")
    released = Released(b"\x00\x00\x00\x00\x08")(frame)
    assert released[:5] == b"\x00\x00\x00\x00\x08"
    body = io.BytesIO(released[5:])
    event = fastavro.schemaless_reader(
        body, fastavro.parse_schema({**shipped, "fields": [*shipped["fields"], field]}), None
    )
    assert isinstance(event, dict)
    assert event["amount"] == Decimal("1.00")
    assert event["release1"] is None
    assert not body.read()


def test_an_earlier_checkout_runs_in_its_folder_with_its_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "earlier/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "logs").mkdir()
    instance = OurSide(LocalStack(tmp_path), tmp_path / "earlier").instance(1, "topic", "application")
    instance.launch()
    log = tmp_path / "logs/instance-1.log"
    eventually(lambda: log.read_text().endswith("\n"), "it has said where it runs")
    instance.stop()
    assert log.read_text() == f"{tmp_path / 'earlier'} -m balance_service serve\n"


def test_a_changed_checkout_is_dirty_unless_only_results_are_new(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        told = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return told.stdout.strip()

    assert commit_of(tmp_path / "none") == "unknown"
    git("init")
    git("commit", "--allow-empty", "--message", "first")
    head = git("rev-parse", "HEAD")
    (tmp_path / "bench/results").mkdir(parents=True)
    (tmp_path / "bench/results/new.json").touch()
    assert commit_of(tmp_path) == head
    (tmp_path / "new.py").touch()
    assert commit_of(tmp_path) == f"{head}-dirty"


def test_a_replay_that_slows_down_is_uneven() -> None:
    looks = [(2.0, 100), (3.0, 200), (4.0, 300), (8.0, 500)]
    run = Replay(0.0, 1.0, 9.0, looks, 500, 10.0, 4.0, 1, [(float(t), 10 if t < 6 else 20) for t in range(10)])
    assert run.rate == pytest.approx(500 / 8)
    assert run.rate_with_start == pytest.approx(500 / 9)
    # 300 of 500 after 4 s, all after 8 s; the time until the last commit is in neither half.
    assert run.second_half == pytest.approx(200 / 4)
    assert run.evenness == pytest.approx((200 / 4) / (300 / 3))
    assert run.memory_growth == pytest.approx(2.0)


def test_rates_exclude_commits_before_every_instance_has_a_partition() -> None:
    run = Replay(0.0, 2.0, 6.0, [(6.0, 500)], 500, 10.0, 4.0, 1, [], before=100)
    assert run.rate == pytest.approx(400 / 4)
    assert run.rate_with_start == pytest.approx(500 / 6)


@pytest.mark.parametrize("looks", [[(2.0, 0), (8.0, 500)], [(2.0, 0), (7.9, 480), (8.0, 500)]])
def test_a_replay_in_one_or_two_commits_has_no_second_half(looks: list[tuple[float, int]]) -> None:
    run = Replay(0.0, 1.0, 8.0, looks, 500, 10.0, 4.0, 1, [])
    assert run.second_half is None
    assert run.evenness is None


async def _heads_of(headers: list[str]) -> set[bytes]:
    heads = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads.add(head)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        seen = await ask_all(url, ["c1"], 1, 0.05, headers)
    assert not seen["failed"]
    return heads


def test_reads_send_the_given_headers() -> None:
    (head,) = asyncio.run(_heads_of([f"{name}: {value}" for name, value in INGRESS_HEADERS.items()]))
    first, _host, *lines = head.decode("ascii").strip().split("\r\n")
    assert first == "GET /api/customers.getBalance?customerId=c1 HTTP/1.1"
    assert dict(line.split(": ", 1) for line in lines) == INGRESS_HEADERS
