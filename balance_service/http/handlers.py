"""The handlers behind the routes of an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.http.answer import unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

    from balance_service.http.commands import CommandHandler
    from balance_service.http.dead_letters import DeadLetters
    from balance_service.http.model_queries import ModelQueries
    from balance_service.http.operations import Operations


class Handlers:
    """The handlers of all routes. Those of queries and commands are set after start-up: until then, they answer 503."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.commands: Mapping[str, CommandHandler] = {}
        self.models: ModelQueries | None = None
        self.dead_letters: DeadLetters | None = None

    def model_queries(self) -> ModelQueries:
        """Raises Problem 503 while the instance is starting."""
        if self.models is None:
            raise unavailable("this instance is starting")
        return self.models

    def letters(self) -> DeadLetters:
        """Raises Problem 503 while the instance is starting."""
        if self.dead_letters is None:
            raise unavailable("this instance is starting")
        return self.dead_letters

    async def command(self, name: str, request: web.Request) -> web.StreamResponse:
        """Raises Problem 503 while the instance is starting."""
        if name not in self.commands:
            raise unavailable("this instance is starting; the event was certainly not written")
        return await self.commands[name].answer(request)
