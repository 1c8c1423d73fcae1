"""What is wrong with a service, as causes: one for each thing that an operator can act on, or may wait for.

`causes_of` reads the status of all instances, as one of them knows it, and folds what follows from a cause away under
it: instances without a broker are silent, and their partitions have no owners; that is one cause, not twenty. It has no
state, and asks nobody.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from balance_service.model.stage import model_and_generation
from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_MOST_NAMES = 4
_MOST_FOLLOWING = 20
_LAG_SECONDS = 60
# What lasts shorter heals by itself as a rule, such as the move of a partition, and is not urgent.
_HEALS_MS = 10_000
# A killed owner is replaced after a session timeout, and the new one restores what it lacks.
_MOVES_MS = 30_000
_NUMBERS = re.compile(r"[0-9]+")
_SILENT = ("building", "ready", "kept")
_OWN_CODE = "the code of the read model "


class Urgency(IntEnum):
    """How soon an operator must act."""

    NONE = 0
    """Not at all, or it informs only."""
    SOON = 1
    """Within hours: answers become older, or there is less redundancy, or a decision is wanted."""
    NOW = 2
    """At night, too: queries get no answer, or one that becomes more and more outdated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Something that is not as it should be.

    `kind` is for programs. `what` and `action` are sentences without a full stop: what is so, and what to do. `heals`
    is whether waiting suffices. `since_ms` is since when, in ms since 1970; None if that is not known. `section` is
    that of the runbook; empty for none. `tasks` are the tasks that it concerns, `follows` what follows, in words.
    """

    kind: str
    urgency: Urgency
    what: str
    action: str
    heals: bool = False
    since_ms: int | None = None
    section: str = ""
    tasks: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()

    def shown(self) -> dict[str, Any]:
        """Returns the cause as JSON."""
        return {
            "kind": self.kind,
            "urgency": self.urgency.name.lower(),
            "what": self.what,
            "since": None if self.since_ms is None else iso_time(self.since_ms),
            "action": self.action,
            "heals": self.heals,
            "section": self.section,
            "tasks": [*self.tasks],
            "follows": [*self.follows[:_MOST_FOLLOWING]],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What an instance knows beyond its status.

    `brokers` is the address of Kafka; `silent_ms` since when it has answered nothing here, None while it answers;
    `unowned` since when this instance has seen no owner, by task; `own` the causes that only this instance can know.
    """

    brokers: str
    now_ms: int
    silent_ms: int | None = None
    unowned: Mapping[str, int]
    own: Sequence[Cause] = ()


def starting(reason: str, since_ms: int) -> Cause:
    """Returns the cause of an instance that starts.

    Args:
        reason: what it waits for; empty for nothing.
        since_ms: since when it waits, or starts.
    """
    section = "BalanceNotReady"
    if not reason:
        what = "This instance is starting"
        return Cause(kind="starting", urgency=Urgency.NONE, what=what, action="Wait", heals=True, since_ms=since_ms)
    return Cause(
        kind="starting",
        urgency=Urgency.SOON,
        what=f"This instance is starting, and waits: {reason}",
        action="Restore what it waits for: it goes on by itself",
        since_ms=since_ms,
        section=section,
    )


def unknown_settings(names: Sequence[str]) -> Iterator[Cause]:
    """Yields the cause of variables that begin like settings and are none, if there are any."""
    if names:
        like = "begins like a setting and is none" if len(names) == 1 else "begin like settings and are none"
        yield Cause(
            kind="unknown-setting",
            urgency=Urgency.NONE,
            what=f"{_listed(names)} {like}: ignored",
            action="Correct or remove what is misspelt, and restart this instance",
        )


def causes_of(status: Mapping[str, Any], known: Known) -> list[Cause]:
    """Returns the causes of a started instance's status, the most urgent first.

    Args:
        status: `http.operations.Status` without its causes.
    """
    seen = _Seen(status, known)
    if known.silent_ms is not None:
        found = [seen.without_broker(), *seen.halted_here()]
    else:
        silent = [*seen.silent()]
        explained = {task for cause in silent for task in cause.tasks}
        found = [*silent, *seen.shared(), *known.own, *seen.tasks_apart_from(explained), *seen.ends()]
    found += [*seen.generations(), *seen.letters()]
    return sorted(found, key=lambda cause: -cause.urgency)


