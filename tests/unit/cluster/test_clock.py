"""Leases and silence are measured by a clock that a suspended machine does not stop."""

from __future__ import annotations

import inspect
import time

import pytest

from balance_service.cluster.membership import Lease
from balance_service.cluster.server_table import ServerTable
from balance_service.cluster.standbys import StandbyChooser
from balance_service.kafka.watermarks import Watermarks
from balance_service.process.clock import elapsed


def test_it_goes_on() -> None:
    before = elapsed()
    time.sleep(0.01)

    assert 0.01 <= elapsed() - before < 5


@pytest.mark.parametrize("user", [Lease, ServerTable, StandbyChooser, Watermarks])
def test_what_others_do_meanwhile_is_measured_by_it(user: type) -> None:
    assert inspect.signature(user).parameters["clock"].default is elapsed
