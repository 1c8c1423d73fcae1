"""A batch job on a Spark cluster of its own: a master and two workers, with authentication and encryption.

`make cluster-test` runs it. All three are processes of PySpark's own jars.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from balance_service.process.java import java_executable
from balance_service.spark.jvm import MODULE_OPTIONS
from tests.integration.engines import settings_for
from tests.integration.test_batch_job import assert_equal, built_online, processor, rebuilding
from tests.support.batch import JobFailedError, run_batch
from tests.support.kafka import Writer
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalStack

pytestmark = pytest.mark.timeout(600)
_ROOT = Path(__file__).parents[2]
_PYSPARK = Path(pyspark.__file__).parent
_WORKERS = 2
_STARTED_SECONDS = 60.0


@dataclass
class Cluster:
    """`conf` has what a driver must know."""

    master: str
    conf: dict[str, str]
    logs: list[Path]
    workers: list[subprocess.Popen[bytes]]

    def log(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)


def _start(arguments: list[str], log: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [str(java_executable()), "-Xmx512m", *MODULE_OPTIONS, "-cp", f"{_PYSPARK}/jars/*", *arguments]
    environment = {
        **os.environ,
        "SPARK_HOME": str(_PYSPARK),
        # Otherwise no executor starts: Spark looks for the folder of a build.
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_WORKER_DIR": str(folder),
        "SPARK_LOCAL_DIRS": str(folder),
    }
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, cwd=folder, process_group=0)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    secret = secrets.token_hex(16)
    secured = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secret,
        "spark.network.crypto.enabled": "true",
    }
    # On a command line, other users could read the secret.
    properties = folder / "spark.properties"
    properties.write_text("".join(f"{name} {value}\n" for name, value in secured.items()))
    properties.chmod(0o600)
    port = _free_port()
    master, logs = f"spark://127.0.0.1:{port}", [folder / "master.log"]
    with ExitStack() as ending:
        of_master = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
        kind = "org.apache.spark.deploy"
        started = _start([f"{kind}.master.Master", *of_master, "--properties-file", str(properties)], logs[0], folder)
        ending.callback(_end, started)
        workers = []
        for number in range(_WORKERS):
            logs.append(folder / f"worker-{number}.log")
            of_worker = ["--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "1g"]
            worker = _start(
                [f"{kind}.worker.Worker", *of_worker, "--properties-file", str(properties), master], logs[-1], folder
            )
            ending.callback(_end, worker)
            workers.append(worker)
        made = Cluster(
            master,
            {
                "spark.authenticate.secret": secret,
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.executor.memory": "512m",
                "spark.pyspark.python": sys.executable,
                # In place of an archive: the workers of this machine import what the tests do.
                "spark.executorEnv.PYTHONPATH": str(_ROOT),
            },
            logs,
            workers,
        )
        registered = lambda: len(re.findall("Registering worker", logs[0].read_text())) == _WORKERS  # noqa: E731
        eventually(registered, made.log, _STARTED_SECONDS)
        yield made


def _end(process: subprocess.Popen[bytes]) -> None:
    # Its executors are in its group.
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@pytest.mark.shows("rebuild")
def test_a_job_on_a_cluster_makes_what_an_online_rebuild_makes(
    stack: LocalStack, names: dict[str, str], tmp_path: Path, cluster: Cluster
) -> None:
    settings = settings_for(stack, names, tmp_path / "state")
    with Writer(stack, settings.topic) as writer, rebuilding(settings) as (engine, _):
        for number in range(5_000):
            customer = f"customer-{number % 410}"
            writer.send(customer, b"no frame" if number % 1_000 == 7 else writer.frame(customer, f"{number % 7}.01"))
        assert writer.producer.flush(20) == 0
        online = built_online(engine, "balance")
        codecs = processor(engine, "balance")

    began = time.monotonic()
    manifest = run_batch(
        settings, "balance", tmp_path / "files", master=cluster.master, split_records=500, conf=cluster.conf
    )
    print(f"{manifest.events} events on {_WORKERS} executors in {time.monotonic() - began:.1f} s")
    assert_equal(codecs, online, manifest, tmp_path / "files")

    older = tmp_path / "older"
    for name in ("balance_service", "schemas", "samples", "deploy", "tests"):
        shutil.copytree(_ROOT / name, older / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (older / "balance_service/read_models/balance.py").open("a") as code:
        code.write("# Older code.\n")
    with pytest.raises(
        JobFailedError, match=r"other code than this process in balance_service\.read_models\.balance: "
    ):
        run_batch(
            settings,
            "balance",
            tmp_path / "other",
            master=cluster.master,
            conf={**cluster.conf, "spark.executorEnv.PYTHONPATH": str(older)},
        )

    wrong = {**cluster.conf, "spark.authenticate.secret": "another"}
    with pytest.raises(JobFailedError, match="ConfigurationError: --master: Spark does not start on"):
        run_batch(settings, "balance", tmp_path / "again", master=cluster.master, conf=wrong)
    assert not (tmp_path / "again" / settings.application_id / "balance.g3" / "manifest.json").exists()
