"""The read models that the package ships, and the routes of an instance that knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.schemas import load_schema
from balance_service.hosting.works import Surroundings
from balance_service.http.api.routes import routes_of
from balance_service.kafka.clients import producer_config
from balance_service.model.placing import hosted_stages, stages_of_retries
from balance_service.model.stage import declared_stages
from balance_service.read_models.add_funds import ADD_FUNDS
from balance_service.read_models.shipped import SHIPPED
from tests.support.paths import GET_BALANCE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.kafka.topics import Topic
    from balance_service.model.flow import Stream
    from balance_service.model.read_model import ReadModel
    from balance_service.model.stage import Stage
    from balance_service.settings import Settings

MODELS = tuple(model() for model in SHIPPED.values())
KNOWN = {model.name: model for model in MODELS}
ROUTES = routes_of(MODELS, [ADD_FUNDS])
(CUSTOMER_ID, *_) = next(route.parameters for route in ROUTES if route.path == GET_BALANCE)


def hosted(settings: Settings) -> list[ReadModel]:
    """Those that the settings name."""
    return [KNOWN[name] for name in settings.models]


def stages_in(settings: Settings) -> list[Stage]:
    """All stages that an instance hosts with these settings."""
    return [*hosted_stages(hosted(settings), settings), *stages_of_retries(MODELS, settings)]


def declared(name: str, source: Stream, needed: Iterable[str] = ()) -> tuple[Stage, ...]:
    """The stages of a source whose records are shipped."""
    return declared_stages(name, source, (), needed, lambda record, _topic: load_schema(record))


def surroundings(
    settings: Settings, topics: Any, prepared: Mapping[str, Topic], registry: SchemaRegistry
) -> Surroundings:
    """Those of an engine, on topics that stand in for a broker's; no stage joins."""
    return Surroundings(
        registry=registry,
        partitions=lambda name: prepared[name].partitions,
        topic_id=lambda name: prepared[name].topic_id,
        config=topics.config,
        joined=lambda stage: pytest.fail(f"{stage.name} joins"),
        largest_bytes=int(str(producer_config(settings)["message.max.bytes"])),
        retry_every_ms=int(settings.retry_every_seconds * 1000),
        idempotency_window_ms=int(settings.idempotency_window_seconds * 1000),
    )
