"""Statuses of a service, and the causes that they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from balance_service.hosting.diagnosis import Known, causes_of
from balance_service.http.operations import ApplicationServer, HostedModel, OpenDeadLetters, PublishedTask
from balance_service.process.runtime import iso_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from balance_service.hosting.causes import Cause

HERE, PEER, THIRD = "a:1", "b:1", "c:1"
NOW_MS = 1_767_225_600_000
WAITS = OpenDeadLetters(cause="key-null", status="waiting", needs_decision=True, count=3)
HEALS = OpenDeadLetters(cause="schema-id-unknown", status="scheduled", needs_decision=False, count=2)
STANDS = "partition {0} has been at position 5{0} since 2026-01-01T00:00:00Z, and is 7 records behind"
LONG_AGO = 3600.0


def task(partition: int = 0, state: str = "RUNNING", *, seconds: float = 3600, stage: str = "m", **more: Any) -> Any:
    """A task as a status has it. `seconds`: how long it has been in its state."""
    usual: dict[str, Any] = {
        "task": f"{stage}_{partition}",
        "read_model": stage,
        "partition": partition,
        "role": "active",
        "state": state,
        "answers": True,
        "epoch": 1,
        "position": 5,
        "lag": 0,
        "lag_seconds": 0,
        "lag_seconds_is_least": False,
        "reason": "",
        "since": iso_time(NOW_MS - int(1000 * seconds)),
        "restored": 0,
        "to_restore": 0,
        "seconds_left": None,
        "dead_letters": [],
    }
    return PublishedTask(**{**usual, **more})


def server(address: str, *tasks: Any, silent: int | None = 0, is_shared: bool = False) -> Any:
    return ApplicationServer(
        application_server=address,
        incarnation="i",
        suspect=silent != 0,
        silent_seconds=silent,
        shared=is_shared,
        models=["m"],
        tasks=[*tasks],
    )


def model(name: str = "m", status: Any = "serving", *, seconds: float = 60, rules: Sequence[int] = ()) -> Any:
    since = iso_time(NOW_MS - int(1000 * seconds))
    return HostedModel(
        name=name,
        model=name.partition(".g")[0],
        status=status,
        since=since,
        read_otherwise=[*rules],
        source="t",
        partitions=2,
        standby_replicas=0,
    )


def status(*own: Any, **more: Any) -> dict[str, Any]:
    """The status of an instance, which hears itself."""
    usual: dict[str, Any] = {"reasons": [], "models": [model()], "unhosted": [], "endsAgeSeconds": 0, "peers": []}
    usual |= more
    servers = [server(HERE, *own, silent=usual.pop("silent_here", 0)), *usual.pop("peers")]
    return {"applicationServer": HERE, "tasks": [*own], "applicationServers": servers, **usual}


def causes(
    known: dict[str, Any],
    *,
    without_broker: float | None = None,
    answers: float | None = LONG_AGO,
    heard: float | None = LONG_AGO,
    unowned: Mapping[str, float] | None = None,
    session: int = 10,
    **more: Any,
) -> list[Cause]:
    """Returns the causes of a status. Times are seconds ago."""

    def ms(seconds: float | None) -> int | None:
        return None if seconds is None else NOW_MS - int(1000 * seconds)

    since = {name: NOW_MS - int(1000 * seconds) for name, seconds in (unowned or {}).items()}
    silent = {one.application_server: one.silent_seconds for one in known["applicationServers"]}
    here: dict[str, Any] = {"brokers": "k:9092", "now_ms": NOW_MS, "session_timeout_ms": 1000 * session}
    here |= {"silent_ms": ms(without_broker), "settled_ms": ms(answers), "heard_ms": ms(heard)}
    here["heard"] = {address: NOW_MS - 1000 * seconds for address, seconds in silent.items() if seconds is not None}
    return causes_of(known, Known(**here, unowned=since, **more))


def section(cause: Cause) -> str:
    return cause.shown().section


def only(found: Sequence[Cause]) -> Cause:
    assert len(found) == 1, [cause.what for cause in found]
    return found[0]
