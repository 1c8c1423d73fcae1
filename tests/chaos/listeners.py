"""Listeners of change streams, which reconnect to any instance and keep what they were told.

A listener of a key gives each event as an answer, so that the recount judges it at its position. A listener of a range
keeps a client's view: at the end, it must equal the recount. Positions of one generation may never go back, over all
connections.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from tests.chaos.checks import Violation
from tests.chaos.clients import Answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.chaos.recount import Recount
    from tests.chaos.workload import Customers

PREFIX = "whale-"
_DEAD_SECONDS = 20.0
_PAUSE_SECONDS = 0.1
_LOOK_SECONDS = 0.2
_POSITION = re.compile(r"(?<=[/,;])([0-9]+):([0-9]+)")


@dataclass(slots=True)
class _Known:
    """The events that one listener has received, as a client keeps them."""

    name: str
    view: dict[str, int] = field(default_factory=dict)
    """Customer → cents."""
    fresh: dict[str, int] | None = None
    """A snapshot that is not complete yet."""
    last_id: str = ""
    reached: dict[tuple[str, int], int] = field(default_factory=dict)
    """Positions by generation and partition."""
    source: tuple[int, str] = (0, "")
    """Epoch and address of the owner of a key's partition."""


class Listeners:
    """Two listeners at a time on each instance, one of hot keys in turn and one of a range; each has a thread."""

    def __init__(self, addresses: Sequence[tuple[str, int]], customers: Customers, seed: int) -> None:
        self._addresses = addresses
        self._customers = customers
        self._seed = seed
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._answers: list[Answer] = []
        self._violations: list[Violation] = []
        self._of_keys: list[_Known] = []
        self._of_ranges: list[_Known] = []
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        for number in range(len(self._addresses)):
            customer = self._customers.hot[number % len(self._customers.hot)]
            for what, known in ((customer, self._of_keys), ("", self._of_ranges)):
                known.append(_Known(what))
                chooser = random.Random(f"{self._seed}-listener-{number}-{what}")
                thread = threading.Thread(
                    target=self._run, args=(number, known[-1], chooser), name=f"listener-{number}-{what}"
                )
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> list[Answer]:
        """Returns and clears the events of keys, as answers."""
        taken, self._answers = self._answers, []
        return taken

    def take_violations(self) -> list[Violation]:
        taken, self._violations = self._violations, []
        return taken

    def end_right(self, recount: Recount, seconds: float) -> Iterator[Violation]:
        """Checks that every listener has the newest states within some seconds of the last event."""
        newest = {key.decode(): history.total for key, history in recount.histories.items()}
        whales = {customer: cents for customer, cents in newest.items() if customer.startswith(PREFIX)}
        wanted = [({known.name: newest[known.name]}, known) for known in self._of_keys if known.name in newest]
        wanted += [(whales, known) for known in self._of_ranges]
        deadline = time.monotonic() + seconds
        for right, known in wanted:
            while known.view != right and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
            if known.view != right:
                yield Violation("listener", f"{known.name or PREFIX} ends with {known.view}, the recount with {right}")

    def _run(self, number: int, known: _Known, chooser: random.Random) -> None:
        turn = number
        while not self._stopping.wait(chooser.uniform(0, 2 * _PAUSE_SECONDS)):
            host, port = self._addresses[turn % len(self._addresses)]
            turn += 1
            connection = http.client.HTTPConnection(host, port, timeout=_DEAD_SECONDS)
            try:
                self._listen(connection, f"{host}:{port}", known, chooser)
            except (OSError, http.client.HTTPException):
                continue
            except Exception as error:  # a failed check must not end the thread in silence
                self.failures.append(f"listener of {known.name or PREFIX}: {error!r}")
                return
            finally:
                connection.close()

    def _listen(
        self, connection: http.client.HTTPConnection, asked: str, known: _Known, chooser: random.Random
    ) -> None:
        of_key = f"/api/models/balance/keys/{quote(known.name, safe='')}"
        path = of_key if known.name else f"/api/models/balance/changes?prefix={PREFIX}"
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": known.last_id} if known.last_id else {})
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            return
        until = time.monotonic() + chooser.uniform(1, 30)
        name, event_id, data = "", None, ""
        for raw in answer:
            line = raw.decode().rstrip("\n")
            if line.startswith(": partition "):
                _, _, _, _, epoch, _, address = line.split(" ")
                known.source = int(epoch), address
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("id:"):
                event_id = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif not line and name:
                self._take(asked, known, name, event_id, data)
                name, event_id, data = "", None, ""
            # Without events there are still comments, every 15 s.
            if not name and (self._stopping.is_set() or time.monotonic() > until):
                return

    def _take(self, asked: str, known: _Known, name: str, event_id: str | None, data: str) -> None:
        if event_id is not None:
            known.last_id = event_id
            generation = event_id.partition("/")[0]
            for partition, position in _positions(event_id).items():
                place = generation, partition
                if position < known.reached.get(place, 0):
                    self._violations.append(
                        Violation("backwards", f"a listener at {place} {known.reached[place]} got {event_id}")
                    )
                known.reached[place] = position
        if name == "snapshot-begin":
            known.fresh = {}
        elif name == "snapshot-end":
            known.view, known.fresh = known.fresh or {}, None
        else:
            # As text: arithmetic on decimals rounds to 28 digits.
            entry: Mapping[str, Any] = json.loads(data, parse_float=str)
            customer, value = entry["key"], entry["value"]
            cents = None if value is None else int(value["amount"].replace(".", ""))
            view = known.view if known.fresh is None else known.fresh
            view.pop(customer, None)
            if cents is not None:
                view[customer] = cents
            if known.name and event_id:
                self._answers.append(self._answer(asked, known, customer, cents))

    def _answer(self, asked: str, known: _Known, customer: str, cents: int | None) -> Answer:
        ((partition, position),) = _positions(known.last_id).items()
        epoch, address = known.source
        now = time.monotonic()
        return Answer(
            sent=now,
            received=now,
            asked=asked,
            customer=customer,
            max_lag=None,
            min_position=None,
            status=404 if cents is None else 200,
            server=address,
            role="active",
            generation=int(known.last_id.partition("/")[0]),
            partition=partition,
            position=position,
            epoch=epoch,
            lag=None,
            cents=cents,
            retry_after=False,
            detail="",
        )


def _positions(event_id: str) -> dict[int, int]:
    return {int(partition): int(position) for partition, position in _POSITION.findall(event_id)}
