"""The story: changes to the stack, the expectations during them, and a report."""

from __future__ import annotations

import http.client
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.errors import ConfigurationError
from balance_service.kafka.partitioner import partition_of
from tests.compose.monitoring import Prometheus, check_dashboard
from tests.compose.stack import HOST, Stack
from tests.compose.traffic import Events, Traffic, check_recount, customer, is_ready
from tests.support.api import Connection, query

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


class Report:
    """Collects lines in order and prints each at once."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str, str]] = []

    @property
    def passed(self) -> bool:
        """Whether all expectations hold."""
        return all(verdict != "FAILED" for verdict, _, _ in self._lines)

    def note(self, what: str, found: str) -> None:
        """Adds information."""
        self._add("", what, found)

    def expect(self, what: str, holds: bool, found: str) -> None:
        """Adds an expectation."""
        self._add("ok" if holds else "FAILED", what, found)

    def check(self, what: str, seconds: float, at_most: float | None = None) -> None:
        """Adds a time in seconds, with its limit if there is one."""
        if at_most is None:
            self.note(what, f"{seconds:.1f} s")
        else:
            self.expect(what, seconds < at_most, f"{seconds:.1f} s of {at_most:.0f}")

    def table(self) -> str:
        """Returns all lines and the verdict."""
        width = max(len(what) for _, what, _ in self._lines)
        rows = [f"{verdict:6}  {what:{width}}  {found}\n" for verdict, what, found in self._lines]
        return "\n" + "".join(rows) + ("all expectations hold\n" if self.passed else "some expectations FAILED\n")

    def _add(self, verdict: str, what: str, found: str) -> None:
        self._lines.append((verdict, what, found))
        print(f"{verdict or '-':6}  {what}: {found}", flush=True)


PARTITIONS = 6
PARTS = ("changes", "monitoring", "rebuild")
"""The optional parts."""
_READY_SECONDS = 300.0
_RATE = 200.0
_LOADED_FOR_SECONDS = 20.0
_STOLEN = 7
_MORE_EVENTS_EACH = 3
# The promised limits.
_FIRST_BALANCE_SECONDS = 60.0
_GAP_SECONDS = 15.0
_MEMORY_BYTES = 1_500 << 20


def play(stack: Stack, report: Report, customers: int, parts: Collection[str], folder: Path) -> None:
    """Plays the story from an empty stack to stopped replicas, with the chosen parts.

    Args:
        customers: the number of customers with a balance.
        parts: a selection of PARTS.
        folder: for the results of Prometheus.
    """
    _up(stack, report)
    _hardened(stack, report)
    prometheus = Prometheus(stack) if "monitoring" in parts else None
    _loaded(stack, report, customers)
    if "changes" in parts:
        _changed(stack, report, customers)
    if prometheus is not None:
        if "changes" not in parts:
            # Causes restores, which the dashboard should show.
            _scaled(stack, 2)
            _scaled(stack, 3)
        with Traffic(stack, customers, _home, _RATE):
            check_dashboard(prometheus, stack, report, folder)
    for replica in stack.replicas():
        used, state = stack.memory(replica.container), stack.inspect([replica.container])[0]["State"]
        report.expect(
            f"memory of {replica.container[:12]}",
            0 < used <= _MEMORY_BYTES and not state["OOMKilled"],
            f"{_of_memory(used)}, killed for memory: {state['OOMKilled']}",
        )
    codes = stack.stop()
    report.expect("exit codes after SIGTERM", codes == [0, 0, 0], str(codes))
    if "rebuild" in parts:
        _rebuilt(stack, report, customers)


def _up(stack: Stack, report: Report) -> None:
    began, processors = time.monotonic(), _processor_times()
    stack.scale(3)
    _first_balance(stack)
    report.check("up to first balance", time.monotonic() - began, _FIRST_BALANCE_SECONDS)
    spent = [after - before for before, after in zip(processors, _processor_times(), strict=True)]
    # Time that the hypervisor gave to other machines makes the figure above less meaningful.
    report.note("stolen processor time", f"{spent[_STOLEN] / sum(spent):.0%} went to other machines")
    _wait(lambda: sum(is_ready(r.port) for r in stack.replicas()) == 3, "three replicas ready")
    report.check("up to three ready", time.monotonic() - began)


def _processor_times() -> list[int]:
    """Returns the ticks of all processors since boot, in the order of Linux' /proc/stat."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1 : _STOLEN + 2]]


def _append_to_each(stack: Stack, customers: int, cents: Callable[[int], int]) -> None:
    """Appends one event for every customer; `cents` gives its amount by number."""
    events = Events(stack)
    for number in range(customers):
        events.append(customer(number), cents(number))
    events.flush()


