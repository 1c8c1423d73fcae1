"""The read models that the settings name, and those that are shipped, bound to their schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.read_models import SHIPPED

if TYPE_CHECKING:
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings


def hosted_models(settings: Settings) -> list[ReadModel]:
    """Those that BALANCE_MODELS names. Raises ConfigurationError: there is none of some name."""
    for name in settings.models:
        if name not in SHIPPED:
            raise ConfigurationError(
                f"BALANCE_MODELS: there is no read model '{name}'; known are {', '.join(sorted(SHIPPED))}"
            )
    return [SHIPPED[name]() for name in dict.fromkeys(settings.models)]


def known_models(settings: Settings) -> list[ReadModel]:
    """The same, and the shipped ones besides: instances answer for those by asking peers."""
    hosted = hosted_models(settings)
    names = {model.name for model in hosted}
    return [*hosted, *(model() for name, model in SHIPPED.items() if name not in names)]
