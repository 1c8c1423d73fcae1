"""What clients and operators do to the instances of a soak: events, commands, queries, streams, rebuilds, renewals."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

from confluent_kafka import Producer

from balance_service.client import Client, ClientError
from tests.support.kafka import read_topic
from tests.support.operator import Operator

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack

IDEMPOTENCY_WINDOW_SECONDS = 60.0
VISITS = "visits"
_REBUILT = ("balance", "rewards", VISITS)
_CUSTOMERS, _VISITORS, _PAGES = 300, 400, 9
_COMMANDS_EVERY, _QUERIES_EVERY, _VISITS_EVERY = 0.2, 0.04, 0.05
_EVENTS_OF_A_STREAM = 200
_OPERATOR_SECONDS = 300.0
_KEEP_SECONDS = 86_400


class Work:
    """Threads that repeat a step each, until the end of the context. An error of a thread is raised there."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.done: Counter[str] = Counter()
        self.endings: list[Callable[[], None]] = []
        """Called at the end: each ends steps that wait."""
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def repeat(self, name: str, step: Callable[[], None], every_seconds: float) -> None:
        """Has a new thread call `step`, and wait between the calls."""

        def run() -> None:
            try:
                while not self.stopping.wait(every_seconds):
                    step()
                    self.done[name] += 1
            except BaseException as error:
                self._failure = self._failure or error
                raise

        self._threads.append(threading.Thread(target=run, name=f"soak-{name}", daemon=True))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for end in self.endings:
            end()
        for thread in self._threads:
            thread.join()
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class Silences(logging.Handler):
    """Prints what clients log, and counts open change streams that send nothing for two and a half signs of life."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        print(told, flush=True)
        if "change stream" in told and "timed out" in told and "does not answer" not in told:
            self._work.done["silent streams"] += 1


class Clients:
    """The clients of some instances: each call goes to one of them, and an error during a restart is counted."""

    def __init__(self, urls: Sequence[str], tls: ssl.SSLContext, work: Work, seed: int) -> None:
        # Those of streams are closed while streams wait for a change.
        self._clients, streaming = (
            [
                Client(
                    url,
                    tls=tls,
                    trust_env=False,
                    timeout_seconds=5,
                    retry_seconds=20,
                    idempotency_window_seconds=IDEMPOTENCY_WINDOW_SECONDS,
                )
                for url in urls
            ]
            for _ in range(2)
        )
        self._work = work
        logging.getLogger("balance_service.client").addHandler(Silences(work))
        work.endings += [client.close for client in streaming]
        self._chooser = random.Random(seed)
        work.repeat("commands", self._add, _COMMANDS_EVERY)
        work.repeat("queries", self._query, _QUERIES_EVERY)
        for client, model in ((0, "balance"), (0, VISITS), (1, "balance"), (1, "rewards")):
            self._follow(streaming[client], model)

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def values(self, model: str) -> dict[str, Any]:
        """Returns key → value, as the first instance answers."""
        return {entry.key: entry.value for entry in self._clients[0].entries(model)}

    def _add(self) -> None:
        amount = Decimal(self._chooser.randrange(1, 10_000)).scaleb(-2)
        with suppress(ClientError):
            self._chooser.choice(self._clients).add_funds(f"customer-{self._chooser.randrange(_CUSTOMERS)}", amount)

    def _query(self) -> None:
        model = self._chooser.choice(("balance", "rewards", VISITS))
        key = {
            "balance": f"customer-{self._chooser.randrange(_CUSTOMERS)}",
            "rewards": f"card-{self._chooser.randrange(12)}",
            VISITS: f"visitor-{self._chooser.randrange(_VISITORS)}",
        }[model]
        with suppress(ClientError):
            # Most go to the instance whose memory is watched, and half of these on to the other one.
            client = self._clients[self._chooser.random() < 0.25]
            client.get(model, key)

    def _follow(self, client: Client, model: str) -> None:
        def listen() -> None:
            with suppress(ClientError):
                for number, _ in enumerate(client.changes(model)):
                    if self._work.stopping.is_set() or number >= _EVENTS_OF_A_STREAM:
                        return
                    self._work.done["changes"] += 1

        self._work.repeat(f"streams of {model}", listen, 1.0)


class Visiting:
    """A producer of JSON documents."""

    def __init__(self, stack: LocalStack, work: Work, seed: int) -> None:
        self._stack = stack
        self._chooser = random.Random(seed)
        self._producer = Producer(
            {"bootstrap.servers": stack.bootstrap_servers, "partitioner": "murmur2_random", "enable.idempotence": True}
        )
        work.repeat("visits", self._visit, _VISITS_EVERY)

    def flush(self) -> None:
        assert self._producer.flush(60) == 0

    def recounted(self) -> dict[str, dict[str, Any]]:
        """Returns visitor → state, recounted from the topic."""
        found: dict[str, dict[str, Any]] = defaultdict(lambda: {"visits": 0, "longest": 0, "pages": []})
        for message in read_topic(self._stack, VISITS):
            visit = json.loads(message.value() or b"")
            state = found[visit["visitor"]]
            state["visits"] += 1
            state["longest"] = max(state["longest"], visit["seconds"])
            state["pages"] = [*state["pages"], visit["page"]][-5:]
        return dict(found)

    def _visit(self) -> None:
        visitor = f"visitor-{self._chooser.randrange(_VISITORS)}"
        visit = {"visitor": visitor, "page": f"/{self._chooser.randrange(_PAGES)}"}
        self._producer.produce(VISITS, json.dumps({**visit, "seconds": self._chooser.randrange(600)}), visitor)
        self._producer.poll(0)


class Rebuilding:
    """An operator who rebuilds one read model after another, has the new generation serve, and drops the former one."""

    def __init__(self, urls: Sequence[str], work: Work, every_seconds: float) -> None:
        self._operators = {model: Operator(model, lambda: urls, _OPERATOR_SECONDS) for model in _REBUILT}
        self._turn = 0
        work.repeat("rebuilds", self._rebuild, every_seconds)

    def _rebuild(self) -> None:
        operator = self._operators[_REBUILT[self._turn % len(_REBUILT)]]
        self._turn += 1
        operator.ask("rebuild", switch="always", keepOld=_KEEP_SECONDS)
        kept = operator.the("kept")
        operator.wait_settled()
        operator.ask("drop", generation=kept)


def differing(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Returns the keys whose values differ, with both values."""
    keys = sorted({*found, *expected})
    return [f"{k}: {found.get(k)}, not {expected.get(k)}" for k in keys if found.get(k) != expected.get(k)]


def waited(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
