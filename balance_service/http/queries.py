"""`GET /api/customers.getBalance`: answered from the local store, or by the owner or a standby, one hop away."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from balance_service.errors import BalanceServiceError, RetriableError, StoreCorruptedError
from balance_service.http.parameters import BalanceQuery, balance_query
from balance_service.http.problems import PROBLEM_JSON, Problem, body_of, headers_of, unavailable
from balance_service.http.proxy import FORWARDED_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from decimal import Decimal

    from prometheus_client import Histogram

    from balance_service.http.answers import PeerAnswer
    from balance_service.http.proxy import Proxy
    from balance_service.http.routing import LocalAnswer, Routing
    from balance_service.metrics import Metrics

PATH = "/api/customers.getBalance"
_MISDIRECTED = 421
_UNAVAILABLE = 503
_LOOKED_UP = (200, 404)
_OUTCOMES = {_MISDIRECTED: "misdirected", _UNAVAILABLE: "unavailable"}
_JSON = "application/json"
_PROBLEM = f"{PROBLEM_JSON}; charset=utf-8"
_NO_SUCH_CUSTOMER = body_of(Problem(404, "no such customer")).encode()
_LOOK_AGAIN_SECONDS = 0.01
_REFRESH_SECONDS = 0.3
_HEADROOM_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class BalanceAnswer:
    """What is answered, from the local store or by a peer; `headers` are those of this API."""

    status: int
    body: bytes
    content_type: str
    headers: Mapping[str, str]

    @classmethod
    def of(cls, problem: Problem) -> BalanceAnswer:
        """A problem."""
        return cls(problem.status, body_of(problem).encode(), _PROBLEM, headers_of(problem))

    def response(self) -> web.Response:
        """The same as aiohttp's."""
        headers = {**self.headers, "Content-Type": self.content_type}
        return web.Response(status=self.status, body=self.body, headers=headers)


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
        self._observed: dict[tuple[str, int], Histogram] = {}

    async def get_balance(self, request: web.Request) -> web.Response:
        """A customer's balance, from its owner; from a standby too, if the query says how recent it must be."""
        answer = await self._observed_answer(
            lambda: balance_query(request), is_forwarded=FORWARDED_HEADER in request.headers
        )
        return answer.response()

    async def answer(self, key: bytes) -> BalanceAnswer:
        """The same to a query of a client with no more than a customer.

        Raises:
            Problem: as `get_balance`.
        """
        return await self._observed_answer(lambda: BalanceQuery(key.decode()), is_forwarded=False)

    def at_once(self, key: bytes) -> BalanceAnswer | None:
        """The owner's answer to a query with no more than a customer, if this instance is that.

        None if it is not, or has anything else to say: `get_balance` will say it.
        """
        began = time.perf_counter()
        partition = self._routing.partition_of(key)
        try:
            local = self._routing.read(partition, key)
            if local is None or not local.is_owner:
                return None
            answer = self._answer(partition, local)
        except (BalanceServiceError, Problem):
            return None
        self._observe("local", answer.status, began)
        return answer

    async def _observed_answer(self, parse: Callable[[], BalanceQuery], *, is_forwarded: bool) -> BalanceAnswer:
        began = time.perf_counter()
        answered, status = "none", 500
        try:
            query = parse()
            partition = self._routing.partition_of(query.key)
            if query.min_position is not None and query.min_position[0] != partition:
                raise Problem(
                    400, f"minPosition is of partition {query.min_position[0]}, the customer's is {partition}"
                )
            deadline = time.monotonic() + self._timeout_seconds
            local = await self._local(partition, query, deadline, is_forwarded=is_forwarded)
            if local is not None:
                answered, answer = "local", self._answer(partition, local)
            else:
                answered, answer = "proxied", await self._proxied(partition, query, deadline)
            status = answer.status
            return answer
        except Problem as problem:
            status = problem.status
            raise
        finally:
            self._observe(answered, status, began)

    async def _local(
        self, partition: int, query: BalanceQuery, deadline: float, *, is_forwarded: bool
    ) -> LocalAnswer | None:
        """An answer from here that is recent enough; None if others are to be asked.

        The owner waits for the wanted position, for nobody knows more. So does a standby that was asked by a peer, for
        that is not to be passed on.
        """
        while True:
            local = self._read(partition, query)
            if local is not None and _is_recent_enough(local, query):
                return local
            may_answer = local is not None and (local.is_owner or query.takes_standbys)
            if is_forwarded and not may_answer:
                raise Problem(_MISDIRECTED, f"{self._address} does not own partition {partition}")
            if local is None or not (local.is_owner or is_forwarded):
                return None
            if _is_reached(local, query):
                behind = "an unknown number of" if local.lag is None else local.lag
                raise unavailable(f"{self._address} is {behind} records behind, and maxLag is {query.max_lag}")
            if time.monotonic() >= deadline:
                raise unavailable(f"position {partition}:{_wanted(query)} was not reached in time")
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    def _read(self, partition: int, query: BalanceQuery) -> LocalAnswer | None:
        try:
            return self._routing.read(partition, query.key)
        except (StoreCorruptedError, RetriableError) as error:
            refusal = self._refusal(partition, error)
        # Not from the error: its frames hold the view, and that the lock of the store that is to be made anew.
        if query.takes_standbys:
            return None
        raise refusal

    def _refusal(self, partition: int, error: StoreCorruptedError | RetriableError) -> Problem:
        """What is answered where the local store, or a state in it, cannot be read."""
        if isinstance(error, RetriableError):
            return unavailable(str(error))
        self._on_damage(partition, error)
        return unavailable("the local store is damaged and is being restored")

    async def _proxied(self, partition: int, query: BalanceQuery, deadline: float) -> BalanceAnswer:
        """A peer's answer; asks all who may have one once more if that fails, for the owner may have changed.

        A query that waits for a position goes on asking: it outlasts a partition's move where its deadline does.
        """
        refusal = unavailable(f"nobody is known to own partition {partition} now")
        for attempt in itertools.count():
            if attempt:
                left = deadline - time.monotonic()
                if left <= 0 or (attempt > 1 and query.min_position is None):
                    break
                await asyncio.sleep(min(_REFRESH_SECONDS, left))
                # It may have become ours.
                local = await self._local(partition, query, deadline, is_forwarded=False)
                if local is not None:
                    return self._answer(partition, local)
            # A copy here may be recent enough by the second time.
            has_copy = not attempt and query.takes_standbys and self._routing.has_copy(partition)
            for address, seconds, is_last in self._candidates(partition, query, deadline, has_copy=has_copy):
                try:
                    answer = await self._proxy.get(address, PATH, query.parameters(), self._address, seconds)
                except RetriableError as error:
                    self._metrics.proxied(address, "failed")
                    refusal = unavailable(str(error))
                    continue
                if answer.status in _LOOKED_UP and not _is_of(answer, address, query):
                    self._metrics.proxied(address, "failed")
                    refusal = unavailable(f"what answers at {address} is not the instance that was asked")
                    continue
                self._metrics.proxied(address, _OUTCOMES.get(answer.status, "answered"))
                if answer.status == _MISDIRECTED:
                    refusal = unavailable(f"{address} no longer owns partition {partition}")
                elif is_last or answer.status != _UNAVAILABLE:
                    return _passed_on(answer)
        raise refusal

    def _candidates(
        self, partition: int, query: BalanceQuery, deadline: float, *, has_copy: bool
    ) -> Iterator[tuple[str, float, bool]]:
        """Whom to ask, one after the other; for how long; whether it is the last one.

        Half of what is left, while there is somebody else to ask, or a copy here to look at again.
        """
        owner = self._routing.owner(partition)
        servers = [] if owner is None else [owner]
        servers += self._routing.standbys(partition) if query.takes_standbys else []
        for following, server in zip(range(len(servers) - 1, -1, -1), servers, strict=True):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            yield server.address, left / 2 if following or has_copy else left + _HEADROOM_SECONDS, not following

    def _answer(self, partition: int, local: LocalAnswer) -> BalanceAnswer:
        headers = {
            "Balance-Application-Server": self._address,
            "Balance-Role": "active" if local.is_owner else "standby",
            "Balance-Position": f"{partition}:{local.position.offset}",
            "Balance-Epoch": str(local.position.epoch),
        }
        if local.lag is not None:
            headers["Balance-Lag"] = str(local.lag)
        if local.frame is None:
            return BalanceAnswer(404, _NO_SUCH_CUSTOMER, _PROBLEM, headers)
        try:
            view = self._view(local.frame)
        except (StoreCorruptedError, RetriableError) as error:
            raise self._refusal(partition, error) from error
        return BalanceAnswer(200, exact_json(view).encode(), _JSON, headers)

    def _observe(self, answered: str, status: int, began: float) -> None:
        elapsed = time.perf_counter() - began
        observed = self._observed.get((answered, status))
        if observed is None:
            observed = self._observed[answered, status] = self._metrics.query_seconds.labels(answered, str(status))
        observed.observe(elapsed)


