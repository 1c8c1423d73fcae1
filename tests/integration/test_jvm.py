"""Starts of Spark's JVM."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError

from balance_service.process.scratch import Scratch
from balance_service.settings.settings import load_settings
from balance_service.spark.jvm import SparkJvm

if TYPE_CHECKING:
    from pathlib import Path

START_SECONDS = 60.0
ENDS_WITHIN_SECONDS = 5.0


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


_PARENT = """
import sys, threading, time
from pathlib import Path
from balance_service.process.scratch import Scratch
from balance_service.settings.settings import load_settings
from balance_service.spark.session import start_spark

folder = Path(sys.argv[1])
spark = start_spark(load_settings(), Scratch(folder, folder), slots=1)
jvm = spark._jvm
busy = spark.range(1 << 50).selectExpr("id", "sha2(cast(id as string), 512) as h")
threading.Thread(target=busy.selectExpr("max(h)").collect, daemon=True).start()
while not spark.sparkContext.statusTracker().getActiveStageIds():
    time.sleep(0.1)
# Hooks.
print(spark.sparkContext._gateway.proc.pid, flush=True)
time.sleep(600)
"""


def test_a_jvm_whose_shutdown_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    never = "jvm.org.apache.hadoop.fs.DelegationTokenRenewer.getInstance()"
    _ends_after(_PARENT.replace("# Hooks.", f"jvm.java.lang.Runtime.getRuntime().addShutdownHook({never})"), tmp_path)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_busy_jvm_ends_within_seconds_of_its_parent(tmp_path: Path, end: signal.Signals) -> None:
    _ends_after(_PARENT, tmp_path, end)


def _ends_after(program: str, folder: Path, end: signal.Signals = signal.SIGKILL) -> None:
    with subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        jvm = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(end)
        try:
            _, alive = psutil.wait_procs([jvm], timeout=ENDS_WITHIN_SECONDS)
            assert not alive
        finally:
            if jvm.is_running():
                jvm.kill()


def test_a_jvm_that_lacks_memory_ends(tmp_path: Path) -> None:
    settings, scratch = load_settings(), Scratch(tmp_path, tmp_path)
    jvm = SparkJvm(settings, scratch)
    try:
        port, secret = jvm.gateway()
        parameters = GatewayParameters(port=port, auth_token=secret)
        gateway = JavaGateway(gateway_parameters=parameters)
        with pytest.raises(Py4JError):
            gateway.new_array(gateway.jvm.long, (1 << 31) - 8)
        assert jvm.process.wait(ENDS_WITHIN_SECONDS)
    finally:
        jvm.process.kill()
        jvm.process.wait()
        assert jvm.process.stdin is not None
        jvm.process.stdin.close()


_AS_NOBODY_KNOWN = ["unshare", "--map-user=54321"]
_COUNT = """
import os, sys
from pathlib import Path
from balance_service.process.scratch import Scratch
from balance_service.settings.settings import load_settings
from balance_service.spark.session import start_spark

folder = Path(sys.argv[1])
spark = start_spark(load_settings(), Scratch(folder, folder), slots=1)
print(os.getuid(), spark.range(7).count(), flush=True)
os._exit(0)
"""


def _can_be_another_user() -> bool:
    # Some systems allow no user namespaces.
    return (
        shutil.which("unshare") is not None and subprocess.run([*_AS_NOBODY_KNOWN, "true"], check=False).returncode == 0
    )


@pytest.mark.skipif(not _can_be_another_user(), reason="this system allows no user namespaces")
def test_the_user_of_the_process_needs_no_name(tmp_path: Path) -> None:
    command = [*_AS_NOBODY_KNOWN, sys.executable, "-c", _COUNT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * START_SECONDS, check=False)

    assert done.stdout.split() == ["54321", "7"], done.stderr
