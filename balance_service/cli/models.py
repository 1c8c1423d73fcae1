"""Read models for commands: those that BALANCE_MODELS or an argument names, and the shipped ones, bound to schemas."""

from __future__ import annotations

from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, NoReturn

from balance_service.errors import RetriableError
from balance_service.model.binding import bind_models
from balance_service.model.class_checks import transforms
from balance_service.model.loading import load_models
from balance_service.model.placing import newest, topics_read
from balance_service.model.schemas import Schemas
from balance_service.read_models import SHIPPED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings


def hosted_models(settings: Settings) -> list[ReadModel]:
    """The models that BALANCE_MODELS names.

    Raises:
        ConfigurationError: a model cannot be loaded, or its declaration is invalid.
        RetriableError: the registry, which has a schema that is needed, does not answer.
    """
    return bind_models(load_models(settings.models, SHIPPED), settings)


def check_models(settings: Settings) -> list[type[ReadModel]]:
    """Returns the models that BALANCE_MODELS names, checked except for what only the registry says.

    Raises:
        ConfigurationError: as `hosted_models`.
    """
    models = load_models(settings.models, SHIPPED)
    for model in models:
        with suppress(RetriableError):
            model(Schemas.beside(model, _not_asked))
    return models


def _not_asked(topic: str, name: str) -> NoReturn:
    raise RetriableError(f"the registry is not asked for {name} of {topic} yet")


def models_of_topic(settings: Settings, topic: str) -> list[ReadModel]:
    """The hosted models, and the shipped ones if none of the hosted reads a topic. Raises as `hosted_models`."""
    hosted = hosted_models(settings)
    if topic in topics_read(hosted, settings):
        return hosted
    return [*hosted, *(model() for model in _shipped_besides(hosted))]


def with_shipped(hosted: Iterable[ReadModel]) -> list[ReadModel]:
    """The newest of these and the shipped models: an instance answers queries to models that its peers host.

    Shipped models with a `transform` are left out, as only Spark can bind them. What peers publish of a model suffices
    to answer for it.
    """
    known = newest(hosted)
    return [*known, *(model() for model in _shipped_besides(known) if not transforms(model))]


def _shipped_besides(known: Iterable[ReadModel]) -> list[type[ReadModel]]:
    names = {model.name for model in known}
    return [model for name, model in SHIPPED.items() if name not in names]


def chosen_models(settings: Settings, names: Sequence[str]) -> list[ReadModel]:
    """Models by their name, if BALANCE_MODELS has them, or as in BALANCE_MODELS. Raises as `hosted_models`."""
    hosted = {model.name: model for model in sorted(load_models(settings.models, SHIPPED), key=attrgetter("version"))}
    chosen = [[hosted[name]] if name in hosted else load_models([name], SHIPPED, setting="MODEL") for name in names]
    return bind_models(dict.fromkeys(model for models in chosen for model in models), settings)
