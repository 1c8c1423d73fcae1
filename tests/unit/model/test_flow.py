"""The flow of a read model's events: its graph, and the flowchart of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.model.flow import Edge, Node, flow_of, mermaid
from balance_service.model.folds import Count, RunningSum
from balance_service.model.placing import stages_of
from balance_service.read_models.balance import Balance
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from balance_service.settings import load_settings
from tests.support.composite import SpentPerDay
from tests.support.fakes import FakeAnalysis

if TYPE_CHECKING:
    import pytest


def test_the_flow_leads_from_the_topic_over_the_stage_to_the_states() -> None:
    settings = load_settings(topic="money")
    topic, stage, states = (
        Node("n0", "topic", "money"),
        Node("n1", "stage", "balance"),
        Node("n2", "states", "BalanceState"),
    )

    flow = flow_of(Balance(), stages_of(Balance(), settings))

    assert flow.nodes == [topic, stage, states]
    assert flow.edges == [Edge(topic, stage, "records"), Edge(stage, states, "states")]


def test_the_flowchart_is_drawn_from_the_declaration() -> None:
    settings = load_settings(application_id="app")

    assert mermaid(flow_of(Rewards(), stages_of(Rewards(), settings))).splitlines() == [
        "flowchart LR",
        '    n0[("pos")]',
        '    n1["rewards-by-customerCardNo"]',
        '    n0 -->|"customerType = PRIME"| n1',
        '    n2[("app-rewards-by-customerCardNo")]',
        '    n1 -->|"by customerCardNo"| n2',
        '    n3["rewards"]',
        '    n2 -->|"transform"| n3',
        '    n4[["Rewards"]]',
        "    n3 --- n4",
        '    n5[("notifications")]',
        '    n3 -->|"Notification"| n5',
    ]
    assert '-->|"lower(deliveryType) = home-delivery"|' in mermaid(
        flow_of(Purchases(), stages_of(Purchases(), settings))
    )


def test_the_plan_of_a_transform_goes_with_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAnalysis.take_place(monkeypatch)
    attributes: dict[str, Any] = {"transform": lambda _self, events: events, "total": RunningSum("amount")}
    model = type("Spent", (SpentPerDay,), {**attributes, "purchases": Count()})()

    flow = flow_of(model, stages_of(model, load_settings(application_id="app")))

    assert flow.edges[0].label == "transform"
    assert [plan.splitlines() for plan in flow.plans] == [
        [
            "Stage spent-per-day-by-card-day of topic purchases",
            *FakeAnalysis.explained.splitlines(),
            "columns read: amount, card, day",
            "columns made: card, day, amount",
            "re-keyed by card, day, to app-spent-per-day-by-card-day",
        ]
    ]
