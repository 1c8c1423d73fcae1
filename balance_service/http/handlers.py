"""What answers the routes of an instance: operations from the first on, queries and commands once it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.http.answer import unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from balance_service.http.commands import Taking
    from balance_service.http.dead_letters import DeadLetters
    from balance_service.http.model_queries import ModelQueries
    from balance_service.http.operations import Operations


class Handlers:
    """Queries and commands of an instance, once it has them: the server answers before the engine is up."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.commands: Mapping[str, Taking] = {}
        self.models: ModelQueries | None = None
        self.dead_letters: DeadLetters | None = None

    @property
    def any_model(self) -> ModelQueries:
        """What answers for any read model. Raises Problem 503 while the instance is starting."""
        if self.models is None:
            raise unavailable("this instance is starting")
        return self.models

    @property
    def letters(self) -> DeadLetters:
        """What answers for dead letters. Raises Problem 503 while the instance is starting."""
        if self.dead_letters is None:
            raise unavailable("this instance is starting")
        return self.dead_letters

    async def command(self, name: str, request: web.Request) -> web.StreamResponse:
        """The answer of what takes a command. Raises Problem 503 while the instance is starting."""
        if name not in self.commands:
            raise unavailable("this instance is starting; the event was certainly not written")
        return await self.commands[name].answer(request)
