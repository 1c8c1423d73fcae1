"""The read models that the package ships, their routes, and the parts of an engine that a test provides."""

from __future__ import annotations

import atexit
import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.schemas import load_schema
from balance_service.engine.assembly import StageServices
from balance_service.http.app import routes_of
from balance_service.kafka.clients import producer_config
from balance_service.model.placing import hosted_stages, stages_of_retries
from balance_service.model.sources import declared_stages
from balance_service.process.scratch import temporary_scratch
from balance_service.read_models import SHIPPED
from balance_service.read_models.add_funds import ADD_FUNDS
from tests.support.api import GET_BALANCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.http.requests import KeyParameters
    from balance_service.kafka.topics import Topic
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Stream
    from balance_service.process.scratch import Scratch
    from balance_service.settings import Settings

MODELS = tuple(model() for model in SHIPPED.values())
KNOWN = {model.name: model for model in MODELS}
ROUTES = routes_of(MODELS, [ADD_FUNDS])
GET_BALANCE_PARAMETERS = cast(
    "type[KeyParameters]", next(route.parameters for route in ROUTES if route.path == GET_BALANCE)
)


def hosted(settings: Settings) -> list[ReadModel]:
    """Returns the read models that the settings name."""
    return [KNOWN[name] for name in settings.models]


def stages_in(settings: Settings) -> list[Stage]:
    """Returns all stages that an instance hosts with these settings."""
    return [*hosted_stages(hosted(settings), settings), *stages_of_retries(MODELS, settings)]


def declared(name: str, source: Stream, needed: Iterable[str] = ()) -> tuple[Stage, ...]:
    """Returns the stages of a source that reads records with shipped schemas."""
    return declared_stages(name, [source], (), needed, lambda record, _topic: load_schema(record))


def surroundings(
    settings: Settings, topics: Any, prepared: Mapping[str, Topic], registry: SchemaRegistry
) -> StageServices:
    """Returns the surroundings of an engine on fake topics, without joins."""
    return StageServices(
        schemas=OwnSchemas(registry),
        partitions=lambda name: prepared[name].partitions,
        topic_id=lambda name: prepared[name].topic_id,
        config=topics.config,
        joined=lambda stage: pytest.fail(f"{stage.name} joins"),
        largest_bytes=int(str(producer_config(settings)["message.max.bytes"])),
        retry_every_ms=int(settings.retry_every_seconds * 1000),
        idempotency_window_ms=int(settings.idempotency_window_seconds * 1000),
    )


@functools.cache
def jvm_scratch() -> Scratch:
    """Returns the scratch directory of Spark's JVM, which outlives each engine of the process; removed at exit."""
    cleanup = ExitStack()
    atexit.register(cleanup.close)
    return cleanup.enter_context(temporary_scratch())
