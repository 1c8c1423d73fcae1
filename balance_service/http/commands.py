"""`POST /api/balance.addFunds`: appends one event to the source, nothing more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aiohttp import web

from balance_service.errors import InvalidInputError, RetriableError
from balance_service.http.bodies import add_funds
from balance_service.http.given import Given
from balance_service.http.parameters import IDEMPOTENCY_KEY
from balance_service.http.server.problems import Problem, unavailable

if TYPE_CHECKING:
    from balance_service.commands.publisher import FundsAddedPublisher
    from balance_service.observability.metrics import Metrics

PATH = "/api/balance.addFunds"


class Commands:
    """Takes commands."""

    def __init__(self, publisher: FundsAddedPublisher, metrics: Metrics) -> None:
        self._publisher = publisher
        self._metrics = metrics

    async def add_funds(self, request: web.Request) -> web.Response:
        """Append `FundsAdded`, and answer with the position at which it will be visible."""
        began, status = time.perf_counter(), 500
        try:
            key = Given(request).optional(IDEMPOTENCY_KEY)
            command = add_funds(await request.read())
            try:
                partition, offset = await self._publisher.publish(command.customer_id, command.amount, key)
            except RetriableError as error:
                raise unavailable(str(error)) from error
            status = 202
        except InvalidInputError:
            status = 400
            raise
        except Problem as problem:
            status = problem.status
            raise
        finally:
            self._metrics.command_seconds.labels(str(status)).observe(time.perf_counter() - began)
        return web.Response(status=202, headers={"Balance-Position": f"{partition}:{offset + 1}"})
