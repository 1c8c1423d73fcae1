"""The read models by name: every one that a module of this package defines."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from balance_service import read_models
from balance_service.errors import ConfigurationError
from balance_service.read_models.joins import Global
from balance_service.read_models.read_model import ReadModel, registered
from balance_service.settings import Stage

if TYPE_CHECKING:
    from balance_service.read_models.flow import Leg
    from balance_service.settings import Settings


def read_model(name: str) -> ReadModel:
    """The read model of a name.

    Raises:
        ConfigurationError: there is none; the message lists those that there are.
    """
    known = names()
    if name not in known:
        raise ConfigurationError(f"there is no read model '{name}'; known are {', '.join(known)}")
    return registered()[name]()


def hosted_models(settings: Settings) -> list[ReadModel]:
    """Those that an instance hosts. Raises ConfigurationError if there is none of some name."""
    try:
        return [read_model(name) for name in dict.fromkeys(settings.models)]
    except ConfigurationError as error:
        raise ConfigurationError(f"BALANCE_MODELS: {error}") from None


@dataclass(frozen=True, slots=True)
class StageOf:
    """A stage of a read model, and what it does there."""

    read_model: ReadModel
    leg: Leg
    names: Stage
    written_to: str
    """The topic for which the source's records were encoded: most are passed on as they are."""


def stages_of(model: ReadModel, settings: Settings) -> list[StageOf]:
    """The stages of a read model in an application; each but the first reads what the one before writes."""
    stages: list[StageOf] = []
    written_to = settings.topic_of(model.source.topic)
    for leg in model.legs:
        source = settings.topic_of(leg.topic) if leg.is_first else stages[-1].names.rekeyed
        passes_on = leg.by is not None
        outputs = () if passes_on else tuple(output.topic for output in model.outputs)
        joined = dict.fromkeys(join.table for join in leg.joins)
        names = Stage(
            leg.name,
            settings.application_id,
            source,
            passes_on,
            outputs,
            tables=tuple(table.topic for table in joined if not isinstance(table, Global)),
            global_tables=tuple(table.topic for table in joined if isinstance(table, Global)),
            next_table=leg.next_table,
        )
        stages.append(StageOf(model, leg, names, written_to))
        if leg.makes is not None:
            written_to = names.rekeyed
    return stages


def hosted_stages(settings: Settings) -> list[StageOf]:
    """All stages that an instance hosts. Raises ConfigurationError as `hosted_models`, or if two have one name."""
    stages = [stage for model in hosted_models(settings) for stage in stages_of(model, settings)]
    by_name = {stage.names.name: stage.read_model.name for stage in stages}
    for stage in stages:
        if (other := by_name[stage.names.name]) != stage.read_model.name:
            raise ConfigurationError(
                f"BALANCE_MODELS: '{stage.read_model.name}' and '{other}' both have a stage '{stage.names.name}'; "
                "rename one of them"
            )
    return stages


def names() -> list[str]:
    """The names of all read models that are defined here, or anywhere in this process; sorted."""
    _load()
    return sorted(registered())


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(read_models.__path__):
        import_module(f"{read_models.__name__}.{module.name}")
