"""All routes of an instance. A route that is listed here is answered, guarded, traced and documented."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.http.api.collection_routes import collection_routes
from balance_service.http.api.dead_letter_routes import DEAD_LETTER_ROUTES
from balance_service.http.api.key_routes import key_routes
from balance_service.http.api.model_routes import MODEL_ROUTES
from balance_service.http.api.operations_routes import OPERATIONS_ROUTES
from balance_service.http.api.route import Routes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from balance_service.http.commands import Command
    from balance_service.model.read_model import ReadModel


def routes_of(models: Sequence[ReadModel], commands: Iterable[Command]) -> Routes:
    """The routes of an instance that knows some read models, and takes some commands.

    Raises:
        ConfigurationError: two of them would answer the same request.
    """
    taken = [command.route for command in commands]
    own = (*key_routes(models), *collection_routes(models))
    try:
        return Routes((*taken, *own, *MODEL_ROUTES, *DEAD_LETTER_ROUTES, *OPERATIONS_ROUTES))
    except ValueError as error:
        raise ConfigurationError(f"BALANCE_MODELS: {error}") from None
