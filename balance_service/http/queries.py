"""Queries for one key of a read model, answered from the local store or by a peer, one hop away."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING

from balance_service import api
from balance_service.errors import (
    InvalidInputError,
    MustAskError,
    RetriableError,
    StoreCorruptedError,
    UnreadableRecordError,
)
from balance_service.http.answer import JSON, MALFORMED, Answer, Problem, SharedHeaders, malformed_answer, unavailable
from balance_service.http.arrivals import Arrivals
from balance_service.http.routing import ACTIVE, HALTED, asked
from balance_service.model.json_view import exact_json, parsed_json
from balance_service.model.stage import model_and_generation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from prometheus_client import Histogram

    from balance_service.engine.records import Position
    from balance_service.http.key_target import KeyQuery
    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.routing import LocalState, ReadableTask, Routing
    from balance_service.observability.metrics import Metrics

_MISDIRECTED = 421
_UNAVAILABLE = 503
_NOT_FOUND = 404
_LOOKED_UP = (200, _NOT_FOUND)
_OUTCOMES = {_MISDIRECTED: "misdirected", _UNAVAILABLE: "unavailable"}
_REFRESH_SECONDS = 0.3


@dataclass(slots=True, eq=False, kw_only=True)
class Queries:
    """Answers queries for one key of a read model."""

    routing: Routing
    proxy: Proxy
    timeout_seconds: float
    metrics: Metrics
    is_of_table: bool = False
    """Whether they are for rows of a table, which has no generations."""
    generation: str = field(init=False)
    _arrivals: Arrivals = field(init=False)
    _observed: dict[tuple[str, int], Histogram] = field(default_factory=dict, init=False)
    _told: dict[int, tuple[tuple[Position, int | None, float | None, str], SharedHeaders]] = field(
        default_factory=dict, init=False
    )
    """Partition → the headers of its last answer, and what they tell."""

    def __post_init__(self) -> None:
        self._arrivals = Arrivals(self.routing)
        self.generation = "" if self.is_of_table else str(model_and_generation(self.routing.read_model)[1])

    def at_once(self, key: bytes, noun: str, echoed_key: str | Mapping[str, str | int] | None) -> Answer | None:
        """Answers a query that has only a key, if this instance owns its partition; otherwise None.

        Returns None for errors too: the caller then uses `answer`, which reports them.

        Args:
            noun: as in `KeyQuery`.
            echoed_key: as in `KeyQuery`.
        """
        began = time.perf_counter()
        partition = self.routing.partition_of(key)
        try:
            copy = self.routing.copy(partition)
            if copy is None:
                return None
            local = self.routing.read(copy, key)
            if local.role != ACTIVE:
                return None
            answer = self._local_answer(partition, local, noun, echoed_key)
        except Exception:  # a model's own view may raise anything
            return None
        self._observe("local", answer.status, began)
        return answer

    async def answer(self, parse: Callable[[], KeyQuery], client: str, *, is_forwarded: bool = False) -> Answer:
        """Answers a client's or a peer's query; from a standby, if it states how recent the answer must be.

        Args:
            parse: reads the query from the request.
            is_forwarded: whether a peer asks, on behalf of the client.

        Raises:
            Problem: there is no such answer now.
        """
        began = time.perf_counter()
        answered, status = "none", 500
        try:
            query = parse()
            partition = self.routing.partition_of(query.key)
            if query.min_position is not None and query.min_position[0] != partition:
                other = query.min_position[0]
                raise Problem(
                    400, f"minPosition is for partition {other}; the {query.noun} is in partition {partition}"
                )
            deadline = time.monotonic() + self.timeout_seconds
            find = partial(self._found, partition, query, client, deadline, is_forwarded=is_forwarded)
            answered, answer = await _with_its_schema(find, deadline)
            status = answer.status
            return answer
        except InvalidInputError:
            status = 400
            raise
        except Problem as problem:
            status = problem.status
            raise
        finally:
            self._observe(answered, status, began)

    async def _found(
        self, partition: int, query: KeyQuery, client: str, deadline: float, *, is_forwarded: bool
    ) -> tuple[str, Answer]:
        """Returns who answers, for the metrics, and the answer. Raises MustAskError: it needs an unknown schema."""
        local = await self._local_state(partition, query, deadline, is_forwarded=is_forwarded)
        if local is not None:
            return "local", self._local_answer(partition, local, query.noun, query.echoed_key)
        return "proxied", await self._proxied(partition, query, client, deadline)

    async def _local_state(
        self, partition: int, query: KeyQuery, deadline: float, *, is_forwarded: bool
    ) -> LocalState | None:
        """Returns the local state of a key if it is recent enough; None if peers must be asked.

        The owner waits for the wanted position, because no other instance is ahead of it. So does a standby that a peer
        asks, because a forwarded query is not forwarded again.
        """
        while True:
            local = self._read(partition, query)
            may_answer = local is not None and (query.takes_standbys or self.routing.answers(local.role))
            if local is not None and may_answer and _is_recent_enough(local, query):
                if _is_certain(local, query):
                    return local
                if is_forwarded:
                    raise self._uncertain(local, query)
                return None
            if is_forwarded and not may_answer:
                if local is not None and local.role == HALTED:
                    raise self._halted(partition, local)
                raise Problem(_MISDIRECTED, f"{self.routing.address} does not own partition {partition}")
            if local is None or not (local.role == ACTIVE or is_forwarded):
                return None
            if _is_reached(local, query) or local.is_frozen:
                raise self._behind(local, query)
            left = deadline - time.monotonic()
            if left <= 0:
                raise unavailable(f"position {partition}:{_wanted(query)} was not reached in time")
            # It keeps the store's view, and so the folder, from the next task.
            del local
            await self._arrivals.wait(partition, _wanted(query), left)

    def _read(self, partition: int, query: KeyQuery) -> LocalState | None:
        copy = self.routing.copy(partition, takes_left=query.max_age is not None)
        if copy is None:
            return None
        try:
            return self.routing.read(copy, query.key, _wanted(query), with_age=query.max_age is not None)
        except (StoreCorruptedError, RetriableError) as error:
            refusal = self._refusal(partition, copy.task, error)
        # A traceback would keep the view and the store's lock alive: drop the copy, and raise after `except`.
        del copy
        if query.takes_standbys:
            return None
        raise refusal

    def _refusal(self, partition: int, task: ReadableTask, error: StoreCorruptedError | RetriableError) -> Problem:
        """The answer if the local store, or a state in it, cannot be read."""
        if isinstance(error, RetriableError):
            return unavailable(str(error))
        self.routing.on_damage(partition, task, error)
        if isinstance(error, UnreadableRecordError):
            return unavailable(str(error))
        return unavailable("the local store is damaged and is being restored")

    async def _proxied(self, partition: int, query: KeyQuery, client: str, deadline: float) -> Answer:
        """Returns a peer's answer. If no peer answers, asks all candidates once more: the owner may have changed.

        A query that waits for a position keeps asking until its deadline, so that it survives a move of the partition.
        """
        refusal: Problem | None = None
        unwilling: Answer | None = None
        """Of the first peer that has the partition, and does not answer with what it has."""
        for attempt in itertools.count():
            if attempt:
                left = deadline - time.monotonic()
                if left <= 0 or (attempt > 1 and query.min_position is None):
                    break
                await asyncio.sleep(min(_REFRESH_SECONDS, left))
                # This instance may have become the owner.
                local = await self._local_state(partition, query, deadline, is_forwarded=False)
                if local is not None:
                    return self._local_answer(partition, local, query.noun, query.echoed_key)
            # By the second attempt, a local copy may be recent enough.
            takes_left = query.max_age is not None
            has_copy = query.takes_standbys and self.routing.copy(partition, takes_left=takes_left) is not None
            peers = self.routing.in_turn(
                partition,
                deadline,
                takes_standbys=query.takes_standbys,
                takes_halted=True,
                takes_suspects=takes_left,
                last_gets_rest=bool(attempt) or not has_copy,
            )
            for peer, seconds, is_last in peers:
                address = peer.address
                try:
                    waits = query.min_position is not None
                    answer = await self.proxy.get(
                        peer, query.path, query.parameters, self.routing.address, seconds, client=client, waits=waits
                    )
                except RetriableError as error:
                    self.metrics.proxied(address, "failed")
                    self.routing.doubt(partition, peer)
                    refusal = unavailable(str(error))
                    continue
                if answer.status in _LOOKED_UP and not self._is_of(answer, address, query):
                    self.metrics.proxied(address, "failed")
                    self.routing.doubt(partition, peer)
                    refusal = unavailable(f"another instance than the one asked answers at {address}")
                    continue
                self.metrics.proxied(address, _OUTCOMES.get(answer.status, "answered"))
                if answer.status in _LOOKED_UP:
                    if answer.headers.get(api.ROLE) == ACTIVE:
                        self.routing.believe(partition, peer)
                    # The request had the route of every read model, so the peer does not know the query's own word.
                    if answer.status == _NOT_FOUND:
                        return _no_such(query.noun)._replace(headers=answer.headers)
                    return _as_asked(answer, query)
                self.routing.doubt(partition, peer)
                if answer.status != _MISDIRECTED:
                    unwilling = unwilling or answer
                    if is_last:
                        return unwilling
                elif not takes_left:
                    # Otherwise, peers were asked that do not claim to own it.
                    refusal = unavailable(f"{address} no longer owns partition {partition}")
        if unwilling is not None:
            return unwilling
        raise refusal or self._no_answer(partition, query)

    def _no_answer(self, partition: int, query: KeyQuery) -> Problem:
        """The answer if neither this instance nor a peer has one."""
        local = self._read(partition, query)
        if local is not None and (query.takes_standbys or self.routing.answers(local.role)):
            return self._uncertain(local, query) if _is_recent_enough(local, query) else self._behind(local, query)
        if local is not None and local.role == HALTED:
            return self._halted(partition, local)
        return unavailable(
            f"no instance answers for partition {partition} now; /health/ready of the instances says why"
        )

    def _behind(self, local: LocalState, query: KeyQuery) -> Problem:
        behind = []
        if not _is_reached(local, query):
            behind.append(f"at offset {local.position.offset}, and minPosition is {_wanted(query)}")
        if query.max_lag is not None:
            records = "an unknown number of" if local.lag is None else local.lag
            behind.append(f"{records} records behind, and maxLag is {query.max_lag}")
        if query.max_age is not None:
            behind.append(f"{_old(local)}, and maxAge is {query.max_age:g}")
        return unavailable(f"the copy at {self.routing.address} is {'; it is '.join(behind)}")

    def _uncertain(self, local: LocalState, query: KeyQuery) -> Problem:
        return unavailable(
            f"the copy at {self.routing.address}, {_old(local)}, has no such {query.noun}; a newer copy may have it"
        )

    def _halted(self, partition: int, local: LocalState) -> Problem:
        return unavailable(
            f"the read model's code has halted partition {partition} on {self.routing.address}, whose log says why; "
            f"with maxLag, maxAge or minPosition, it answers as of offset {local.position.offset}"
        )

    def _local_answer(
        self, partition: int, local: LocalState, noun: str, echoed_key: str | Mapping[str, str | int] | None
    ) -> Answer:
        headers = self._headers(partition, local)
        if local.frame is None:
            return _no_such(noun)._replace(headers=headers)
        try:
            view = self.routing.view(local.frame)
        except MustAskError:
            raise
        except (StoreCorruptedError, RetriableError) as error:
            raise self._refusal(partition, local.task, error) from error
        body = exact_json(view if echoed_key is None else {"key": echoed_key, "value": view})
        return Answer(200, body.encode(), JSON, headers)

    def _headers(self, partition: int, local: LocalState) -> SharedHeaders:
        """The headers of an answer: until the next commit, or the next look at the source's end, all have the same."""
        told = (local.position, local.lag, local.age, local.role)
        known = self._told.get(partition)
        if known is not None and known[0] == told:
            return known[1]
        headers = {
            api.APPLICATION_SERVER: self.routing.address,
            api.ROLE: local.role,
            api.POSITION: f"{partition}:{local.position.offset}",
            api.EPOCH: str(local.position.epoch),
        }
        if self.generation:
            headers[api.GENERATION] = self.generation
        if local.lag is not None:
            headers[api.LAG] = str(local.lag)
        if local.age is not None:
            headers[api.AGE] = _seconds(local.age)
        shared = SharedHeaders(headers)
        self._told[partition] = told, shared
        return shared

    def _is_of(self, answer: Answer, address: str, query: KeyQuery) -> bool:
        """Whether the instance that was asked answers, in an acceptable role: an address may pass to another one."""
        is_its_own = answer.headers.get(api.APPLICATION_SERVER) == address
        return is_its_own and (query.takes_standbys or answer.headers.get(api.ROLE) in (ACTIVE, HALTED))

    def _observe(self, answered: str, status: int, began: float) -> None:
        elapsed = time.perf_counter() - began
        observed = self._observed.get((answered, status))
        if observed is None:
            observed = self._observed[answered, status] = self.metrics.query_seconds.labels(
                self.routing.read_model, answered, str(status)
            )
        observed.observe(elapsed)


