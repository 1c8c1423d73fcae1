"""The stages of read models in an application: their topics and names, and those of retries beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.model.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings

_MOST_NAME = 249


def stages_of(model: ReadModel, settings: Settings) -> list[Stage]:
    """The stages of a read model in an application."""
    return placed(model.stages, settings.application_id, settings.topic_of)


def placed(stages: Iterable[Stage], application_id: str, topic_of: Callable[[str], str]) -> list[Stage]:
    """The stages of a read model in an application; each but the first reads what the one before writes.

    Args:
        topic_of: a source as the read model calls it → the topic.
    """
    done: list[Stage] = []
    written_to = ""
    for stage in stages:
        source = done[-1].rekeyed if stage.reads_rekeyed else topic_of(stage.source)
        written_to = written_to or source
        done.append(replace(stage, application_id=application_id, source=source, written_to=written_to))
        if stage.makes is not None:
            written_to = done[-1].rekeyed
    return done


def hosted_stages(models: Iterable[ReadModel], settings: Settings) -> list[Stage]:
    """The stages of the read models that an instance hosts.

    Raises:
        ConfigurationError: two models, or two of their stages, have one name.
    """
    models = [*models]
    by_their_name = {model.name: model for model in models}
    for model in models:
        if (same := by_their_name[model.name]) is not model:
            raise ConfigurationError(
                f"BALANCE_MODELS: {_place(model)} and {_place(same)} are both called '{model.name}'; rename one of them"
            )
    stages = [stage for model in models for stage in stages_of(model, settings)]
    by_name = {stage.name: stage.owner for stage in stages}
    for stage in stages:
        if (other := by_name[stage.name]) != stage.owner:
            raise ConfigurationError(
                f"BALANCE_MODELS: '{stage.owner}' and '{other}' both have a stage '{stage.name}'; rename one of them"
            )
    return stages


def _place(model: ReadModel) -> str:
    return f"{type(model).__module__}:{type(model).__qualname__}"


def stages_of_retries(known: Iterable[ReadModel], settings: Settings) -> list[Stage]:
    """The stages that send other producers' dead letters, a topic each. They have no read model.

    Args:
        known: read models that this application may come to host.

    Raises:
        ConfigurationError: a topic is our own, or a name of ours does not fit.
    """
    of_models = [stage for model in known for stage in stages_of(model, settings)]
    ours = {stage.dead_letters: stage.owner for stage in of_models}
    taken = {stage.name: stage.owner for stage in of_models}
    stages: list[Stage] = []
    for topic in settings.retry_topics:
        name = f"retries-{topic}"
        stage = Stage(
            name=name,
            owner=name,
            source=topic,
            application_id=settings.application_id,
            written_to=topic,
            outputs=(settings.retries_topic,),
            retries=True,
        )
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
        stages.append(stage)
    return stages
