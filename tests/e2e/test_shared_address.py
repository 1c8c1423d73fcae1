"""Two instances with the same BALANCE_APPLICATION_SERVER report it until one stops; a restart is no conflict."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.service import address, application, new_instance, one_of_two, process_of, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalInstance, LocalStack

TOLD = "another instance has the address of this one"
# Twice the time that an instance needs to detect the conflict.
_SURE_SECONDS = 8


def readiness(instance: LocalInstance) -> tuple[int, str]:
    try:
        answer = httpx.get(f"{instance.url}/health/ready", timeout=10)
    except httpx.HTTPError as error:
        return 0, str(error)
    return answer.status_code, answer.text


def shared(instance: LocalInstance) -> list[str]:
    """Returns the addresses that an instance reports as shared."""
    return [server["applicationServer"] for server in status(instance)["applicationServers"] if server["shared"]]


def lines(instance: LocalInstance) -> int:
    return instance.log.read_text().count(TOLD)


@pytest.mark.shows("shared-address")
def test_instances_with_the_same_address_are_not_ready_and_report_why_until_one_stops(stack: LocalStack) -> None:
    settings = application()
    with one_of_two(stack, settings) as (first, second):
        own = address(first)
        second.environment["BALANCE_APPLICATION_SERVER"] = own
        second.launch()

        for instance in (first, second):
            eventually(
                lambda i=instance: "BALANCE_APPLICATION_SERVER" in readiness(i)[1],  # type: ignore[misc]
                "the instance reports the conflict",
                90,
            )
            code, told = readiness(instance)
            assert code == 503
            assert own in told
            assert shared(instance) == [own]
            known = status(instance)
            assert not known["ready"]
            assert any("BALANCE_APPLICATION_SERVER" in reason for reason in known["reasons"])
            assert "balance_shared_addresses 1.0" in httpx.get(f"{instance.url}/metrics", timeout=10).text
        time.sleep(3)
        assert (lines(first), lines(second)) == (1, 1)

        process_of(second).kill()
        eventually(lambda: readiness(first)[0] == 200, "the remaining instance is ready", 60)
        assert shared(first) == []


@pytest.mark.shows("shared-address")
def test_a_restart_after_a_kill_is_no_address_conflict(stack: LocalStack) -> None:
    instance = new_instance(stack, application())
    instance.launch()
    try:
        instance.wait_ready()
        process_of(instance).kill()
        instance.stop()
        instance.launch()
        instance.wait_ready()

        until = time.monotonic() + _SURE_SECONDS
        while time.monotonic() < until:
            assert shared(instance) == []
            assert readiness(instance)[0] == 200
            time.sleep(0.5)
        assert lines(instance) == 0
    finally:
        instance.stop()
