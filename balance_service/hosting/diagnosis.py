"""Finds the causes of trouble in the status of all instances, as one of them knows it.

`causes_of` folds what follows from a cause away under it: instances without a broker are silent, and their partitions
have no owners; that is one cause, not twenty. It has no state, and does no I/O.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from balance_service.engine.dead_letter import Status, is_final
from balance_service.engine.decisions import discard_warning
from balance_service.engine.processor import OWN_CODE
from balance_service.hosting.causes import Cause, Kind, Urgency, listed
from balance_service.model.stage import model_and_generation
from balance_service.model.versions import LACKS_VERSION, OTHER_TRANSFORM
from balance_service.process.runtime import without_numbers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from balance_service.http import operations

_LAG_SECONDS = 60
HEALS_MS = 10_000
"""What lasts shorter heals by itself as a rule, such as a query that is started again, and is not urgent."""
# A silent instance misses at least one more of the records that are written each second than this one does of its own.
_SILENT_MS = 2_000
# After the session timeout, the new owner of a partition restores what it lacks.
_REOPENS_MS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What an instance knows beyond its status. Times are in ms since 1970.

    `brokers` is the address of Kafka; `silent_ms` since when it has answered nothing here, None while it answers;
    `refusal` why it accepts no connection, if that is known. `settled_ms` is since when this instance runs without a
    pause and Kafka answers it; None if only that is known which is so now. `heard_ms` is since when this instance hears
    itself in the directory, None while it does not; `heard` when it has last heard each instance, by address, itself
    included; `unowned` since when it has seen no owner, by task; `own` are the causes that only it can know.
    """

    brokers: str
    now_ms: int
    session_timeout_ms: int
    silent_ms: int | None = None
    refusal: str = ""
    settled_ms: int | None = None
    heard_ms: int | None
    heard: Mapping[str, int]
    unowned: Mapping[str, int]
    own: Sequence[Cause] = ()

    @property
    def moves_ms(self) -> int:
        """How long a partition may lack an owner that answers, after its instance was killed."""
        return self.session_timeout_ms + _REOPENS_MS

    def lasts(self, since_ms: int | None, at_least_ms: int = HEALS_MS) -> bool:
        """Whether something is so for longer than what heals by itself, without the time of a pause or an outage."""
        times = [time for time in (since_ms, self.settled_ms) if time is not None]
        return not times or self.now_ms - max(times) >= at_least_ms


def causes_of(status: Mapping[str, Any], known: Known) -> list[Cause]:
    """Returns the causes of a started instance's status, the most urgent first.

    Args:
        status: `http.operations.Status` without its causes.
    """
    seen = _Seen(status, known)
    if known.silent_ms is not None:
        refused = [cause for cause in known.own if cause.kind == Kind.REFUSED]
        found = [seen.without_broker(refused), *refused, *seen.halted_here()]
    else:
        silent = [*seen.silent()]
        explained = {task for cause in silent for task in cause.tasks}
        found = [*silent, *seen.shared(), *seen.own(), *seen.tasks_apart_from(explained)]
    found = found or [*seen.unready()]
    told = {task.rpartition("_")[0] for cause in found for task in cause.tasks}
    found += [*seen.generations(told), *seen.letters()]
    return sorted(found, key=lambda cause: -cause.urgency)


class _Task(NamedTuple):
    """A task at an instance, which is live unless it is suspect. This one is never suspect to itself."""

    server: str
    is_live: bool
    told: operations.PublishedTask

    @property
    def name(self) -> str:
        return self.told.task

    @property
    def is_active(self) -> bool:
        return self.is_live and self.told.role == "active"

    @property
    def is_halted(self) -> bool:
        return self.told.state == "HALTED"

    @property
    def since_ms(self) -> int | None:
        return _ms(self.told.since)

    @property
    def fails(self) -> bool:
        """Whether it restores nothing, and has the reason of a failure. One that restores shows the last one, too."""
        return bool(self.told.reason) and not self.told.seconds_left

    def judged(self, kind: Kind, urgency: Urgency, told: str, action: str, *, heals: bool = False) -> _Judged:
        role = "" if self.told.role == "active" else self.told.role
        return _Judged(
            self.name, self.server, kind, urgency, told, action, heals, self.since_ms, self.told.reason, role
        )


