"""The business: the read models that this package ships, and what belongs to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from balance_service.read_models.symbols import Symbols

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.read_model import ReadModel

SHIPPED: Mapping[str, type[ReadModel]] = {
    model.name: model for model in (Activity, Balance, Leaderboard, Purchases, Rewards, Symbols)
}
"""By name."""
