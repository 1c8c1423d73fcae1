"""Scatter-gather: sends a scan to the instances that have the partitions of a read model, and merges what they read.

Each instance gets one request, or a few if a URL cannot list all its partitions; one hop, one deadline. Each partition
is read as of one commit, different partitions as of different ones. An answer that lacks a partition is refused, unless
the client accepts partial answers. `FairScheduler` runs reads and merges; everything else belongs to the event loop. If
a client disconnects, its scan is cancelled, here and at the peers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from balance_service import api
from balance_service.errors import BalanceServiceError, RetriableError, StoreCorruptedError
from balance_service.http.answer import JSON, MALFORMED, Answer, Problem, by_partition, malformed_answer, unavailable
from balance_service.http.peers.proxy import split_to_fit
from balance_service.http.routing import ACTIVE
from balance_service.http.scheduling import in_one_step

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.peers.trust import Peer
    from balance_service.http.routing import LocalCopy, Routing
    from balance_service.http.scan import Scan, Steps
    from balance_service.http.scheduling import FairScheduler
    from balance_service.http.shares import Asker

P = TypeVar("P")
_MISDIRECTED = 421
_REFRESH_SECONDS = 0.3
_ATTEMPTS = 2
# Each lists partitions with a value, as in `0:12,1:40`.
_HEADERS = (api.POSITION, api.EPOCH, api.ROLE, api.LAG)


@dataclass(frozen=True, slots=True)
class _Part(Generic[P]):
    """The content that an instance has read of some partitions. `values`: header → partition → value."""

    content: P
    values: Mapping[str, Mapping[int, str]]

    @property
    def partitions(self) -> Iterable[int]:
        return self.values[api.POSITION].keys()


@dataclass(frozen=True, slots=True)
class Gathered(Generic[P]):
    """The content that a scan has read, the headers of an answer with it, and the partitions that it lacks."""

    content: P
    headers: Mapping[str, str]
    missing: Sequence[int]

    def answer(self, scan: Scan[P]) -> Answer:
        return Answer(200, scan.encode(self.content).encode(), JSON, self.headers)


@dataclass(frozen=True, slots=True)
class _Question(Generic[P]):
    """A scan on behalf of an asker. With `max_lag`, copies that are at most so many records behind may answer."""

    scan: Scan[P]
    asker: Asker
    max_lag: int | None = None


class _PeerRequest(NamedTuple):
    """One request to a peer, about some partitions."""

    peer: Peer
    path: str
    parameters: Mapping[str, str]
    partitions: Sequence[int]


@dataclass(slots=True, eq=False, kw_only=True)
class Scatter:
    """Answers scans of one read model."""

    routing: Routing
    proxy: Proxy
    path: str
    """Of the read model's routes; requests to peers go to `path/kind`."""
    generation: int | None
    """Of the read model, which requests to peers name; None for what has no generations."""
    timeout_seconds: float
    scheduler: FairScheduler

    @property
    def partitions(self) -> int:
        """The number of partitions of the source."""
        return self.routing.partitions

    async def gather(
        self,
        kind: str,
        scan: Scan[P],
        asker: Asker,
        *,
        max_lag: int | None = None,
        is_partial: bool = False,
        partitions: Iterable[int] | None = None,
    ) -> Gathered[P]:
        """Scans for a client.

        Args:
            kind: the last segment of the route.
            max_lag: lets standbys answer that are at most so many records behind.
            is_partial: whether the result may lack partitions.
            partitions: to scan; None scans all.

        Raises:
            Problem: 503, a partition cannot be read, or the client's share is used up.
        """
        question, deadline = _Question(scan, asker, max_lag), time.monotonic() + self.timeout_seconds
        # Leaves at least half of the time to a scan that begins.
        async with self.scheduler.admitted(asker, self.timeout_seconds / 2):
            wanted = range(self.routing.partitions) if partitions is None else partitions
            parts, missing = await self._gather(kind, question, set(wanted), deadline)
            if missing and not is_partial:
                raise unavailable(f"no instance could answer for partitions {_listed(missing)}")
            return await self._merge(question, parts, missing)

    async def answer_peer(self, scan: Scan[P], asker: Asker, partitions: Iterable[int], max_lag: int | None) -> Answer:
        """Answers a peer from local partitions; never forwards.

        Raises:
            Problem: 421, this instance has none of the partitions, or none that is recent enough; 503, the peer's share
                is used up.
        """
        question, wanted = _Question(scan, asker, max_lag), set(partitions)
        deadline = time.monotonic() + self.timeout_seconds
        async with self.scheduler.admitted(asker, self.timeout_seconds / 2):
            part = await self._read_local(question, wanted, deadline)
            if part is None:
                raise Problem(_MISDIRECTED, f"{self.routing.address} does not have partitions {_listed(wanted)}")
            return await self._encoded(question, await self._merge(question, [part], set()))

    async def answer_owned(self, scan: Scan[P], asker: Asker) -> Answer:
        """Answers for the partitions that this instance owns, possibly none.

        Raises:
            Problem: 503, one of them cannot be read, for example during a restore, or the client's share is used up.
        """
        question, owned = _Question(scan, asker), self.routing.owned()
        deadline = time.monotonic() + self.timeout_seconds
        async with self.scheduler.admitted(asker, self.timeout_seconds / 2):
            part = await self._read_local(question, owned, deadline)
            parts = [] if part is None else [part]
            if missing := owned.difference(*(found.partitions for found in parts)):
                raise unavailable(f"partitions {_listed(missing)} cannot be read here now")
            return await self._encoded(question, await self._merge(question, parts, set()))

    async def _encoded(self, question: _Question[P], gathered: Gathered[P]) -> Answer:
        # A page of dead letters is encoded as a whole, which takes milliseconds.
        return await self.scheduler.run(question.asker, in_one_step(gathered.answer, question.scan))

    async def _gather(
        self, kind: str, question: _Question[P], missing: set[int], deadline: float
    ) -> tuple[list[_Part[P]], set[int]]:
        """Returns what instances have read, and the partitions that none has."""
        max_lag = question.max_lag
        path, parameters = f"{self.path}/{kind}", question.scan.parameters()
        if max_lag is not None:
            parameters["maxLag"] = str(max_lag)
        if self.generation is not None:
            parameters["generation"] = str(self.generation)
        parts: list[_Part[P]] = []
        failed: set[Peer] = set()
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(max(0.0, min(_REFRESH_SECONDS, deadline - time.monotonic())))
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # Peers get half of the time while another attempt can follow. A local read would take as long again.
            until = time.monotonic() + (left / 2 if attempt + 1 < _ATTEMPTS else left)
            requests = [
                _PeerRequest(peer, path, listed, some)
                for peer, of_it in self._assigned(missing, max_lag, failed).items()
                for some, listed in split_to_fit("partitions", of_it, path, parameters)
            ]
            found = await asyncio.gather(
                self._read_local(question, missing, deadline),
                *(self._ask(question, request, until) for request in requests),
            )
            failed = {request.peer for request, part in zip(requests, found[1:], strict=True) if part is None}
            for part in found:
                # A partition that moved during the reads may be in two answers, and counts once.
                if part is not None and missing.issuperset(part.partitions):
                    parts.append(part)
                    missing.difference_update(part.partitions)
            if not missing:
                break
        return parts, missing

    async def _read_local(self, question: _Question[P], partitions: Iterable[int], until: float) -> _Part[P] | None:
        """Reads local copies; None if there are none, or if they could not be read in time."""
        copies = [copy for p in sorted(partitions) if (copy := self.routing.copy(p)) is not None]
        copies = [copy for copy in copies if self._may_answer(copy, question.max_lag)]
        if not copies:
            return None
        try:
            content = await self.scheduler.run(question.asker, self._read(question.scan, copies, until))
        except StoreCorruptedError:
            await self._find_damage(question, copies, until)
            return None
        except BalanceServiceError:
            return None
        if not all(self._may_answer(copy, question.max_lag) for copy in copies):
            return None
        return _Part(content, self._values_of(copies))

    def _read(self, scan: Scan[P], copies: Sequence[LocalCopy], until: float) -> Steps[P]:
        """Raises RetriableError: the scan takes too long, or a store is closed before its end."""
        reading = scan.read(copies, self.routing.view)
        while True:
            # A scan of a closed store would keep the store from being reopened.
            if time.monotonic() > until or not all(copy.is_open for copy in copies):
                raise RetriableError("the partitions could not be read to their end")
            try:
                next(reading)
            except StopIteration as end:
                content: P = end.value
                return content
            yield

    async def _find_damage(self, question: _Question[Any], copies: Sequence[LocalCopy], until: float) -> None:
        """Reads the copies one by one, to find out which store is damaged."""
        for copy in copies:
            try:
                await self.scheduler.run(question.asker, self._read(question.scan, [copy], until))
            except StoreCorruptedError as error:
                self.routing.on_damage(copy.partition, copy.task, error)
            except BalanceServiceError:
                continue

    def _may_answer(self, copy: LocalCopy, max_lag: int | None) -> bool:
        if max_lag is None:
            return self.routing.answers(self.routing.role_of(copy))
        lag = self.routing.lag_of(copy)
        return lag is not None and lag <= max_lag

    def _values_of(self, copies: Iterable[LocalCopy]) -> dict[str, dict[int, str]]:
        values: dict[str, dict[int, str]] = {name: {} for name in _HEADERS}
        for copy in copies:
            values[api.POSITION][copy.partition] = str(copy.position.offset)
            values[api.EPOCH][copy.partition] = str(copy.position.epoch)
            values[api.ROLE][copy.partition] = self.routing.role_of(copy)
            if (lag := self.routing.lag_of(copy)) is not None:
                values[api.LAG][copy.partition] = str(lag)
        return values

    def _assigned(
        self, partitions: Iterable[int], max_lag: int | None, failed: Container[Peer]
    ) -> dict[Peer, list[int]]:
        """Assigns each partition without a local answer to a peer.

        Args:
            failed: peers to avoid while there are others.
        """
        owners: dict[Peer, list[int]] = {}
        for partition in sorted(partitions):
            copy = self.routing.copy(partition)
            if copy is not None and self._may_answer(copy, max_lag):
                continue
            candidates = self.routing.candidates(partition, takes_standbys=max_lag is not None, takes_halted=True)
            if candidates:
                peer = next((candidate for candidate in candidates if candidate not in failed), candidates[0])
                owners.setdefault(peer, []).append(partition)
        return owners

    async def _ask(self, question: _Question[P], request: _PeerRequest, until: float) -> _Part[P] | None:
        """Asks a peer; None if it does not answer, or answers for other partitions."""
        part = await self._fetch(question, request, until)
        for partition in request.partitions:
            if part is None or partition not in part.partitions:
                self.routing.doubt(partition, request.peer)
            elif part.values[api.ROLE].get(partition) == ACTIVE:
                self.routing.believe(partition, request.peer)
        return part

    async def _fetch(self, question: _Question[P], request: _PeerRequest, until: float) -> _Part[P] | None:
        peer, path, parameters, partitions = request
        try:
            left = max(0.0, until - time.monotonic())
            answer = await self.proxy.get(
                peer, path, parameters, self.routing.address, left, client=question.asker.name
            )
        except RetriableError:
            return None
        if answer.status != 200 or answer.headers.get(api.APPLICATION_SERVER) != peer.address:
            return None
        try:
            values = {name: _parsed(answer.headers.get(name, "")) for name in _HEADERS}
            if not values[api.POSITION] or not values[api.POSITION].keys() <= set(partitions):
                return None
            content = await self.scheduler.run(question.asker, in_one_step(_parse, question.scan, answer.body.decode()))
        except MALFORMED:
            return None
        return _Part(content, values)

    async def _merge(self, question: _Question[P], parts: Sequence[_Part[P]], missing: Iterable[int]) -> Gathered[P]:
        contents = [part.content for part in parts]
        try:
            merging = in_one_step(question.scan.merge, contents)
            content = contents[0] if len(contents) == 1 else await self.scheduler.run(question.asker, merging)
        except MALFORMED as error:
            raise malformed_answer() from error
        headers = {api.APPLICATION_SERVER: self.routing.address}
        if self.generation is not None:
            headers[api.GENERATION] = str(self.generation)
        for name in _HEADERS:
            values = {partition: value for part in parts for partition, value in part.values[name].items()}
            if values:
                headers[name] = by_partition(values)
        if lacking := _listed(missing):
            headers[api.MISSING] = lacking
        return Gathered(content, headers, sorted(missing))


def _parse(scan: Scan[P], body: str) -> P:
    # Merging validates a single part.
    return scan.merge([scan.parse(body)])


def _parsed(header: str) -> dict[int, Any]:
    pairs = (pair.partition(":") for pair in header.split(",") if pair)
    return {int(partition): value for partition, _, value in pairs if partition.isdecimal()}


def _listed(partitions: Iterable[int]) -> str:
    return ",".join(map(str, sorted(partitions)))
