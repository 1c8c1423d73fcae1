"""The read models that the settings name, and those that are shipped, bound to their schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.hosting.binding import bound
from balance_service.model.loading import load_models
from balance_service.read_models.shipped import SHIPPED

if TYPE_CHECKING:
    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings


def hosted_models(settings: Settings) -> list[ReadModel]:
    """Those that BALANCE_MODELS names.

    Raises:
        ConfigurationError: one cannot be loaded, or cannot be as it is declared.
        RetriableError: the registry is asked for a schema, and does not answer.
    """
    return bound(load_models(settings.models, SHIPPED), settings)


def known_models(settings: Settings) -> list[ReadModel]:
    """The same, and the shipped ones besides: instances answer for those by asking peers."""
    hosted = hosted_models(settings)
    names = {model.name for model in hosted}
    return [*hosted, *(model() for name, model in SHIPPED.items() if name not in names)]
