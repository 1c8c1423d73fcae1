"""Follows the states of a read model's generation for clients, on all instances and across moves of partitions.

A stream reads each of its partitions in parts: from the local store while this instance owns the partition, else over
the link to the owner. When a part ends, another one goes on from its position, on the same connection of the client.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import structlog

from balance_service.http.answer import compact_json
from balance_service.http.streams.event_stream import comment, rendered
from balance_service.http.streams.feed import Feed
from balance_service.http.streams.part import OUTRUN, Batch, EventId, Kind, LocalPart, PartEndedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from balance_service.http.peers.trust import Peer
    from balance_service.http.routing import Routing
    from balance_service.http.shares import Asker
    from balance_service.http.streams.event_stream import EventStream
    from balance_service.http.streams.feed import Pace, Point
    from balance_service.http.streams.link import Links
    from balance_service.http.streams.part import Part, Reader, Selection

log = structlog.get_logger(__name__)

_CHECK_SECONDS = 0.25
_LOOK_AGAIN_SECONDS = 0.1
# Partitions of one stream that are opened, and whose snapshots are read, at once: a thousand streams may be opened at
# once, and what is read waits for the client to read it.
_AT_ONCE = 2
# A client that reconnects within this time goes on from its position.
_KEEP_SECONDS = 60.0


class Changes:
    """Follows the states of one generation of a read model. Belongs to the event loop."""

    def __init__(self, reader: Reader, links: Links, pace: Pace) -> None:
        self._reader = reader
        self._links = links
        self._pace = pace
        self._feeds: dict[int, Feed] = {}
        self._remote: dict[Part, tuple[int, Peer]] = {}
        self._checking: asyncio.TimerHandle | None = None

    @property
    def _routing(self) -> Routing:
        return self._reader.routing

    def open_local(self, partition: int, selection: Selection, since: Point | None, asker: Asker) -> LocalPart:
        """Opens a part from the local store. Raises PartEndedError: this instance does not own the partition."""
        return LocalPart(self._reader, self._feed(partition), partition, selection, since, asker)

    async def follow_key(
        self, stream: EventStream, selection: Selection, reached: EventId | None, asker: Asker
    ) -> None:
        """Sends the state of a key, and each change; does not return.

        Args:
            reached: the id of the last event that the client has.
        """
        partition = self._routing.partition_of(selection.bounds(self._reader.key_type)[0])
        since = self._points_of(reached).get(partition)
        sources = _Sources()
        last = ""
        async with aclosing(self._batches(partition, selection, since, asker)) as batches:
            async for address, batch in batches:
                new = sources.comment_of(partition, address, batch)
                events = b""
                for entry in batch.entries:
                    # Another owner sends the state again.
                    if entry != last:
                        last = entry
                        events += rendered("state", entry, self._event_id({partition: batch.reached}))
                if new or events:
                    await stream.send(new + events)

    async def follow_range(
        self, stream: EventStream, selection: Selection, reached: EventId | None, asker: Asker
    ) -> None:
        """Sends the states of a range of keys, unless the client has them, and each change; does not return.

        Args:
            reached: the id of the last event that the client has.
        """
        points = self._points_of(reached)
        while True:
            await self._follow_range(stream, selection, points, asker)
            points = {}

    def _points_of(self, reached: EventId | None) -> dict[int, Point]:
        """The points that a client has reached. One that has seen another generation lacks what differs here."""
        if reached is None or reached.generation != self._reader.generation:
            return {}
        return dict(reached.points)

    def _event_id(self, points: dict[int, Point]) -> str:
        return EventId(self._reader.generation, points).text

    async def _follow_range(
        self, stream: EventStream, selection: Selection, reached: dict[int, Point], asker: Asker
    ) -> None:
        """Returns when a new snapshot is needed."""
        partitions = range(self._routing.partitions)
        about = compact_json({"generation": self._reader.generation})
        in_snapshot = set(partitions) if reached.keys() != set(partitions) else set()
        if in_snapshot:
            reached.clear()
            await stream.send(rendered("snapshot-begin", about, ""))
        arriving: asyncio.Queue[tuple[int, str, Batch] | Exception] = asyncio.Queue(1)
        pumps: list[asyncio.Task[None]] = []
        turns = asyncio.Semaphore(_AT_ONCE)

        async def open_in_turn() -> None:
            for partition in partitions:
                await turns.acquire()
                pump = self._pump(partition, selection, reached.get(partition), asker, turns, arriving)
                pumps.append(asyncio.create_task(pump))

        pumps.append(asyncio.create_task(open_in_turn()))
        sources = _Sources()
        try:
            while True:
                arrived = await arriving.get()
                if isinstance(arrived, Exception):
                    try:
                        raise arrived
                    finally:
                        # Otherwise the error would keep this frame, and this frame the error and the views it met.
                        del arrived
                partition, address, batch = arrived
                if batch.kind is Kind.OUTRUN:
                    return
                events = [sources.comment_of(partition, address, batch)]
                events += [rendered("state", entry) for entry in batch.entries]
                if batch.kind is not Kind.PAGE:
                    reached[partition] = batch.reached
                if partition in in_snapshot and batch.kind is Kind.LAST_PAGE:
                    in_snapshot.discard(partition)
                    if not in_snapshot:
                        events.append(rendered("snapshot-end", about, self._event_id(reached)))
                elif not in_snapshot and batch.entries:
                    # Only after the last one has the client all changes below the position.
                    events[-1] = rendered("state", batch.entries[-1], self._event_id(reached))
                await stream.send(b"".join(events))
        finally:
            for pump in pumps:
                pump.cancel()
            # An error in it has a frame that has the queue.
            with suppress(asyncio.QueueEmpty):
                arriving.get_nowait()

    async def _pump(
        self,
        partition: int,
        selection: Selection,
        since: Point | None,
        asker: Asker,
        turns: asyncio.Semaphore,
        arriving: asyncio.Queue[tuple[int, str, Batch] | Exception],
    ) -> None:
        """Puts the batches of a partition into a queue.

        Args:
            turns: the caller has acquired one, which ends when the queue has taken the snapshot.
        """
        has_turn = True
        try:
            if since is not None or not self._is_owner_known(partition):
                has_turn = False
                turns.release()
            if since is None and not has_turn:
                # It delays no other partition.
                while not self._is_owner_known(partition):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
                has_turn = await turns.acquire()
            async with aclosing(self._batches(partition, selection, since, asker)) as batches:
                async for address, batch in batches:
                    await arriving.put((partition, address, batch))
                    if has_turn and batch.kind is not Kind.PAGE:
                        has_turn = False
                        turns.release()
        except Exception as error:  # a model's own view may raise anything
            await arriving.put(error)

    async def _batches(
        self, partition: int, selection: Selection, since: Point | None, asker: Asker
    ) -> AsyncGenerator[tuple[str, Batch], None]:
        """Yields the batches of a partition, each with the address of the instance that it comes from.

        Looks for the owner whenever a part ends. The last batch is OUTRUN, if changes are missing.
        """
        in_pages = False
        while True:
            part = await self._open(partition, selection, since, asker)
            try:
                while True:
                    batch = await part.take()
                    self._answered(part)
                    in_pages = batch.kind is Kind.PAGE
                    if not in_pages:
                        since = batch.reached
                    yield part.address, batch
                    if batch.kind is Kind.OUTRUN:
                        return
            except PartEndedError:
                self._failed(part)
            finally:
                self._remote.pop(part, None)
                part.close()
            if in_pages:
                # A state that has been sent may be deleted by now.
                yield part.address, OUTRUN
                return
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _open(self, partition: int, selection: Selection, since: Point | None, asker: Asker) -> Part:
        """Opens a part at the owner; waits until there is one."""
        while True:
            with suppress(PartEndedError):
                return self.open_local(partition, selection, since, asker)
            peers = self._routing.candidates(partition, takes_standbys=False)
            if peers:
                with suppress(PartEndedError):
                    model = self._routing.read_model
                    part = self._links.open(peers[0], model, partition, selection, since, asker)
                    self._remote[part] = partition, peers[0]
                    self._check_soon()
                    return part
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    def _is_owner_known(self, partition: int) -> bool:
        return self._owns(partition) or bool(self._routing.candidates(partition, takes_standbys=False))

    def _answered(self, part: Part) -> None:
        found = self._remote.get(part)
        if found is not None:
            self._routing.believe(*found)

    def _failed(self, part: Part) -> None:
        found = self._remote.get(part)
        if found is not None:
            self._routing.doubt(*found)

    def _feed(self, partition: int) -> Feed:
        """The feed of a partition that this instance owns. Raises PartEndedError: it does not own it."""
        feed = self._feeds.get(partition)
        if feed is not None and not feed.has_ended:
            return feed
        task = self._routing.task(partition)
        if task is None or not self._owns(partition):
            raise PartEndedError
        feed = Feed(task, self._pace)
        copy = self._routing.copy(partition)
        if copy is None or copy.task is not task:
            feed.close()
            raise PartEndedError
        feed.begin(copy.position)
        self._feeds[partition] = feed
        self._check_soon()
        return feed

    def _owns(self, partition: int) -> bool:
        copy = self._routing.copy(partition)
        return copy is not None and self._routing.is_owned(copy)

    def _check_soon(self) -> None:
        if self._checking is None:
            self._checking = asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        """Ends feeds and parts whose partitions have moved, and feeds without followers."""
        self._checking = None
        now = asyncio.get_running_loop().time()
        for partition, feed in list(self._feeds.items()):
            is_unused = not feed.is_followed and now - feed.empty_since > _KEEP_SECONDS
            if is_unused or self._routing.task(partition) is not feed.task or not self._owns(partition):
                del self._feeds[partition]
                feed.close()
        # Many parts are of one partition.
        owners: dict[int, tuple[bool, list[Peer]]] = {}
        for part, (partition, peer) in self._remote.items():
            if partition not in owners:
                peers = self._routing.candidates(partition, takes_standbys=False)
                owners[partition] = self._owns(partition), peers[:1]
            is_here, best = owners[partition]
            if is_here or best not in ([peer], []):
                part.end()
        if self._feeds or self._remote:
            self._check_soon()


class _Sources:
    """The owners of a stream's partitions, as the client knows them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, int]] = {}

    def comment_of(self, partition: int, address: str, batch: Batch) -> bytes:
        """A comment that names the owner of a batch's partition, if the client does not know it."""
        source = address, batch.epoch
        if batch.kind is Kind.OUTRUN or self._known.get(partition) == source:
            return b""
        self._known[partition] = source
        return comment(f"partition {partition} epoch {batch.epoch} at {address}")
