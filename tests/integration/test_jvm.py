"""Starts of Spark's JVM."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from balance_service.process.scratch import Scratch
from balance_service.settings.settings import load_settings
from balance_service.spark.jvm import SparkJvm

if TYPE_CHECKING:
    from pathlib import Path

START_SECONDS = 60.0


def test_a_start_does_not_use_the_gateway_of_a_killed_process(tmp_path: Path) -> None:
    settings, scratch = load_settings(), Scratch(tmp_path, tmp_path)
    left = SparkJvm(settings, scratch)
    end = time.monotonic() + START_SECONDS
    while not list(tmp_path.glob("gateway*")):
        assert time.monotonic() < end
        time.sleep(0.01)
    left.process.kill()
    left.process.wait()

    started = SparkJvm(settings, scratch)
    try:
        port, _ = started.gateway()
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        for jvm in (left, started):
            jvm.process.kill()
            jvm.process.wait()
            assert jvm.process.stdin is not None
            jvm.process.stdin.close()
