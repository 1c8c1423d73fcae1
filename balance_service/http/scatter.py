"""Questions about all keys of a read model: put to the instances that have its partitions, answered as one.

One request an instance, a few to one that has more partitions than a URL can name; one hop, one deadline. Each
partition is read as of one moment; together they are of several. An answer that lacks a partition is refused, unless
the client accepts that it does. Stores are read and answers merged in `Turns`; everything else belongs to the event
loop. A question that is cancelled, because its client has gone, is not read to its end, nor at the peers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from balance_service.errors import BalanceServiceError, InvalidInputError, RetriableError, StoreCorruptedError
from balance_service.http.answer import JSON, Answer, Problem, unavailable
from balance_service.http.peers.proxy import split_to_fit
from balance_service.http.turns import in_one_step

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from balance_service.http.peers.proxy import Proxy
    from balance_service.http.peers.trust import Peer
    from balance_service.http.routing import Copy, Readable, Routing
    from balance_service.http.scan import Render, Scan, Steps, View
    from balance_service.http.turns import Asker, Turns

_MISDIRECTED = 421
_REFRESH_SECONDS = 0.3
_ATTEMPTS = 2
# In the form `0:12,1:40`: each partition with what holds of it.
_OF_PARTITIONS = ("Balance-Position", "Balance-Epoch", "Balance-Role", "Balance-Lag")
NOT_OF_FORM = (ArithmeticError, AttributeError, InvalidInputError, LookupError, RecursionError, TypeError, ValueError)
"""What is raised where a peer's answer is not of the form that this version knows."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one instance answered, and of which partitions: header → partition → what it says of that."""

    body: str
    told: Mapping[str, Mapping[int, str]]

    @property
    def partitions(self) -> Iterable[int]:
        return self.told["Balance-Position"].keys()


