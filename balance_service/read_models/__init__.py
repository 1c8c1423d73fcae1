"""The read models that ship with the service, by name."""

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

_MODELS: tuple[type[ReadModel], ...] = (Activity, Balance, Leaderboard, Purchases, Rewards, Symbols)

SHIPPED: Mapping[str, type[ReadModel]] = {model.name: model for model in _MODELS}