def _wanted(query: BalanceQuery) -> int:
    return 0 if query.min_position is None else query.min_position[1]


def _is_reached(local: LocalAnswer, query: BalanceQuery) -> bool:
    return local.position.offset >= _wanted(query)


def _is_recent_enough(local: LocalAnswer, query: BalanceQuery) -> bool:
    """Whether an answer may be given: the owner's, or one that is as recent as the query wants it."""
    is_near = query.max_lag is None or (local.lag is not None and local.lag <= query.max_lag)
    return is_near and _is_reached(local, query) and (local.is_owner or query.takes_standbys)


def exact_json(view: Mapping[str, Any]) -> str:
    """A flat JSON object of decimals, with exactly their digits."""
    return "{" + ", ".join(f'"{name}": {_digits(value)}' for name, value in view.items()) + "}"


def _digits(value: Decimal) -> str:
    return format(value, "f")


def _is_of(answer: PeerAnswer, address: str, query: BalanceQuery) -> bool:
    """Whether an answer is of the instance that was asked, in a role that counts: addresses are given to others."""
    is_its_own = answer.headers.get("Balance-Application-Server") == address
    return is_its_own and (query.takes_standbys or answer.headers.get("Balance-Role") == "active")


def _passed_on(answer: PeerAnswer) -> BalanceAnswer:
    return BalanceAnswer(answer.status, answer.body, answer.content_type, answer.headers)