@dataclass(frozen=True, slots=True)
class _Question:
    """A scan, who wants it, and how many records behind a copy may be; None: only owners answer."""

    scan: Scan
    asker: Asker
    max_lag: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Scatter:
    """Answers questions about all keys of one read model."""

    routing: Routing
    proxy: Proxy
    address: str
    path: str
    """Of the read model's routes, which the kinds of question follow."""
    view: View
    """Framed state → what the query answers."""
    number: Callable[[str], Callable[[bytes], Any]]
    """Field → framed state → what the view has there."""
    render: Render
    on_damage: Callable[[int, Readable, StoreCorruptedError], None]
    """As in `Queries`."""
    timeout_seconds: float
    turns: Turns

    @property
    def partitions(self) -> int:
        """Of the read model's source."""
        return self.routing.partitions

    async def answer(
        self,
        kind: str,
        scan: Scan,
        asker: Asker,
        *,
        max_lag: int | None = None,
        is_partial: bool = False,
        partitions: Iterable[int] | None = None,
    ) -> Answer:
        """The answer to a client.

        Args:
            kind: the route's last part.
            max_lag: standbys will do that are at most so many records behind.
            is_partial: whether it may lack partitions.
            partitions: those that the question is about; None for all.

        Raises:
            Problem: 503, some partition cannot be read, or the client's share is used up.
        """
        question, deadline = _Question(scan, asker, max_lag), time.monotonic() + self.timeout_seconds
        # One that begins has at least half of the time.
        async with self.turns.admitted(asker, self.timeout_seconds / 2):
            wanted = range(self.routing.partitions) if partitions is None else partitions
            parts, missing = await self._gathered(kind, question, set(wanted), deadline)
            if missing and not is_partial:
                raise unavailable(f"nobody could be asked about partitions {_listed(missing)}")
            return await self._merged(question, parts, missing)

    async def _gathered(
        self, kind: str, question: _Question, missing: set[int], deadline: float
    ) -> tuple[list[_Part], set[int]]:
        """The answers of instances about some partitions, and those without an answer."""
        max_lag = question.max_lag
        path, parameters = f"{self.path}/{kind}", question.scan.parameters()
        if max_lag is not None:
            parameters["maxLag"] = str(max_lag)
        parts: list[_Part] = []
        failed: set[Peer] = set()
        for attempt in range(_ATTEMPTS):
            if attempt:
                await asyncio.sleep(max(0.0, min(_REFRESH_SECONDS, deadline - time.monotonic())))
            left = deadline - time.monotonic()
            if left <= 0:
                break
            # A peer gets half of it while there is another attempt to come. What is here would take as long again.
            until = time.monotonic() + (left / 2 if attempt + 1 < _ATTEMPTS else left)
            questions = [
                (peer, some, listed)
                for peer, of_it in self._owners(missing, max_lag, failed).items()
                for some, listed in split_to_fit("partitions", of_it, path, parameters)
            ]
            found = await asyncio.gather(
                self._here(question, missing, deadline),
                *(self._there(question, peer, path, listed, some, until) for peer, some, listed in questions),
            )
            failed = {peer for (peer, *_), part in zip(questions, found[1:], strict=True) if part is None}
            for part in found:
                # One that came to be read here and there counts once.
                if part is not None and missing.issuperset(part.partitions):
                    parts.append(part)
                    missing.difference_update(part.partitions)
            if not missing:
                break
        return parts, missing

    async def answer_peer(self, scan: Scan, asker: Asker, partitions: Iterable[int], max_lag: int | None) -> Answer:
        """The answer to a peer about those of some partitions that are here; passed on to nobody.

        Raises:
            Problem: 421, none is, or none is recent enough; 503, the peer's share is used up.
        """
        question, wanted = _Question(scan, asker, max_lag), set(partitions)
        deadline = time.monotonic() + self.timeout_seconds
        async with self.turns.admitted(asker, self.timeout_seconds / 2):
            part = await self._here(question, wanted, deadline)
            if part is None:
                raise Problem(_MISDIRECTED, f"{self.address} does not have partitions {_listed(wanted)}")
            return await self._merged(question, [part], set())

    async def answer_owned(self, scan: Scan, asker: Asker) -> Answer:
        """The answer about the partitions that this instance owns, which may be none.

        Raises:
            Problem: 503, one of them cannot be read, such as while it is restored, or the client's share is used up.
        """
        question, owned = _Question(scan, asker), self.routing.owned()
        deadline = time.monotonic() + self.timeout_seconds
        async with self.turns.admitted(asker, self.timeout_seconds / 2):
            part = await self._here(question, owned, deadline)
            parts = [] if part is None else [part]
            if missing := owned.difference(*(found.partitions for found in parts)):
                raise unavailable(f"partitions {_listed(missing)} cannot be read here now")
            return await self._merged(question, parts, set())

    async def _here(self, question: _Question, partitions: Iterable[int], until: float) -> _Part | None:
        """What the local stores have of some partitions; None if nothing, or if it could not be read in time."""
        copies = [copy for p in sorted(partitions) if (copy := self.routing.copy(p)) is not None]
        copies = [copy for copy in copies if self._may_answer(copy, question.max_lag)]
        if not copies:
            return None
        try:
            body = await self.turns.run(question.asker, self._read(question.scan, copies, until))
        except StoreCorruptedError:
            await self._find_damage(question, copies, until)
            return None
        except BalanceServiceError:
            return None
        if not all(self._may_answer(copy, question.max_lag) for copy in copies):
            return None
        return _Part(body, _told(copies, self.routing))

    def _read(self, scan: Scan, copies: Sequence[Copy], until: float) -> Steps:
        """The local answer. Raises RetriableError: it takes too long, or a store is closed before its end."""
        reading = scan.read(copies, self.view, self.render)
        while True:
            # What is read of a store that was closed keeps it from being opened again.
            if time.monotonic() > until or any(copy.task.view is None for copy in copies):
                raise RetriableError("the partitions could not be read to their end")
            try:
                next(reading)
            except StopIteration as end:
                body: str = end.value
                return body
            yield

    async def _find_damage(self, question: _Question, copies: Sequence[Copy], until: float) -> None:
        for copy in copies:
            try:
                await self.turns.run(question.asker, self._read(question.scan, [copy], until))
            except StoreCorruptedError as error:
                self.on_damage(copy.partition, copy.task, error)
            except BalanceServiceError:
                continue

    def _may_answer(self, copy: Copy, max_lag: int | None) -> bool:
        if max_lag is None:
            return self.routing.is_owned(copy)
        lag = self.routing.lag_of(copy)
        return lag is not None and lag <= max_lag

    def _owners(self, partitions: Iterable[int], max_lag: int | None, failed: Container[Peer]) -> dict[Peer, list[int]]:
        """Peers, each with the partitions that it is to be asked about: those that nobody here may answer.

        Args:
            failed: peers that are asked only where there is no other.
        """
        owners: dict[Peer, list[int]] = {}
        for partition in sorted(partitions):
            copy = self.routing.copy(partition)
            if copy is not None and self._may_answer(copy, max_lag):
                continue
            candidates = self.routing.candidates(partition, takes_standbys=max_lag is not None)
            if candidates:
                peer = next((candidate for candidate in candidates if candidate not in failed), candidates[0])
                owners.setdefault(peer, []).append(partition)
        return owners

    async def _there(
        self,
        question: _Question,
        peer: Peer,
        path: str,
        parameters: Mapping[str, str],
        partitions: Sequence[int],
        until: float,
    ) -> _Part | None:
        """What a peer has of some partitions; None if it does not answer, or for others."""
        part = await self._asked(question, peer, path, parameters, partitions, until)
        for partition in partitions:
            if part is None or partition not in part.partitions:
                self.routing.doubt(partition, peer)
            elif part.told["Balance-Role"].get(partition) == "active":
                self.routing.believe(partition, peer)
        return part

    async def _asked(
        self,
        question: _Question,
        peer: Peer,
        path: str,
        parameters: Mapping[str, str],
        partitions: Sequence[int],
        until: float,
    ) -> _Part | None:
        try:
            answer = await self.proxy.get(peer, path, parameters, self.address, max(0.0, until - time.monotonic()))
        except RetriableError:
            return None
        if answer.status != 200 or answer.headers.get("Balance-Application-Server") != peer.address:
            return None
        try:
            told = {name: _of_partitions(answer.headers.get(name, "")) for name in _OF_PARTITIONS}
            if not told["Balance-Position"] or not told["Balance-Position"].keys() <= set(partitions):
                return None
            # Merged with nothing else, it comes out as it went in, if it can be read.
            body = await self.turns.run(question.asker, in_one_step(question.scan.merge, [answer.body.decode()]))
        except NOT_OF_FORM:
            return None
        return _Part(body, told)

    async def _merged(self, question: _Question, parts: Sequence[_Part], missing: Iterable[int]) -> Answer:
        bodies = [part.body for part in parts]
        try:
            body = (
                bodies[0]
                if len(bodies) == 1
                else await self.turns.run(question.asker, in_one_step(question.scan.merge, bodies))
            )
        except NOT_OF_FORM as error:
            raise not_of_form() from error
        headers = {"Balance-Application-Server": self.address}
        for name in _OF_PARTITIONS:
            told = {partition: value for part in parts for partition, value in part.told[name].items()}
            if told:
                headers[name] = ",".join(f"{partition}:{value}" for partition, value in sorted(told.items()))
        if lacking := _listed(missing):
            headers["Balance-Missing"] = lacking
        return Answer(200, body.encode(), JSON, headers)


def not_of_form() -> Problem:
    """Such an answer is none."""
    return unavailable("a peer's answer is not of the form that this version knows")


def _told(copies: Iterable[Copy], routing: Routing) -> dict[str, dict[int, str]]:
    told: dict[str, dict[int, str]] = {name: {} for name in _OF_PARTITIONS}
    for copy in copies:
        told["Balance-Position"][copy.partition] = str(copy.position.offset)
        told["Balance-Epoch"][copy.partition] = str(copy.position.epoch)
        told["Balance-Role"][copy.partition] = "active" if routing.is_owned(copy) else "standby"
        if (lag := routing.lag_of(copy)) is not None:
            told["Balance-Lag"][copy.partition] = str(lag)
    return told


def _of_partitions(header: str) -> dict[int, Any]:
    pairs = (pair.partition(":") for pair in header.split(",") if pair)
    return {int(partition): value for partition, _, value in pairs if partition.isdecimal()}


def _listed(partitions: Iterable[int]) -> str:
    return ",".join(map(str, sorted(partitions)))