class _Task(NamedTuple):
    """A task at an instance. `is_here`: at this one, which is never suspect to itself."""

    server: str
    is_here: bool
    is_live: bool
    told: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.told["task"])

    @property
    def is_active(self) -> bool:
        return self.is_live and bool(self.told["role"] == "active")


class _Judged(NamedTuple):
    """What is wrong with the task `name`. `of_many` returns the sentence for the names of some, and their servers."""

    name: str
    servers: tuple[str, ...]
    cause: Cause
    reason: str
    of_many: Callable[[Sequence[str], str], str]


class _Seen:
    """A status, by task."""

    def __init__(self, status: Mapping[str, Any], known: Known) -> None:
        self._status = status
        self._known = known
        self._here = status["applicationServer"]
        self._by_name: dict[str, list[_Task]] = defaultdict(list)
        for task in self._all():
            self._by_name[task.name].append(task)
        self._hosted = {model["model"] for model in status["models"]}
        self._silent_stages = {model["name"] for model in status["models"] if model["status"] in _SILENT}

    def _all(self) -> Iterator[_Task]:
        yield from (_Task(self._here, True, True, task) for task in self._status["tasks"])
        for server in self._status["applicationServers"]:
            address = server["applicationServer"]
            if address != self._here:
                yield from (_Task(address, False, not server["suspect"], task) for task in server["tasks"])

    def _owner(self, name: str) -> _Task | None:
        return max(
            (task for task in self._by_name.get(name, ()) if task.is_active),
            key=lambda task: task.told["epoch"],
            default=None,
        )

    @cached_property
    def _names(self) -> list[str]:
        """The tasks that should run. Of a stage that is hosted here, a silent instance's may be outdated."""
        elsewhere = {name for name, tasks in self._by_name.items() if any(not self._is_hosted(one) for one in tasks)}
        owned = {name for name in self._by_name if self._owner(name) is not None}
        return sorted({*self._status["unhosted"], *elsewhere, *owned}, key=_in_order)

    def _is_hosted(self, task: _Task) -> bool:
        return model_and_generation(task.told["readModel"])[0] in self._hosted

    def _serves(self, name: str) -> bool:
        return name.rpartition("_")[0] not in self._silent_stages

    def _lasts(self, since_ms: int | None, at_least_ms: int = _HEALS_MS) -> bool:
        """Whether something is so for longer than what heals by itself, as far as is known."""
        return since_ms is None or self._known.now_ms - since_ms >= at_least_ms

    def _unowned_since(self, name: str) -> int:
        return self._known.unowned.get(name, self._known.now_ms)

    def without_broker(self) -> Cause:
        """Returns the cause that Kafka answers nothing."""
        since_ms = self._known.silent_ms
        lasts = self._lasts(since_ms)
        return Cause(
            kind="broker",
            urgency=Urgency.NOW if lasts else Urgency.NONE,
            what=f"Kafka at {self._known.brokers} does not answer this instance",
            action="Restore it, or the network to it: nothing is lost, and the instances go on by themselves",
            heals=not lasts,
            since_ms=since_ms,
            section="BalanceEndsUnknown",
            tasks=tuple(name for name in self._by_name if self._serves(name)),
            follows=tuple(self._following_the_broker()),
        )

    def silent(self) -> Iterator[Cause]:
        """Yields a cause for each other instance that is silent, with what follows for its partitions."""
        for server in self._status["applicationServers"]:
            address, seconds = server["applicationServer"], server["silentSeconds"]
            if not server["suspect"] or address == self._here:
                continue
            following = [*self._left_by(server)]
            # It may have ended long before this instance was started.
            is_new = seconds is not None
            yield Cause(
                kind="silent",
                urgency=Urgency.SOON if is_new or following else Urgency.NONE,
                what=f"{address} is not heard of"
                + ("" if is_new else " since this instance was started")
                + (f"; {len(following)} of its partitions have no owner yet that answers" if following else ""),
                action="Start it again, unless it was removed. The others take its partitions over within "
                f"{_MOVES_MS // 1000} s, and need longer only if they must restore them",
                since_ms=self._known.now_ms - 1000 * seconds if is_new else None,
                section="BalanceInstanceDown",
                tasks=tuple(name for name, _ in following),
                follows=tuple(told for _, told in following),
            )

    def _left_by(self, server: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yields the partitions that a silent instance owned and that nobody answers for yet, in words."""
        expected = {*self._names}
        for task in server["tasks"]:
            name = task["task"]
            if task["role"] != "active" or name not in expected or not self._serves(name):
                continue
            owner = self._owner(name)
            if owner is None and not self._lasts(self._unowned_since(name), _MOVES_MS):
                yield name, f"{name} has no owner: queries for its keys get 503, unless a standby may answer"
            elif owner is not None and owner.told["state"] in ("CREATED", "RESTORING") and not owner.told["reason"]:
                yield name, f"{name} is opened at {owner.server}{_left(owner)}"

    def shared(self) -> Iterator[Cause]:
        for server in self._status["applicationServers"]:
            if server["shared"]:
                yield Cause(
                    kind="shared-address",
                    urgency=Urgency.NOW,
                    what=f"Several instances run as {server['applicationServer']}: many queries get 503",
                    action="Give each a BALANCE_APPLICATION_SERVER of its own, and restart it",
                    section="BalanceAddressShared",
                )

    def ends(self) -> Iterator[Cause]:
        age = self._status["endsAgeSeconds"]
        if age:
            since_ms = self._known.now_ms - 1000 * age
            yield Cause(
                kind="ends-unknown",
                urgency=Urgency.SOON if self._lasts(since_ms) else Urgency.NONE,
                what="The ends of a topic cannot be read: lags are not known, and no query with `maxLag` is answered",
                action="Restore the leaders of the topic's partitions",
                since_ms=since_ms,
                section="BalanceEndsUnknown",
            )

    def generations(self) -> Iterator[Cause]:
        """Yields what each generation that does not serve is waiting for, and each that should be built again."""
        numbers = {
            m["model"]: model_and_generation(m["name"])[1] for m in self._status["models"] if m["status"] == "serving"
        }
        for model in self._status["models"]:
            name, number = model_and_generation(model["name"])
            since_ms = _ms(model["since"])
            if model["status"] == "building":
                yield Cause(
                    kind="building",
                    urgency=Urgency.NONE,
                    what=f"Generation {number} of {name} is being built; generation {numbers.get(name, 1)} answers",
                    action="Wait. The generations show how far it is",
                    heals=True,
                    since_ms=since_ms,
                )
            if model["status"] == "ready":
                yield Cause(
                    kind="ready",
                    urgency=Urgency.SOON,
                    what=f"Generation {number} of {name} is ready and needs you",
                    action="Look at its differences: switch to it, or drop it",
                    since_ms=since_ms,
                )
            if model["status"] == "serving" and model["readOtherwise"]:
                schemas = _listed([str(one) for one in model["readOtherwise"]])
                yield Cause(
                    kind="read-otherwise",
                    urgency=Urgency.NONE,
                    what=f"{model['name']} began under older rules of the decoder: its states may have other values "
                    f"than today's of events under schema {schemas}",
                    action=f"Rebuild it: `balance-service rebuild {name}`",
                )

    def letters(self) -> Iterator[Cause]:
        """Yields the cause that dead letters need a decision, if some do."""
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for name in self._names:
            owner = self._owner(name)
            if owner is None or not self._serves(name):
                continue
            model = model_and_generation(owner.told["readModel"])[0]
            for letter in owner.told["deadLetters"]:
                if letter["needsDecision"]:
                    counts[model, letter["cause"]] += letter["count"]
        if total := sum(counts.values()):
            yield Cause(
                kind="letters",
                urgency=Urgency.SOON,
                what=f"{total:,} dead letter{' needs' if total == 1 else 's need'} you",
                action="Redrive those that can be applied now, discard those that must not count",
                section="BalanceDeadLettersWaiting",
                follows=tuple(
                    f"{model}: {count:,} with the cause {cause}" for (model, cause), count in sorted(counts.items())
                ),
            )

    def tasks_apart_from(self, explained: Iterable[str]) -> list[Cause]:
        """Returns the causes of tasks that do not do what they should, without those that another cause explains."""
        left_out = {*explained, *(task for cause in self._known.own for task in cause.tasks)}
        judged = [one for name in self._names if name not in left_out for one in self._judge(name)]
        return _grouped([*judged, *self._halted_standbys()])

    def halted_here(self) -> list[Cause]:
        """Returns the causes of the halted owners of this instance, which it knows without a broker."""
        here = [task for tasks in self._by_name.values() for task in tasks if task.is_here and task.is_active]
        return _grouped([self._halted(task) for task in here if task.told["state"] == "HALTED"])

    def _following_the_broker(self) -> Iterator[str]:
        """Yields in words what follows if Kafka answers nothing."""
        yield from self._status["reasons"]
        peers = [one for one in self._status["applicationServers"] if one["applicationServer"] != self._here]
        if peers:
            yield f"nothing is known about {_listed([one['applicationServer'] for one in peers])} any more"
        for name in self._names:
            owner = self._owner(name)
            if owner is not None and owner.is_here and owner.told["state"] not in ("RUNNING", "HALTED"):
                yield f"{name} is {owner.told['state']}" + (f": {owner.told['reason']}" if owner.told["reason"] else "")
        yield "lags are not known"

    def _judge(self, name: str) -> Iterator[_Judged]:
        """Yields what is wrong with a task, if anything is."""
        owner, serves = self._owner(name), self._serves(name)
        if owner is None:
            if serves:
                yield self._unowned(name)
            return
        told, since_ms = owner.told, _ms(owner.told["since"])
        match told["state"]:
            case "HALTED":
                yield self._halted(owner)
            case "CREATED" | "RESTORING" if serves:
                yield self._restoring(owner, since_ms)
            case "WAITING":
                yield self._waiting(owner, since_ms)
            case "RUNNING" if told["reason"]:
                # A task that runs has a reason only if it stands still.
                yield self._standing(owner, since_ms)
            case "RUNNING" if serves and (told["lagSeconds"] or 0) >= _LAG_SECONDS:
                yield self._behind(owner)

    def _unowned(self, name: str) -> _Judged:
        since_ms = self._unowned_since(name)
        lasts = self._lasts(since_ms, _MOVES_MS)
        cause = Cause(
            kind="unowned",
            urgency=Urgency.NOW if lasts else Urgency.NONE,
            what="",
            action="Have every instance host the read model. If all do, restart those that cannot reach Kafka"
            if lasts
            else f"Wait: a partition that moves has another owner within {_MOVES_MS // 1000} s",
            heals=not lasts,
            since_ms=since_ms,
            section="BalancePartitionUnanswered",
        )

        def told(names: Sequence[str], _where: str) -> str:
            return f"No instance has {_listed(names)}: queries for {'its' if len(names) == 1 else 'their'} keys get 503"

        return _Judged(name, (), cause, "", told)

    def _halted(self, task: _Task) -> _Judged:
        serves, reason = self._serves(task.name), task.told["reason"]
        is_owner = task.told["role"] == "active"
        action = "Keep its state directory, and act by the reason; then restart the instance"
        if reason.startswith(_OWN_CODE):
            action = "Release a corrected version on all instances, or have another generation serve"
        cause = Cause(
            kind="halted",
            urgency=Urgency.NOW if serves and is_owner else Urgency.SOON,
            what="",
            action=action,
            since_ms=_ms(task.told["since"]),
            section="BalanceTaskHalted",
        )
        return _Judged(
            task.name, (task.server,), cause, reason, _sentence("halted", reason, "" if is_owner else "standby ")
        )

    def _halted_standbys(self) -> Iterator[_Judged]:
        """Yields the standbys that are halted for another reason than their owner."""
        for name, tasks in self._by_name.items():
            owner = self._owner(name)
            for task in tasks:
                is_halted = task.is_live and not task.is_active and task.told["state"] == "HALTED"
                if is_halted and (owner is None or owner.told["state"] != "HALTED"):
                    yield self._halted(task)

    def _restoring(self, owner: _Task, since_ms: int | None) -> _Judged:
        reason = owner.told["reason"]
        # It opens again and again, for this reason.
        fails = bool(reason) and self._lasts(since_ms)
        is_slow = self._lasts(since_ms, _MOVES_MS)
        cause = Cause(
            kind="restoring",
            urgency=Urgency.NOW if fails and is_slow else Urgency.SOON if is_slow or fails else Urgency.NONE,
            what="",
            action="Restore what the reason names: it goes on by itself" if fails else "Wait",
            heals=not fails,
            since_ms=since_ms,
            section="BalanceRestoring",
        )
        what = f"being restored{_left(owner)}, and queries for its keys get 503"
        return _Judged(owner.name, (owner.server,), cause, reason, _sentence(what, reason))

    def _waiting(self, owner: _Task, since_ms: int | None) -> _Judged:
        serves, reason = self._serves(owner.name), owner.told["reason"]
        cause = Cause(
            kind="waiting",
            urgency=Urgency.SOON if serves and self._lasts(since_ms) else Urgency.NONE,
            what="",
            action="Restore what the reason names: it goes on by itself, within seconds",
            since_ms=since_ms,
            section="BalanceTaskWaiting",
        )
        return _Judged(
            owner.name, (owner.server,), cause, reason, _sentence("waiting, and no event is applied", reason)
        )

    def _standing(self, owner: _Task, since_ms: int | None) -> _Judged:
        reason = owner.told["reason"]
        cause = Cause(
            kind="stands-still",
            urgency=Urgency.NOW if self._serves(owner.name) else Urgency.SOON,
            what="",
            action="Restore what the error names. If one partition alone stands still, set its next record aside",
            since_ms=since_ms,
            section="BalanceFoldingStopped",
        )

        def told(names: Sequence[str], where: str) -> str:
            others = f". So do{'es' if len(names) == 2 else ''} {_listed(names[1:])}" if len(names) > 1 else ""
            return f"At {where}, {reason}{others}"

        return _Judged(owner.name, (owner.server,), cause, reason, told)

    def _behind(self, owner: _Task) -> _Judged:
        seconds = owner.told["lagSeconds"]
        cause = Cause(
            kind="behind",
            urgency=Urgency.SOON,
            what="",
            action="After an outage, wait. If the lag grows, add an instance",
            heals=True,
            since_ms=self._known.now_ms - int(1000 * seconds),
            section="BalanceLagGrowing",
        )
        return _Judged(owner.name, (owner.server,), cause, "", _sentence(f"more than {_LAG_SECONDS} s behind", ""))


class Since:
    """Since when some things are so. One thread notes them, any thread reads."""

    def __init__(self, clock: Callable[[], int]) -> None:
        """Args:
        clock: ms since 1970.
        """
        self._clock = clock
        self.of: Mapping[str, int] = {}
        """By name, in ms since 1970."""

    def note(self, names: Iterable[str]) -> None:
        """Notes the names of all things that are so now."""
        now = self._clock()
        self.of = {name: self.of.get(name, now) for name in names}


def _grouped(judged: Iterable[_Judged]) -> list[Cause]:
    """Returns a cause for tasks that have the same trouble: their reasons differ in numbers only."""
    groups: dict[tuple[object, ...], list[_Judged]] = defaultdict(list)
    for one in judged:
        # The name of a task is in its reason.
        reason = _NUMBERS.sub("#", one.reason.replace(one.name, ""))
        groups[one.cause.kind, one.cause.urgency, one.cause.heals, reason].append(one)
    found = []
    for alike in groups.values():
        first, names = alike[0], [one.name for one in alike]
        times = [one.cause.since_ms for one in alike if one.cause.since_ms is not None]
        where = ", ".join(sorted({server for one in alike for server in one.servers}))
        others = [one.of_many([one.name], ", ".join(one.servers)) for one in alike[1:] if one.reason != first.reason]
        found.append(
            replace(
                first.cause,
                what=first.of_many(names, where),
                since_ms=min(times, default=None),
                tasks=tuple(names),
                follows=tuple(others),
            )
        )
    return found


def _sentence(what: str, reason: str, role: str = "") -> Callable[[Sequence[str], str], str]:
    """Returns what makes a sentence of the names of tasks, and of where they are."""

    def told(names: Sequence[str], where: str) -> str:
        are = "is" if len(names) == 1 else "are"
        beginning = f"The {role}{_listed(names)}" if role else _listed(names)
        return f"{beginning} at {where} {are} {what}" + (f": {reason}" if reason else "")

    return told


def _left(owner: _Task) -> str:
    seconds = owner.told["secondsLeft"]
    return "" if seconds is None else f", about {seconds:.0f} s left"


def _listed(names: Sequence[str]) -> str:
    """Returns a few names in words."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _in_order(name: str) -> tuple[str, int]:
    stage, _, partition = name.rpartition("_")
    return stage, int(partition) if partition.isdecimal() else 0


def _ms(time: str | None) -> int | None:
    return None if time is None else round(datetime.fromisoformat(time).timestamp() * 1000)
