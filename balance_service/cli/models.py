"""The read models that the settings name, and those that are shipped, bound to their schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.model.binding import bound
from balance_service.model.loading import load_models
from balance_service.read_models.shipped import SHIPPED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    return with_shipped(hosted_models(settings))


def with_shipped(hosted: Iterable[ReadModel]) -> list[ReadModel]:
    """Some read models, and the shipped ones besides."""
    by_name = {model.name: model for model in hosted}
    return [*by_name.values(), *(model() for name, model in SHIPPED.items() if name not in by_name)]


def chosen_models(settings: Settings, names: Sequence[str]) -> list[ReadModel]:
    """Those of some names: the name of a model that BALANCE_MODELS names, or as in BALANCE_MODELS.

    Raises as `hosted_models`.
    """
    hosted = {model.name: model for model in load_models(settings.models, SHIPPED)}
    chosen = [[hosted[name]] if name in hosted else load_models([name], SHIPPED, setting="MODEL") for name in names]
    return bound(dict.fromkeys(model for models in chosen for model in models), settings)
