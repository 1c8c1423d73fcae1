"""Rewards: invoices replayed through a re-key to points and notifications.

A run with more notifications than members' invoices, or a wrong total of points, is invalid.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING

import httpx
import numpy as np

from balance_service.errors import BalanceServiceError
from bench.invoice_replays import created, measure_both, replayed
from bench.invoices import card_number, registered
from bench.sides import OurSide
from bench.sweep import settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balance_service.devtools.local.stack import LocalStack
    from bench.figures import Figures
    from bench.invoices import Invoices
    from bench.plan import Plan
    from bench.sides import Instance, Side

NOTIFICATIONS = "notifications"
_PATH = "/api/customers.getRewards"
_POINTS_OF_A_CENT = Decimal("0.0002")
_CHECKED_CARDS = 300
_ANSWER_SECONDS = 10.0


def measure_rewards(stack: LocalStack, load: Invoices, plan: Plan, figures: Figures, measure: str, model: str) -> None:
    """Measure both sides; the first repetition tries all settings of Kafka Streams, and the fastest counts.

    Args:
        model: ours, a shipped one or a class.

    Raises:
        BalanceServiceError: a side makes no progress, or its output or state is wrong.
    """
    ours, variants = _sides(stack, plan, model)

    def replay(side: Side) -> dict[str, float | None]:
        return replayed(
            stack, side, [NOTIFICATIONS], load.invoices, load.members, lambda instance: _check(side, instance, load)
        )

    measure_both(measure, f"{len(load.cents):,} cards", plan.rewards, figures, ours, variants, replay)


def _sides(stack: LocalStack, plan: Plan, model: str) -> tuple[Side, Sequence[Side]]:
    """Our side, and the settings of Kafka Streams."""
    created(stack, NOTIFICATIONS)
    more = {
        "output-topic": NOTIFICATIONS,
        "notification-schema-id": str(registered(stack, NOTIFICATIONS, "Notification")),
    }
    return OurSide(stack, models=[model]), settings_of(stack, plan, "RewardsStreams", more)


def _check(side: Side, instance: Instance, load: Invoices) -> None:
    known = np.flatnonzero(load.cents)
    chosen = np.random.default_rng(1).choice(known, min(_CHECKED_CARDS, len(known)), replace=False)
    with httpx.Client(timeout=_ANSWER_SECONDS, trust_env=False) as client:
        for number in chosen.tolist():
            wanted = int(load.cents[number]) * _POINTS_OF_A_CENT
            answer = client.get(instance.url + _PATH, params={"customerCardNo": card_number(number)})
            if answer.is_error or Decimal(str(answer.json(parse_float=Decimal)["points"])) != wanted:
                raise BalanceServiceError(
                    f"{side.name} is wrong: {card_number(number)} has {wanted}, the answer was {answer.text}"
                )
