"""Each test that takes `run` is played with both clients."""

from __future__ import annotations

import pytest

from tests.unit.client.running import Run, awaited, blocking


@pytest.fixture(params=[blocking, awaited], ids=["Client", "AsyncClient"])
def run(request: pytest.FixtureRequest) -> Run:
    run: Run = request.param
    return run