def _loaded(stack: Stack, report: Report, customers: int) -> None:
    began = time.monotonic()
    _append_to_each(stack, customers, lambda number: 100 + number % 1_000)
    report.note("loaded", f"{customers} customers in {time.monotonic() - began:.0f} s")
    check_recount(stack, report, "after the load", customers)


def _changed(stack: Stack, report: Report, customers: int) -> None:
    changes: dict[str, Callable[[], None]] = {
        "scaled 3 to 1": partial(_scaled, stack, 1),
        "scaled 1 to 3": partial(_scaled, stack, 3),
        "container killed": partial(_killed, stack),
    }
    for title, change in changes.items():
        with Traffic(stack, customers, _home, _RATE) as traffic:
            time.sleep(_LOADED_FOR_SECONDS / 2)
            change()
            time.sleep(_LOADED_FOR_SECONDS)
        found = traffic.findings
        report.check(f"{title}: longest silence of a partition", max(traffic.longest_gaps.values()), _GAP_SECONDS)
        report.expect(
            f"{title}: answers",
            not found.wrong and not traffic.failures,
            f"{found.answers} answered, {found.retry_later} told to retry, {found.broken} cut off, "
            f"{found.wrong.total()} wrong {dict(found.wrong) or ''}{traffic.failures or ''}",
        )
        check_recount(stack, report, title, customers)


def _home(name: str) -> int:
    return partition_of(name.encode(), PARTITIONS)


def _first_balance(stack: Stack) -> None:
    """Waits until a client's first command is accepted and its balance is readable."""

    def answered() -> bool:
        for replica in stack.replicas():
            connection = Connection(HOST, replica.port, 5.0)
            try:
                added = connection.post("/api/balance.addFunds", {"customerId": "first", "amount": "1.00"}, {})
                if added.status == 202:
                    target = query("first", min_position=added.headers["balance-position"])
                    if connection.ask(target).status == 200:
                        return True
            except (OSError, http.client.HTTPException):
                continue
            finally:
                connection.close()
        return False

    _wait(answered, "the first balance")


def _hardened(stack: Stack, report: Report) -> None:
    replica = stack.replicas()[0]
    host = stack.inspect([replica.container])[0]["HostConfig"]
    report.expect(
        "container configuration",
        host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Memory"] == _MEMORY_BYTES,
        f"read-only {host['ReadonlyRootfs']}, capabilities dropped {host['CapDrop']}, "
        f"memory {host['Memory'] / 2**20:.0f} MiB",
    )
    user = stack.inside(replica.container, "id", "-u").strip()
    capabilities = stack.inside(replica.container, "grep", "CapEff", "/proc/1/status").split()[1]
    report.expect(
        "container process",
        user == "10001" and int(capabilities, 16) == 0,
        f"user {user}, effective capabilities {capabilities}",
    )
    try:
        stack.inside(replica.container, "touch", "/opt/balance-service/x")
        report.expect("root file system", False, "can be written")
    except ConfigurationError:
        report.expect("root file system", True, "cannot be written")


def _scaled(stack: Stack, replicas: int) -> None:
    stack.scale(replicas)
    _wait(
        lambda: (now := stack.replicas()) and len(now) == replicas and all(is_ready(r.port) for r in now),
        f"{replicas} replicas ready",
    )


def _killed(stack: Stack) -> None:
    victim = stack.replicas()[0]
    stack.kill(victim)

    def back() -> bool:
        now = {r.container: r for r in stack.replicas()}
        return len(now) == 3 and victim.container in now and all(is_ready(r.port) for r in now.values())

    time.sleep(1)
    _wait(back, "the killed container back")


def _rebuilt(stack: Stack, report: Report, customers: int) -> None:
    """Runs the heaviest job of a container: a rebuild of the whole topic at full speed.

    Several events per customer make the commits larger.
    """
    for _ in range(_MORE_EVENTS_EACH):
        _append_to_each(stack, customers, lambda _: 1)
    done = stack.rebuild()
    report.expect(
        "rebuilt in a container",
        done.exit_code == 0 and not done.out_of_memory,
        f"exit code {done.exit_code}, at most {_of_memory(done.memory)}; {done.said}",
    )
    _scaled(stack, 3)
    check_recount(stack, report, "rebuilt", customers)


def _of_memory(used: int) -> str:
    return f"{used / 2**20:.0f} MiB of {_MEMORY_BYTES / 2**20:.0f}"


def _wait(done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise ConfigurationError(f"{what}: not within {_READY_SECONDS:.0f} s")
        time.sleep(0.2)
