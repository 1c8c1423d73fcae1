"""The story: three replicas come up, are scaled 3 → 1 → 3 under load, one is killed, and every balance is recounted.

    python -m tests.compose [--customers N] [--folder DIR]

It ends with a table and exit code 0, or with what was not as it should be and exit code 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import time
from contextlib import suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.cluster.partitioner import partition_of
from balance_service.errors import ConfigurationError
from balance_service.local.ports import free_port, is_free
from tests.chaos.requests import Connection, query
from tests.compose.engine import engine
from tests.compose.images import ROOT, image_bytes, prepare_images
from tests.compose.report import Report
from tests.compose.stack import HOST, Replica, Stack
from tests.compose.traffic import TOPIC, Events, Traffic, customer, is_ready
from tests.recount import recount

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTITIONS = 6
_HOST_PORTS = 10
_READY_SECONDS = 300.0
_CATCH_UP_SECONDS = 900.0
_ASKED = 300
_RATE = 200.0
_LOADED_FOR_SECONDS = 20.0
# What is promised.
_FIRST_BALANCE_SECONDS = 60.0
_GAP_SECONDS = 15.0
_MEMORY_BYTES = 1_500 << 20


def main() -> int:
    """Play the story; the exit code."""
    parser = argparse.ArgumentParser(
        prog="make compose-test", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--customers", type=int, default=1_000_000, help="how many have a balance")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "local-data" / "compose-test", help="for logs, and an engine of our own"
    )
    chosen = parser.parse_args()
    folder: Path = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report()
    try:
        with engine(folder / "engine") as environment:
            images = prepare_images(environment, folder)
            report.note("image", f"{image_bytes(environment, images['BALANCE_IMAGE']) / 1e6:.0f} MB")
            stack = Stack(environment, images, _ports())
            report.note("composed by", f"{stack.composed_by}, kafka {images['KAFKA_IMAGE']}")
            stack.down()
            try:
                _play(stack, report, chosen.customers)
            finally:
                with suppress(ConfigurationError):
                    stack.save_logs(folder / "containers.log")
                stack.down()
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(report.table())
    return 0 if report.passed else 1


def _ports() -> dict[str, str]:
    for _ in range(50):
        first = free_port()
        if all(is_free(port) for port in range(first, first + _HOST_PORTS)):
            break
    return {
        "KAFKA_PORT": str(free_port()),
        "REGISTRY_PORT": str(free_port()),
        "BALANCE_HOST_PORTS": f"{first}-{first + _HOST_PORTS - 1}",
        "BALANCE_PARTITIONS": str(PARTITIONS),
    }


def _play(stack: Stack, report: Report, customers: int) -> None:
    began = time.monotonic()
    stack.scale(3)
    _first_balance(stack)
    report.check("up to first balance", time.monotonic() - began, _FIRST_BALANCE_SECONDS)
    _wait(lambda: sum(is_ready(r.port) for r in stack.replicas()) == 3, _READY_SECONDS, "three replicas ready")
    report.check("up to three ready", time.monotonic() - began)
    _hardened(stack, report)

    began = time.monotonic()
    events = Events(stack)
    for number in range(customers):
        events.append(customer(number), 100 + number % 1_000)
    events.flush()
    report.note("loaded", f"{customers} customers in {time.monotonic() - began:.0f} s")
    _recounted(stack, report, "after the load", customers)

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
        _recounted(stack, report, title, customers)
    for replica in stack.replicas():
        used, state = stack.memory(replica), stack.inspect([replica.container])[0]["State"]
        report.expect(
            f"memory of {replica.container[:12]}",
            0 < used <= _MEMORY_BYTES and not state["OOMKilled"],
            f"{used / 2**20:.0f} MiB of {_MEMORY_BYTES / 2**20:.0f}, never out of it: {not state['OOMKilled']}",
        )
    codes = stack.stop()
    report.expect("exit codes after SIGTERM", codes == [0, 0, 0], str(codes))


def _home(name: str) -> int:
    return partition_of(name.encode(), PARTITIONS)


def _first_balance(stack: Stack) -> None:
    """A client's first command, and its own balance back."""

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

    _wait(answered, _READY_SECONDS, "the first balance")


def _hardened(stack: Stack, report: Report) -> None:
    replica = stack.replicas()[0]
    host = stack.inspect([replica.container])[0]["HostConfig"]
    report.expect(
        "as the file has it",
        host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Memory"] == _MEMORY_BYTES,
        f"read-only {host['ReadonlyRootfs']}, capabilities dropped {host['CapDrop']}, "
        f"memory {host['Memory'] / 2**20:.0f} MiB",
    )
    user = stack.inside(replica, "id", "-u").strip()
    capabilities = stack.inside(replica, "grep", "CapEff", "/proc/1/status").split()[1]
    report.expect(
        "in the container",
        user == "10001" and int(capabilities, 16) == 0,
        f"user {user}, effective capabilities {capabilities}",
    )
    try:
        stack.inside(replica, "touch", "/opt/balance-service/x")
        report.expect("root file system", False, "can be written")
    except ConfigurationError:
        report.expect("root file system", True, "cannot be written")


def _scaled(stack: Stack, replicas: int) -> None:
    stack.scale(replicas)
    _wait(
        lambda: (now := stack.replicas()) and len(now) == replicas and all(is_ready(r.port) for r in now),
        _READY_SECONDS,
        f"{replicas} replicas ready",
    )


def _killed(stack: Stack) -> None:
    victim = stack.replicas()[0]
    stack.kill(victim)

    def back() -> bool:
        now = {r.container: r for r in stack.replicas()}
        return len(now) == 3 and victim.container in now and all(is_ready(r.port) for r in now.values())

    time.sleep(1)
    _wait(back, _READY_SECONDS, "the killed container back")


def _recounted(stack: Stack, report: Report, title: str, customers: int) -> None:
    """Ask each replica for each of many customers, and compare with a plain consumer's count of the topic."""
    truth = recount(stack.bootstrap_servers, stack.registry_url, TOPIC)
    chooser = random.Random(title)
    asked = [customer(chooser.randrange(customers)) for _ in range(_ASKED)]
    replicas = stack.replicas()
    wrong: list[str] = []
    deadline = time.monotonic() + _CATCH_UP_SECONDS
    for replica in replicas:
        wrong += _differences(replica, asked, truth, deadline)
    report.expect(
        f"{title}: recounted",
        not wrong,
        f"{len(truth)} customers on the topic; {len(replicas)} replicas asked for {_ASKED} each, "
        + (f"{len(wrong)} wrong: {wrong[:3]}" if wrong else "all exact"),
    )


def _differences(replica: Replica, asked: Sequence[str], truth: dict[str, Decimal], deadline: float) -> list[str]:
    """Where a replica's answers are not the recount's. What it has not applied yet, it is given time for."""
    wrong = []
    connection = Connection(HOST, replica.port, 20.0)
    for name in asked:
        said = "nothing"
        while True:
            with suppress(OSError, http.client.HTTPException):
                reply = connection.ask(query(name))
                said = f"{reply.status} {reply.body.decode(errors='replace')}"
                if reply.status == 200 and json.loads(reply.body, parse_float=Decimal)["amount"] == truth[name]:
                    break
            if time.monotonic() > deadline:
                wrong.append(f"{name} at {replica.container[:12]}: {said}, not {truth[name]}")
                break
            time.sleep(0.2)
    connection.close()
    return wrong


def _wait(done: Callable[[], object], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise ConfigurationError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
