"""The read models by name: every one that a module of this package defines."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.model.flow import Leg
from balance_service.model.joins import Global
from balance_service.model.read_model import ReadModel, registered
from balance_service.settings import Stage

if TYPE_CHECKING:
    from balance_service.settings import Settings

_MOST_NAME = 249


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
    """A stage, and what it does."""

    read_model: ReadModel | None
    """None for one of retries."""
    leg: Leg
    names: Stage
    written_to: str
    """The topic for which the source's records were encoded: most are passed on as they are."""

    @property
    def owner(self) -> str:
        """The read model that it works for, by its name; its own, if it works for none."""
        return self.names.name if self.read_model is None else self.read_model.name


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
            reads_rekeyed=not leg.is_first,
            outputs=outputs,
            tables=tuple(table.topic for table in joined if not isinstance(table, Global)),
            global_tables=tuple(table.topic for table in joined if isinstance(table, Global)),
            next_table=leg.next_table,
        )
        stages.append(StageOf(model, leg, names, written_to))
        if leg.makes is not None:
            written_to = names.rekeyed
    return stages


def stages_of_retries(settings: Settings) -> list[StageOf]:
    """The stages that send other producers' dead letters, a topic each. They have no read model.

    Raises:
        ConfigurationError: a topic is our own, or a name of ours does not fit.
    """
    of_models = [stage for name in names() for stage in stages_of(read_model(name), settings)]
    ours = {stage.names.dead_letters: stage.owner for stage in of_models}
    taken = {stage.names.name: stage.owner for stage in of_models}
    stages: list[StageOf] = []
    for topic in settings.retry_topics:
        name = f"retries-{topic}"
        stage = Stage(name, settings.application_id, topic, outputs=(settings.retries_topic,), retries=True)
        if topic == settings.retries_topic:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: '{topic}' is where retries are sent, so that each would be sent again and "
                "again; name the topic in which their consumer keeps what it cannot process"
            )
        if topic in ours:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: '{topic}' has dead letters of the read model '{ours[topic]}', which heal in "
                "place; leave it out, and see `balance-service dead-letters`"
            )
        if name in taken:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: the stage for '{topic}' would be '{name}', as one of the read model "
                f"'{taken[name]}' is; rename the read model"
            )
        if len(stage.changelog) > _MOST_NAME:
            raise ConfigurationError(
                f"BALANCE_RETRY_TOPICS: '{topic}' is too long, for a topic's name may have {_MOST_NAME} characters and "
                f"ours would be '{stage.changelog}'; shorten BALANCE_APPLICATION_ID"
            )
        stages.append(StageOf(None, Leg(name=name, topic=topic, is_first=True, records=()), stage, topic))
    return stages


def hosted_stages(settings: Settings) -> list[StageOf]:
    """All stages that an instance hosts.

    Raises:
        ConfigurationError: as `hosted_models` and `stages_of_retries`, or two have one name.
    """
    stages = [stage for model in hosted_models(settings) for stage in stages_of(model, settings)]
    by_name = {stage.names.name: stage.owner for stage in stages}
    for stage in stages:
        if (other := by_name[stage.names.name]) != stage.owner:
            raise ConfigurationError(
                f"BALANCE_MODELS: '{stage.owner}' and '{other}' both have a stage '{stage.names.name}'; "
                "rename one of them"
            )
    return stages + stages_of_retries(settings)


def names() -> list[str]:
    """The names of all read models that are defined here, or anywhere in this process; sorted."""
    _load()
    return sorted(registered())


@cache
def _load() -> None:
    read_models = import_module("balance_service.read_models")
    for module in pkgutil.iter_modules(read_models.__path__):
        import_module(f"{read_models.__name__}.{module.name}")
