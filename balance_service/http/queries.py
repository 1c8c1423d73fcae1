"""`GET /api/customers.getBalance`: answered from the local store, or by the owner, one hop away."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from balance_service.errors import RetriableError, StoreCorruptedError
from balance_service.http.parameters import balance_query
from balance_service.http.problems import Problem, response, unavailable
from balance_service.http.proxy import FORWARDED_HEADER, PeerAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from decimal import Decimal

    from balance_service.http.parameters import BalanceQuery
    from balance_service.http.proxy import Proxy
    from balance_service.http.routing import LocalAnswer, Routing
    from balance_service.metrics import Metrics

PATH = "/api/customers.getBalance"
_MISDIRECTED = 421
_LOOK_AGAIN_SECONDS = 0.01
_REFRESH_SECONDS = 0.3
_HEADROOM_SECONDS = 0.1


class Queries:
    """Answers balance queries."""

    def __init__(
        self,
        routing: Routing,
        proxy: Proxy,
        address: str,
        view: Callable[[bytes], Mapping[str, Any]],
        on_damage: Callable[[int, StoreCorruptedError], None],
        timeout_seconds: float,
        metrics: Metrics,
    ) -> None:
        """Args:
        view: framed state → what the query answers.
        on_damage: told that the store of a partition is damaged.
        """
        self._routing = routing
        self._proxy = proxy
        self._address = address
        self._view = view
        self._on_damage = on_damage
        self._timeout_seconds = timeout_seconds
        self._metrics = metrics

    async def get_balance(self, request: web.Request) -> web.Response:
        """A customer's balance, from its owner."""
        began = time.perf_counter()
        answered, status = "none", 500
        try:
            query = balance_query(request)
            partition = self._routing.partition_of(query.key)
            if query.min_position is not None and query.min_position[0] != partition:
                raise Problem(
                    400, f"minPosition is of partition {query.min_position[0]}, the customer's is {partition}"
                )
            deadline = time.monotonic() + self._timeout_seconds
            local = await self._local(partition, query, deadline)
            if local is not None:
                answered, answer = "local", self._answer(partition, local)
            elif FORWARDED_HEADER in request.headers:
                raise Problem(_MISDIRECTED, f"{self._address} does not own partition {partition}")
            else:
                answered, answer = "proxied", await self._proxied(partition, query, deadline)
            status = answer.status
            return answer
        except Problem as problem:
            status = problem.status
            raise
        finally:
            elapsed = time.perf_counter() - began
            self._metrics.query_seconds.labels(answered, str(status)).observe(elapsed)

    async def _local(self, partition: int, query: BalanceQuery, deadline: float) -> LocalAnswer | None:
        """The owner's answer, at or after the wanted position; None if this instance is not the owner."""
        wanted = query.min_position[1] if query.min_position is not None else 0
        while True:
            try:
                answer = self._routing.read(partition, query.key)
            except StoreCorruptedError as error:
                self._on_damage(partition, error)
                raise unavailable("the local store is damaged and is being restored") from error
            if answer is None or answer.position.offset >= wanted:
                return answer
            if time.monotonic() >= deadline:
                raise unavailable(f"position {partition}:{wanted} was not reached in time")
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _proxied(self, partition: int, query: BalanceQuery, deadline: float) -> web.Response:
        """The owner's answer through it; asks once more if the owner has changed meanwhile.

        A query that waits for a position goes on asking: it outlasts a partition's move where its deadline
        does.
        """
        reason = f"nobody is known to own partition {partition} now"
        for attempt in itertools.count():
            if attempt:
                left = deadline - time.monotonic()
                if left <= 0 or (attempt > 1 and query.min_position is None):
                    break
                await asyncio.sleep(min(_REFRESH_SECONDS, left))
                # It may have become ours.
                local = await self._local(partition, query, deadline)
                if local is not None:
                    return self._answer(partition, local)
            owner, left = self._routing.owner(partition), deadline - time.monotonic()
            if owner is None or left <= 0:
                continue
            try:
                answer = await self._proxy.get(
                    owner.address, PATH, query.parameters(), self._address, left + _HEADROOM_SECONDS
                )
            except RetriableError as error:
                reason = str(error)
                continue
            if answer.status != _MISDIRECTED:
                return _passed_on(answer)
            reason = f"{owner.address} no longer owns partition {partition}"
        raise unavailable(reason)

    def _answer(self, partition: int, local: LocalAnswer) -> web.Response:
        headers = {
            "Balance-Application-Server": self._address,
            "Balance-Role": "active",
            "Balance-Position": f"{partition}:{local.position.offset}",
            "Balance-Epoch": str(local.position.epoch),
        }
        if local.lag is not None:
            headers["Balance-Lag"] = str(local.lag)
        if local.frame is None:
            return response(Problem(404, "no such customer"), headers)
        body = exact_json(self._view(local.frame)).encode()
        return web.Response(body=body, content_type="application/json", headers=headers)


def exact_json(view: Mapping[str, Any]) -> str:
    """A flat JSON object of decimals, with exactly their digits."""
    return "{" + ", ".join(f'"{name}": {_digits(value)}' for name, value in view.items()) + "}"


def _digits(value: Decimal) -> str:
    return format(value, "f")


def _passed_on(answer: PeerAnswer) -> web.Response:
    return web.Response(
        status=answer.status, body=answer.body, content_type=answer.content_type, headers=dict(answer.headers)
    )
