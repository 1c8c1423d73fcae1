"""An operator who rebuilds a read model, switches between its generations and drops them, while faults last.

Each request follows from the generations as an instance knows them. It may be refused, or fail. Then the operator looks
again. The topic of generations tells at the end what was carried out.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import httpx

from tests.chaos.audit import Decoder, read_committed
from tests.chaos.checks import Violation
from tests.chaos.cluster import stage_in, stage_of, tasks_of
from tests.support.kafka import admin
from tests.support.operator import Operator

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from balance_service.devtools.local.stack import LocalStack
    from tests.chaos.cluster import Member

_ACCEPTED, _REFUSED, _UNAVAILABLE = 202, 409, 503
_KEEP_SECONDS = 86_400
_WAYS = ("when_equal", "always", "never")
# In events per second and instance. At full speed, a rebuild takes the processors from the instances that start; one
# instance alone builds the 450,000 events of a run in 90 s.
_MAX_RATE = 5_000
_LOOK_SECONDS = 0.5
_ASK_SECONDS = 10.0
_SHOWN = 3
# Probabilities of a request for the second generation, by its status, at each look.
_DROPS = {"building": 0.03, "ready": 0.1, "kept": 0.15}
_SWITCHES = {"building": 0.03, "ready": 0.7, "kept": 0.25}


class Rebuilder(Operator):
    """Sends requests from a thread between `start` and `stop`. The other methods are for one thread, after `stop`."""

    def __init__(
        self,
        model: str,
        urls: Callable[[], Sequence[str]],
        seed: int,
        may_differ: str | None = None,
        pause_seconds: tuple[float, float] = (0.3, 2.0),
    ) -> None:
        """Args:
        urls: returns the instances to ask now.
        may_differ: prefix of the keys that two generations may have different states of for a while.
        pause_seconds: the shortest and the longest pause between two requests.
        """
        super().__init__(model, self._urls_in_turn, _ASK_SECONDS)
        self._all_urls = urls
        self._chooser = random.Random(f"{seed}-rebuilder-{model}")
        self._may_differ = may_differ
        self._pause_seconds = pause_seconds
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._violations: list[Violation] = []
        self.requests: Counter[str] = Counter()
        """By verb and status."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name=f"rebuilder-{self._model}")
        self._thread.start()

    def stop(self) -> None:
        """Sends no more requests. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def wait_built(self, seconds: float) -> None:
        """Waits until no generation is built: each build registers schemas."""
        for _ in self._until(lambda known: (other := _other(known)) is None or other.status != "building", seconds):
            pass

    def take_violations(self) -> list[Violation]:
        """Returns and clears the violations."""
        taken, self._violations = self._violations, []
        return taken

    def post(self, verb: str, **body: Any) -> int | None:
        status = super().post(verb, **body)
        self.requests[f"{verb} {status or 'no answer'}"] += 1
        if status not in (None, _ACCEPTED, _REFUSED, _UNAVAILABLE):
            self._violations.append(Violation("status", f"{verb} {self._model} {body} is answered {status}"))
        return status

    def settle(self, seconds: float) -> None:
        """Ends with two generations, where one serves and sends all outputs, and at least one dropped."""
        for known in self._until(_is_settled, seconds):
            if (other := _other(known)) is None:
                self.post("rebuild", switch="always", keepOld=_KEEP_SECONDS)
            elif other.status == "ready":
                self._compare(known)
                self.post("switch", to=other.number)
            elif other.status == "kept" and not _has_dropped(known):
                self.post("drop", generation=other.number)

    def leave_one(self, seconds: float) -> None:
        """Drops all generations but the serving one."""
        for known in self._until(lambda known: _other(known) is None, seconds):
            if (other := _other(known)) is not None:
                self.post("drop", generation=other.number)

    def _until(self, is_so: Callable[[Mapping[str, Any]], bool], seconds: float) -> Iterator[Mapping[str, Any]]:
        """Yields the generations, as an instance knows them, until they are so.

        Fails if that takes so many seconds in which no build gets further: a build's rate is bounded.
        """
        deadline, furthest = time.monotonic() + seconds, dict[int, int]()
        while not (known := self.generations()) or not is_so(known):
            for one in known["generations"] if known else ():
                if one["status"] == "building" and one["position"] > furthest.get(one["generation"], -1):
                    furthest[one["generation"]] = one["position"]
                    deadline = time.monotonic() + seconds
            assert time.monotonic() < deadline, f"not caught up: {known}"
            if known:
                yield known
            time.sleep(_LOOK_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(self._chooser.uniform(*self._pause_seconds)):
            if known := self.generations():
                self._take_step(known)

    def _take_step(self, known: Mapping[str, Any]) -> None:
        other, luck = _other(known), self._chooser.random()
        if other is None:
            way = self._chooser.choice(_WAYS)
            self.post("rebuild", switch=way, keepOld=_KEEP_SECONDS, maxRate=_MAX_RATE)
            return
        if other.status == "ready":
            self._compare(known)
        drops = _DROPS[other.status]
        if luck < drops:
            self.post("drop", generation=other.number)
        elif luck < drops + _SWITCHES[other.status]:
            self.post("switch", to=other.number)

    def _compare(self, known: Mapping[str, Any]) -> None:
        """Checks that a generation that has caught up has the states of the serving one: both have the same code."""
        comparison = known["comparison"]
        if comparison is None or not any(keys for name, keys in comparison.items() if name != "equal"):
            return
        differing = [*self._differences()]
        if self._may_differ is None or any(not entry["key"].startswith(self._may_differ) for entry in differing):
            detail = f"two generations of '{self._model}' differ: {comparison}, such as {differing[:_SHOWN]}"
            self._violations.append(Violation("generation", detail))

    def _differences(self) -> Iterator[Mapping[str, Any]]:
        for url in self._urls_in_turn():
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"{url}/api/models/{self._model}/differences", timeout=_ASK_SECONDS)
                if answer.is_success:
                    yield from answer.json()["differences"]

    def _urls_in_turn(self) -> list[str]:
        urls = self._all_urls()
        return self._chooser.sample(urls, len(urls))


class _Other(NamedTuple):
    """The generation that does not serve."""

    number: int
    status: str


def _other(known: Mapping[str, Any]) -> _Other | None:
    others = [_Other(one["generation"], one["status"]) for one in known["generations"] if one["status"] != "serving"]
    return others[0] if others else None


def _has_dropped(known: Mapping[str, Any]) -> bool:
    """Whether there is a generation no more; numbers are not used again."""
    newest: int = max(one["generation"] for one in known["generations"])
    return newest > len(known["generations"])


def _is_settled(known: Mapping[str, Any]) -> bool:
    other = _other(known)
    return other is not None and other.status == "kept" and known["action"] == "settle" and _has_dropped(known)


class History(NamedTuple):
    """The generations of a read model, as their topic has them."""

    serving: int
    live: frozenset[int]
    dropped: frozenset[int]
    served: frozenset[int]
    """All that have served."""
    actions: Counter[str]
    violations: tuple[Violation, ...]
    """Records that do not follow the one before."""


def history_of(stack: LocalStack, application_id: str, model: str) -> History:
    """Reads the topic of generations, which has all records."""
    decoder = Decoder(stack.schema_registry_url)
    (records,) = read_committed(stack.bootstrap_servers, f"{application_id}-generations", 1)
    states = [decoder.decode(record.value) for record in records if record.key == model.encode() and record.value]
    last = states[-1]
    building = last["building"]
    others = (None if building is None else building["generation"], last["kept"])
    live = frozenset({last["serving"], *(number for number in others if number is not None)})
    return History(
        last["serving"],
        live,
        frozenset(range(1, last["newest"] + 1)) - live,
        frozenset(state["serving"] for state in states),
        Counter(state["action"] for state in states),
        tuple(
            Violation("generation", f"{after['action']} {after['number']} of '{model}' follows {before['number']}")
            for before, after in itertools.pairwise(states)
            if after["number"] != before["number"] + 1
        ),
    )


def check_nothing_left(
    stack: LocalStack, application_id: str, model: str, members: Sequence[Member], seconds: float
) -> Iterator[Violation]:
    """Checks that dropped generations have no changelog, no store and no task, after some seconds at most."""
    stages = {stage_of(model, number) for number in history_of(stack, application_id, model).dropped}
    deadline = time.monotonic() + seconds
    while left := [*_left(stack, application_id, stages, members)]:
        if time.monotonic() > deadline:
            yield Violation("generation", f"dropped generations of '{model}' leave {left}")
            return
        time.sleep(_LOOK_SECONDS)


def _left(stack: LocalStack, application_id: str, stages: Collection[str], members: Sequence[Member]) -> Iterator[str]:
    changelogs = {f"{application_id}-{stage}-changelog" for stage in stages}
    yield from sorted(changelogs & admin(stack).list_topics(timeout=_ASK_SECONDS).topics.keys())
    yield from (str(path) for member in members for path in member.state_dir.iterdir() if stage_in(path.name) in stages)
    yield from (task["task"] for task in tasks_of(members) if stage_in(task["task"]) in stages)
