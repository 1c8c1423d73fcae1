"""A change stream over its connections: what to send, and how to read the bytes. Does no input or output."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from balance_service import api
from balance_service.client.event_stream import Comment, EventParser
from balance_service.client.exchange import Attempt, NoReply, Reply, Request, Server, exact, log, pause_after
from balance_service.client.results import Change, SnapshotBegin, SnapshotEnd, Source, shown_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.client.errors import ClientError
    from balance_service.client.event_stream import ServerEvent

_SOURCE = re.compile(r"partition ([0-9]+) epoch ([0-9]+) at (\S+)")
# The positions of partitions, grouped by changelog: 1/0:12,1:40@a;2:7@b.
_EVENT_ID = re.compile(r"[0-9]+/[0-9]+:[0-9]+(?:[,:;@][A-Za-z0-9+/_=-]*)*")
_POSITION = re.compile(r"(?<=[/,;])([0-9]+):([0-9]+)")


class Watch:
    """One change stream. The caller connects, passes on what it gets, and connects again when a connection ends.

    The first connection is retried for a limited time. A stream that was open once is opened again without a limit,
    until an instance refuses it.
    """

    def __init__(self, server: Server, request: Request, retry_seconds: float) -> None:
        self._server = server
        self._request = request
        self._until: float | None = time.monotonic() + retry_seconds
        """The time after which a failure to connect is an error; None once the stream was open."""
        self._failures = 0
        self._pause_seconds = 0.0
        self._last_event_id = ""
        self._parser = EventParser()
        self._sources: dict[int, Source] = {}

    def attempt(self) -> Attempt:
        """Returns the request of the next connection."""
        headers = {"Accept": api.EVENT_STREAM}
        if self._last_event_id:
            headers[api.LAST_EVENT_ID] = self._last_event_id
        return Attempt(replace(self._request, headers=headers), self._pause_seconds)

    def is_open(self, reply: Reply | NoReply) -> bool:
        """Takes the start of a response; returns whether events follow.

        Raises:
            ClientError: an instance refuses the stream; or none could open it in time.
        """
        outcome = self._server.outcome(reply)
        if not isinstance(outcome, Reply):
            self._failed(str(outcome), outcome.retry_after)
            if self._until is not None and time.monotonic() + self._pause_seconds >= self._until:
                raise outcome
            return False
        if not outcome.headers.get("Content-Type", "").startswith(api.EVENT_STREAM):
            raise self._server.other(outcome, "an event stream")
        self._until = None
        self._parser = EventParser(self._last_event_id)
        self._sources = {}
        return True

    def read(self, content: bytes) -> Iterator[Change[Any] | SnapshotBegin | SnapshotEnd]:
        """Takes the next bytes of an open stream; returns the events that end in them."""
        for item in self._parser.feed(content):
            if isinstance(item, Comment):
                self._note(item.text)
                continue
            self._failures = 0
            self._last_event_id = item.id
            match item.name:
                case "state":
                    state = self._json(item)
                    yield Change(
                        **shown_key(state["key"]),
                        value=state["value"],
                        generation=state["generation"],
                        positions=self._positions(item.id),
                        sources=dict(self._sources),
                    )
                case "snapshot-begin":
                    yield SnapshotBegin(self._json(item)["generation"])
                case "snapshot-end":
                    yield SnapshotEnd(self._json(item)["generation"], self._positions(item.id))

    def lost(self, end: NoReply) -> None:
        """Takes the end of a connection that was open.

        Raises:
            ClientError: the client is closed.
        """
        self._server.outcome(end)
        self._failed(end.reason)

    def _failed(self, reason: str, retry_after: float | None = None) -> None:
        self._failures += 1
        self._pause_seconds = pause_after(self._failures, retry_after)
        log.warning(
            "the change stream %s is interrupted (%s); the next attempt is in %.1f s",
            self._request.path,
            reason,
            self._pause_seconds,
        )

    def _note(self, comment: str) -> None:
        if named := _SOURCE.fullmatch(comment):
            source = Source(int(named[1]), int(named[2]), named[3])
            self._sources[source.partition] = source

    def _json(self, event: ServerEvent) -> Any:
        try:
            return exact(event.data)
        except ValueError:
            raise self._malformed(event.data) from None

    def _positions(self, text: str) -> dict[int, int]:
        if not text:
            return {}
        if _EVENT_ID.fullmatch(text) is None:
            raise self._malformed(text)
        return {int(partition): int(offset) for partition, offset in _POSITION.findall(text)}

    def _malformed(self, text: str) -> ClientError:
        return self._server.not_an_instance(f"it sends the event {text[:100]!r}")