class _Judged(NamedTuple):
    """The trouble of a task: it `is` something, such as "halted"; `where` is its instance, empty for none."""

    name: str
    where: str
    kind: Kind
    urgency: Urgency
    told: str
    action: str
    heals: bool
    since_ms: int | None
    reason: str = ""
    role: str = ""


class _Seen:
    """A status, by task."""

    def __init__(self, status: Mapping[str, Any], known: Known) -> None:
        self._status = status
        self._known = known
        self._here = status["applicationServer"]
        self._by_name: dict[str, list[_Task]] = defaultdict(list)
        self._tasks = [*self._all()]
        for task in self._tasks:
            self._by_name[task.name].append(task)
        self._hosted = {model.model for model in status["models"]}
        self._statuses = {model.name: model.status for model in status["models"]}

    def _all(self) -> Iterator[_Task]:
        yield from (_Task(self._here, True, task) for task in self._status["tasks"])
        for server in self._status["applicationServers"]:
            address = server.application_server
            if address != self._here:
                yield from (_Task(address, not server.suspect, task) for task in server.tasks)

    def _owner(self, name: str) -> _Task | None:
        return max(
            (task for task in self._by_name.get(name, ()) if task.is_active),
            key=lambda task: task.told.epoch,
            default=None,
        )

    @cached_property
    def _names(self) -> list[str]:
        """The tasks that should run. Of a stage that is hosted here, a silent instance's may be outdated."""
        elsewhere = {name for name, tasks in self._by_name.items() if any(not self._is_hosted(one) for one in tasks)}
        owned = {name for name in self._by_name if self._owner(name) is not None}
        return sorted({*self._status["unhosted"], *elsewhere, *owned}, key=_in_order)

    def _is_hosted(self, task: _Task) -> bool:
        return model_and_generation(task.told.read_model)[0] in self._hosted

    def _status_of(self, name: str) -> str:
        """What the generation of a task is for. Of one that is not hosted here, that is not known."""
        return str(self._statuses.get(name.rpartition("_")[0], "serving"))

    def _serves(self, name: str) -> bool:
        return self._status_of(name) == "serving"

    def _unowned_since(self, name: str) -> int:
        return self._known.unowned.get(name, self._known.now_ms)

    def without_broker(self, refused: Sequence[Cause]) -> Cause:
        """Returns the cause that Kafka answers nothing.

        Args:
            refused: causes that do not follow from it.
        """
        known = self._known
        since_ms, lasts = known.silent_ms, known.lasts(known.silent_ms)
        what, action = "does not answer this instance", "Restore it, or the network to it"
        if known.refusal:
            what = f"and this instance do not accept each other: {known.refusal}"
            action = "Correct certificates and passwords, here (BALANCE_KAFKA_CONFIG) or at the brokers"
        if lasts and known.lasts(known.silent_ms, known.session_timeout_ms):
            what += ". Here, plain queries get 503; those with `maxAge` get an old answer"
        apart = {cause.what for cause in refused}
        return Cause(
            Kind.BROKER,
            Urgency.NOW if lasts else Urgency.NONE,
            f"Kafka at {known.brokers} {what}",
            f"{action}: nothing is lost, and the instances go on by themselves",
            heals=not lasts,
            since_ms=since_ms,
            tasks=tuple(name for name in self._by_name if self._serves(name)),
            follows=tuple(told for told in dict.fromkeys(self._following_the_broker()) if told not in apart),
        )

    def own(self) -> list[Cause]:
        """Returns what only this instance knows, without what a task that is halted says, too."""
        halts = [task.told.reason for task in self._tasks if task.is_halted and task.told.reason]

        def is_halt(cause: Cause) -> bool:
            return any(reason in told for reason in halts for told in (cause.what, *cause.follows))

        return [
            one for one in self._known.own if one.kind not in (Kind.NOT_FOLDED, Kind.ENDS_UNKNOWN) or not is_halt(one)
        ]

    def unready(self) -> Iterator[Cause]:
        """Yields the cause that this instance is not ready, if it is not."""
        if reasons := self._status["reasons"]:
            what = f"This instance is not ready: {'; '.join(reasons)}"
            action = "Wait: as a rule, it passes within seconds. If it stays, the log of this instance says more"
            yield Cause(Kind.NOT_READY, Urgency.NONE, what, action, heals=True, servers=(self._here,))

    def silent(self) -> Iterator[Cause]:
        """Yields a cause for each other instance that is silent, with what follows for its partitions."""
        known = self._known
        for server in self._status["applicationServers"]:
            address = server.application_server
            # None: it may have ended long before this instance was started.
            since_ms = known.heard.get(address)
            if not server.suspect or address == self._here or self._may_hear_soon(since_ms):
                continue
            following = [*self._left_by(server)]
            what = f"{address} is not heard of" + (" since this instance was started" if since_ms is None else "")
            action = "Look whether its process runs, and start it again, unless it was removed"
            if following:
                what += f"; {len(following)} of its partitions have no owner yet that answers"
                action += (
                    f". The others take its partitions over within {known.moves_ms // 1000} s, and need longer only if "
                    "they must restore them"
                )
            elif self._is_replaced(server):
                action += ". The others have taken its partitions over"
            yield Cause(
                Kind.SILENT,
                Urgency.NONE if since_ms is None and not following else Urgency.SOON,
                what,
                action,
                since_ms=since_ms,
                tasks=tuple(name for name, _ in following),
                servers=(address,),
                follows=tuple(told for _, told in following),
            )

    def _may_hear_soon(self, since_ms: int | None) -> bool:
        """Whether this instance has heard too little, also of itself, to call one silent that it heard last then."""
        known = self._known
        if known.heard_ms is None:
            return True
        if since_ms is None:
            return not known.lasts(known.heard_ms)
        # Before that it heard no instance, not even itself.
        is_before = since_ms < known.heard_ms
        return self._is_as_silent(since_ms) or (is_before and not known.lasts(known.heard_ms, known.moves_ms))

    def _is_as_silent(self, since_ms: int | None) -> bool:
        """Whether this instance was last heard at about the same time."""
        here_ms = self._known.heard.get(self._here)
        return since_ms is not None and here_ms is not None and here_ms - since_ms < _SILENT_MS

    def _may_have_owner(self, name: str) -> bool:
        """Whether a task has an owner that is not heard now, and neither is this instance."""
        owners = (task for task in self._by_name.get(name, ()) if task.told.role == "active" and not task.is_live)
        return any(self._is_as_silent(self._known.heard.get(owner.server)) for owner in owners)

    def _is_replaced(self, server: operations.ApplicationServer) -> bool:
        """Whether a silent instance owned partitions, and all of them have other owners."""
        owned = {task.task for task in server.tasks if task.role == "active"}.intersection(self._names)
        owners = [self._owner(name) for name in owned]
        return bool(owned) and all(owner is not None and owner.told.state == "RUNNING" for owner in owners)

    def _left_by(self, server: operations.ApplicationServer) -> Iterator[tuple[str, str]]:
        """Yields the partitions that a silent instance owned and that have no owner yet that answers, in words."""
        expected = {*self._names}
        for task in server.tasks:
            name = task.task
            if task.role != "active" or name not in expected or not self._serves(name):
                continue
            owner = self._owner(name)
            if owner is None and not self._known.lasts(self._unowned_since(name), self._known.moves_ms):
                yield name, f"{name} has no owner: queries for its keys get 503, unless a standby may answer"
            elif owner is not None and owner.told.state in ("CREATED", "RESTORING", "CLOSED") and not owner.fails:
                yield name, f"{name} is opened at {owner.server}{_left(owner)}"

    def shared(self) -> Iterator[Cause]:
        for server in self._status["applicationServers"]:
            if server.shared:
                what = f"Several instances run as {server.application_server}: many queries get 503"
                action = "Give each a BALANCE_APPLICATION_SERVER of its own, and restart it"
                yield Cause(Kind.SHARED_ADDRESS, Urgency.NOW, what, action)

    def generations(self, told: Collection[str]) -> Iterator[Cause]:
        """Yields what each generation that does not serve is waiting for, and each that should be built again.

        Args:
            told: the stages that other causes concern.
        """
        numbers = {m.model: model_and_generation(m.name)[1] for m in self._status["models"] if m.status == "serving"}
        for model in self._status["models"]:
            name, number = model_and_generation(model.name)
            since_ms = _ms(model.since)
            if model.status == Kind.BUILDING and model.name not in told:
                what = f"Generation {number} of {name} is being built; generation {numbers.get(name, 1)} answers"
                action = "Wait. The generations show how far it is"
                yield Cause(Kind.BUILDING, Urgency.NONE, what, action, heals=True, since_ms=since_ms)
            if model.status == Kind.READY:
                what, action = f"Generation {number} of {name} is ready and needs you", "Look at its differences"
                yield Cause(Kind.READY, Urgency.SOON, what, f"{action}: switch to it, or drop it", since_ms=since_ms)
            if model.status == "serving" and model.read_otherwise:
                schemas = listed([str(one) for one in model.read_otherwise])
                what = (
                    f"{model.name} began under older rules of the decoder: its states may have other values than "
                    f"today's of events under schema {schemas}"
                )
                yield Cause(Kind.READ_OTHERWISE, Urgency.NONE, what, f"Rebuild it: `balance-service rebuild {name}`")

    def letters(self) -> Iterator[Cause]:
        """Yields the cause that dead letters need a decision, if some do."""
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for name in self._names:
            owner = self._owner(name)
            if owner is None or not self._serves(name):
                continue
            model = model_and_generation(owner.told.read_model)[0]
            for letter in owner.told.dead_letters:
                if letter.needs_decision:
                    counts[model, letter.cause] += letter.count
        if total := sum(counts.values()):
            what = f"{total:,} dead letter{' needs' if total == 1 else 's need'} you"
            action = f"{_what_to_do(cause for _, cause in counts)}. `balance-service dead-letters list` has their ids"
            told = [f"{model}: {count:,} with the cause {cause}" for (model, cause), count in sorted(counts.items())]
            yield Cause(Kind.LETTERS, Urgency.SOON, what, action, follows=tuple(told))

    def tasks_apart_from(self, explained: Collection[str]) -> list[Cause]:
        """Returns the causes of tasks that do not do what they should, without those that another cause explains."""
        # They tell why a task that runs applies nothing.
        own = {task for cause in self._known.own for task in cause.tasks}
        names = [name for name in self._names if name not in explained]
        judged = [one for name in names for one in self._judge(name, is_told=name in own)]
        return _grouped([*judged, *self._standbys()])

    def halted_here(self) -> list[Cause]:
        """Returns the causes of the halted owners of this instance, which it knows without a broker."""
        here = [task for task in self._tasks if task.server == self._here and task.is_active]
        return _grouped([self._halted(task) for task in here if task.is_halted])

    def _following_the_broker(self) -> Iterator[str]:
        """Yields in words what follows if Kafka answers nothing."""
        peers = [one for one in self._status["applicationServers"] if one.application_server != self._here]
        if peers:
            yield f"nothing is known about {listed([one.application_server for one in peers])} any more"
        for name in self._names:
            owner = self._owner(name)
            if owner is not None and owner.server == self._here and owner.told.state not in ("RUNNING", "HALTED"):
                yield f"{name} is {owner.told.state}, and is opened by itself"
        yield "lags are not known"

    def _judge(self, name: str, *, is_told: bool) -> Iterator[_Judged]:
        """Yields what is wrong with a task, if anything is. `is_told`: why it applies nothing is a cause already."""
        owner, serves = self._owner(name), self._serves(name)
        if owner is None:
            # An instance that does not hear itself knows of no owner elsewhere.
            if serves and self._known.heard_ms is not None and not self._may_have_owner(name):
                yield self._unowned(name)
            return
        told = owner.told
        match told.state:
            case "HALTED":
                yield self._halted(owner)
            case "CREATED" | "RESTORING" | "CLOSED" if serves or (owner.fails and self._known.lasts(owner.since_ms)):
                yield self._opening(owner)
            case "WAITING":
                yield self._waiting(owner)
            case "RUNNING" if is_told:
                pass
            case "RUNNING" if told.reason:
                # A task that runs has a reason only if it stands still.
                yield self._standing(owner)
            case "RUNNING" if serves and (told.lag_seconds or 0) >= _LAG_SECONDS:
                yield self._behind(owner)

    def _unowned(self, name: str) -> _Judged:
        since_ms, moves_ms = self._unowned_since(name), self._known.moves_ms
        lasts = self._known.lasts(since_ms, moves_ms)
        urgency = Urgency.NOW if lasts else Urgency.NONE
        action = f"Wait: a partition that moves has another owner within {moves_ms // 1000} s"
        if lasts:
            action = "Have every instance host the read model. If all do, restart those that cannot reach Kafka"
        told = "at no instance, and queries for {its} keys get 503"
        return _Judged(name, "", Kind.UNOWNED, urgency, told, action, not lasts, since_ms)

    def _halted(self, task: _Task) -> _Judged:
        serves, reason = self._serves(task.name), task.told.reason
        is_owner = task.told.role == "active"
        action = "Keep its state directory, and act by the reason; then restart the instance"
        if not serves:
            action = "Correct what the reason names, or drop this generation"
        elif reason.startswith(OWN_CODE):
            action = "Release a corrected version on all instances, or have another generation serve"
        urgency = Urgency.NOW if serves and is_owner else Urgency.SOON
        return task.judged(Kind.HALTED, urgency, Kind.HALTED, action)

    def _standbys(self) -> Iterator[_Judged]:
        """Yields the standbys that are halted for another reason than their owner, or that cannot follow it."""
        action = "Restore what the reason names: it goes on by itself"
        for task in self._tasks:
            owner = self._owner(task.name)
            if not task.is_live or task.is_active or (task.is_halted and owner is not None and owner.is_halted):
                continue
            if task.is_halted:
                yield self._halted(task)
            elif task.fails and self._known.lasts(task.since_ms):
                yield task.judged(Kind.STANDBY, Urgency.SOON, "not ready to take over", action)

    def _opening(self, owner: _Task) -> _Judged:
        serves, is_slow = self._serves(owner.name), self._known.lasts(owner.since_ms, self._known.moves_ms)
        fails = owner.fails and self._known.lasts(owner.since_ms)
        urgency = Urgency.SOON if is_slow or fails else Urgency.NONE
        told = "opened again and again" if fails else f"being restored{_left(owner)}"
        action = "Restore what the reason names: it goes on by itself" if fails else "Wait"
        if serves:
            urgency = Urgency.NOW if fails and is_slow else urgency
            told += ", and queries for {its} keys get 503"
        else:
            action += ". Or drop this generation"
        judged = owner.judged(Kind.RESTORING, urgency, told, action, heals=not fails)
        # One that restores shows why the task before it was closed.
        return judged if owner.fails else judged._replace(reason="")

    def _waiting(self, owner: _Task) -> _Judged:
        action = "Restore what the reason names: it goes on by itself, within seconds"
        if LACKS_VERSION in owner.told.reason:
            action = "Switch to a generation whose version is here, or name the class of its version and restart"
        elif OTHER_TRANSFORM in owner.told.reason:
            action = (
                "Release the `transform` that it had, or the new one as the next `version`; or rebuild it and switch"
            )
        is_urgent = self._known.lasts(owner.since_ms) and self._status_of(owner.name) != "kept"
        urgency = Urgency.SOON if is_urgent else Urgency.NONE
        return owner.judged(Kind.WAITING, urgency, "waiting, and no event is applied", action)

    def _standing(self, owner: _Task) -> _Judged:
        urgency = Urgency.NOW if self._serves(owner.name) else Urgency.SOON
        urgency = urgency if self._known.lasts(owner.since_ms) else Urgency.NONE
        action = "Restore what the error names. If one partition alone stands still, set its next record aside"
        judged = owner.judged(Kind.STANDS_STILL, urgency, "standing still", action)
        return judged._replace(reason=judged.reason.removeprefix(f"{owner.name} stands still: "))

    def _behind(self, owner: _Task) -> _Judged:
        action, told = "After an outage, wait. If the lag grows, add an instance", f"more than {_LAG_SECONDS} s behind"
        since_ms = self._known.now_ms - int(1000 * (owner.told.lag_seconds or 0))
        return owner.judged(Kind.BEHIND, Urgency.SOON, told, action, heals=True)._replace(since_ms=since_ms)


