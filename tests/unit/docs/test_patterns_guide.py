"""The page of patterns: its code runs, section by section, and its models answer what Kafka Streams would."""

from __future__ import annotations

import importlib
import json
import random
import re
from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from balance_service.kafka.topic_specs import prepare_topics
from balance_service.model.json_view import exact_json
from balance_service.model.loading import load_models
from balance_service.model.placing import hosted_stages
from balance_service.settings import load_settings
from balance_service.testing import Driver
from tests.support.documents import ROOT, blocks
from tests.support.fakes import InMemoryTopics

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PAGE = "docs/how-to/patterns.md"
HEAD, *EXAMPLES = (block.text for block in blocks(PAGE) if block.language == "python")
SECTIONS = re.findall(r"^## (.+)$", (ROOT / PAGE).read_text(encoding="utf-8"), re.MULTILINE)
HOUR = timedelta(hours=1)


def run(project: Path, section: str, *, replaced: tuple[str, str] = ("", "")) -> Any:
    """Import a section's code after the code at the top of the page, as a module of the project."""
    number = SECTIONS.index(section)
    code = f"{HEAD}\n\n{EXAMPLES[number]}"
    assert replaced[0] in code
    (project / "shop" / f"pattern{number}.py").write_text(code.replace(*replaced), encoding="utf-8")
    return importlib.import_module(f"shop.pattern{number}")


def shuffles(events: Sequence[Any]) -> list[list[Any]]:
    return [random.Random(seed).sample(events, len(events)) for seed in range(8)]


def answers(model: type, events: Sequence[Any]) -> Any:
    """What a model answers for ada, if each event is a batch."""
    with Driver(model) as driver:
        for event in events:
            driver.given(event)
        return driver.view("ada")


def test_each_section_has_one_example_and_the_table_links_them_all() -> None:
    anchors = [re.sub(r"[^\w -]", "", section.lower()).replace(" ", "-") for section in SECTIONS]

    assert len(SECTIONS) == len(EXAMPLES) == 8
    table = (ROOT / PAGE).read_text(encoding="utf-8").partition("| --- |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| .*\]\(#([^)]+)\)", table, re.MULTILINE) == anchors


@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_of_a_section_runs(project: Path, section: str) -> None:
    run(project, section)


@pytest.mark.parametrize(
    ("section", "code", "wrong"),
    [
        ("Tumbling and hopping windows", "INTERVAL 2 HOURS", "INTERVAL 3 HOURS"),
        ("Windows in one answer", "timedelta(hours=24)", "timedelta(hours=25)"),
        ("Sessions", "timedelta(minutes=30)", "timedelta(minutes=24)"),
        ("Ranges of time", "yyyy-MM-dd", "yyyy-MM"),
        ("Merge of streams", "Refunded.amount", "OrderPlaced.amount"),
        ("Stream-stream join and outer join", "WITHIN = timedelta(hours=1)", "WITHIN = timedelta(hours=2)"),
        ("An aggregate as another model's table", "timestamp_ms=30_000", "timestamp_ms=60_000"),
        ("Masking and branching", "where=~domestic", "where=domestic"),
    ],
)
def test_wrong_code_is_found(project: Path, section: str, code: str, wrong: str) -> None:
    with pytest.raises(AssertionError):
        run(project, section, replaced=(code, wrong))


def test_one_application_can_host_all_models_of_the_page(project: Path) -> None:
    for section in SECTIONS:
        run(project, section)
    models = load_models([f"shop.pattern{number}" for number in range(len(SECTIONS))], {})
    settings, topics = load_settings(application_id="app"), InMemoryTopics()

    prepare_topics(topics, settings, hosted_stages([model() for model in models], settings))  # type: ignore[arg-type]

    assert topics.configs["customer-totals"]["cleanup.policy"] == "compact"
    assert topics.configs["payments-masked"]["cleanup.policy"] == "delete"


def test_windows_are_those_of_kafka_streams_in_any_order(project: Path) -> None:
    page = run(project, "Tumbling and hopping windows")
    recent = run(project, "Windows in one answer")
    orders = [
        page.placed(page.at(f"{hour:02}:{hour * 7 % 60:02}", day), "1.00") for day in (4, 5) for hour in range(1, 24, 3)
    ]
    # Kafka Streams: an event is added to each window that contains it.
    hours = Counter(order.placedAt.replace(minute=0) for order in orders)
    windows: Counter[datetime] = Counter()
    for hour, count in hours.items():
        windows.update({hour - n * HOUR: count for n in range(3)})

    for model, counted in ((page.Hourly, hours), (page.Hopping, windows)):
        with Driver(model) as driver:
            driver.given(*random.Random(1).sample(orders, len(orders)))
            keys = [{"customerId": "ada", "start": f"{start:%Y-%m-%dT%H:%M}"} for start in counted]
            assert [driver.view(key)["orders"] for key in keys] == [*counted.values()]
            assert len(driver.states()) == len(counted)
    for shuffled in shuffles(orders):
        found = answers(recent.RecentHours, shuffled)["hours"]
        assert {one["start"]: one["orders"] for one in found} == {
            start: count for start, count in hours.items() if max(hours) - start < 24 * HOUR
        }


def test_sessions_of_a_day_do_not_depend_on_the_order_of_events(project: Path) -> None:
    page = run(project, "Sessions")
    minutes = [0, 20, 50, 81, 100, 300, 329, 361, 1400]
    orders = [page.placed(page.at("00:00") + timedelta(minutes=minute), "1.00") for minute in minutes]

    for shuffled in shuffles(orders):
        found = answers(page.Visits, shuffled)["sessions"]
        assert [one["orders"] for one in found] == [3, 2, 2, 1, 1]


def test_a_time_at_the_end_of_the_calendar_is_no_fault_of_the_folds(project: Path) -> None:
    windows, sessions = run(project, "Windows in one answer"), run(project, "Sessions")
    ends = [datetime.fromisoformat(f"{day}T12:00:00+00:00") for day in ("0001-01-01", "9999-12-31")]

    for model, page in ((windows.RecentHours, windows), (sessions.Visits, sessions)):
        assert len(answers(model, [page.placed(time, "1.00") for time in (*ends, *ends)])) == 1


def test_the_range_of_days_is_answered_as_shown(project: Path) -> None:
    page = run(project, "Ranges of time")
    (shell,) = [block.text for block in blocks(PAGE) if block.language == "sh"]
    url, answer = re.fullmatch(r"curl '(.*)'\n# (.*)\n", shell).groups()  # type: ignore[union-attr]
    asked = {name: value for name, (value,) in parse_qs(urlsplit(url).query).items()}
    orders = [
        page.placed(page.at("23:59"), "5.00"),
        page.placed(page.at("00:00", day=5), "3.00"),
        page.placed(page.at("12:00", day=3), "4.00"),
        page.placed(page.at("12:00", day=1), "1.00"),
    ]
    with Driver(page.Days()) as driver:
        driver.given(*orders)
        key_type = page.Days().key_type
        first, after = key_type.range(asked["from"], asked["to"], within={"customerId": asked["customerId"]})
        keys = [key_type.fields(key) for key in driver.states() if first <= key < after]
        entries = [{"key": key, "value": driver.view(key)} for key in keys]

    assert exact_json({"entries": entries, "next": None}) == answer
    assert json.loads(answer)["entries"]