async def _with_its_schema(find: Callable[[], Awaitable[tuple[str, Answer]]], deadline: float) -> tuple[str, Answer]:
    """Calls `find`, and once more after the registry was asked for a schema. Raises Problem."""
    try:
        return await find()
    except MustAskError as error:
        ask = error.ask
    # Not in `except`: the traceback keeps the view, and so the folder, from the next task.
    try:
        await asked(ask, deadline - time.monotonic())
        return await find()
    except RetriableError as error:
        raise unavailable(str(error)) from error


def _as_asked(answer: Answer, query: KeyQuery) -> Answer:
    """The answer of a peer in the form of the query. Raises Problem: it is malformed."""
    if query.echoed_key is not None or not query.peers_echo_key:
        return answer
    try:
        value = parsed_json(answer.body.decode())["value"]
        return answer._replace(body=exact_json(value).encode())
    except MALFORMED as error:
        raise malformed_answer() from error


@cache
def _no_such(noun: str) -> Answer:
    return Problem(404, f"no such {noun}").answer()


def _wanted(query: KeyQuery) -> int:
    return 0 if query.min_position is None else query.min_position[1]


def _is_reached(local: LocalState, query: KeyQuery) -> bool:
    return local.position.offset >= _wanted(query)


def _is_recent_enough(local: LocalState, query: KeyQuery) -> bool:
    """Whether the answer is as recent as the query requires."""
    is_near = query.max_lag is None or (local.lag is not None and local.lag <= query.max_lag)
    is_young = query.max_age is None or (local.age is not None and local.age <= query.max_age)
    return is_near and is_young and _is_reached(local, query)


def _is_certain(local: LocalState, query: KeyQuery) -> bool:
    """Whether the answer may be sent: that an old copy has no state of a key says nothing of newer ones."""
    is_bounded = query.max_age is None and query.takes_standbys
    return local.frame is not None or local.role == ACTIVE or is_bounded


def _old(local: LocalState) -> str:
    return "of unknown age" if local.age is None else f"{_seconds(local.age)} s old"


def _seconds(age: float) -> str:
    """Rounded up, so that the copy is no older."""
    return f"{math.ceil(age * 10) / 10:.1f}"