def _grouped(judged: Iterable[_Judged]) -> list[Cause]:
    """Returns a cause for tasks that have the same trouble: their sentences differ in numbers only."""
    groups: dict[tuple[object, ...], list[_Judged]] = defaultdict(list)
    for one in judged:
        # The name of a task is in its reason.
        reason = without_numbers(one.reason.replace(one.name, ""))
        groups[one.kind, one.urgency, one.action, one.role, reason].append(one)
    found = []
    for first, *more in groups.values():
        alike, times = [first, *more], [one.since_ms for one in (first, *more) if one.since_ms is not None]
        found.append(
            Cause(
                first.kind,
                first.urgency,
                _sentence(alike),
                first.action,
                heals=first.heals,
                since_ms=min(times, default=None),
                tasks=tuple(one.name for one in alike),
                servers=tuple(sorted({one.where for one in alike if one.where})),
                follows=tuple(_sentence([one]) for one in more if one.reason != first.reason),
            )
        )
    return found


def _sentence(alike: Sequence[_Judged]) -> str:
    """Returns what is so with some tasks. The reason is that of the first."""
    first, is_one = alike[0], len(alike) == 1
    where = ", ".join(sorted({one.where for one in alike if one.where}))
    whose = f"The {first.role} " if first.role else ""
    named = f"{whose}{listed([one.name for one in alike])}" + (f" at {where}" if where else "")
    told = first.told.replace("{its}", "its" if is_one else "their")
    return f"{named} {'is' if is_one else 'are'} {told}" + (f": {first.reason}" if first.reason else "")


def _left(owner: _Task) -> str:
    seconds = owner.told.seconds_left
    return "" if seconds is None else f", about {seconds:.0f} s left"


def _what_to_do(letters: Iterable[str]) -> str:
    """Returns what to do about dead letters with these causes that need a decision."""
    warnings = {cause: discard_warning(cause, Status.WAITING) for cause in sorted({*letters})}
    others = {cause for cause, warning in warnings.items() if not warning}
    keep = "; ".join(f"if the cause is {cause}, {why}" for cause, why in warnings.items() if why)
    if not others:
        return keep[:1].upper() + keep[1:]
    told = "Redrive those that can be applied now, discard those that must not count"
    if all(is_final(cause) for cause in others):
        told = "Correct what their producer sends, and discard them: no redrive can apply them"
    return f"{told}; but {keep}" if keep else told


def _in_order(name: str) -> tuple[str, int]:
    stage, _, partition = name.rpartition("_")
    return stage, int(partition) if partition.isdecimal() else 0


def _ms(time: str | None) -> int | None:
    return None if time is None else round(datetime.fromisoformat(time).timestamp() * 1000)
