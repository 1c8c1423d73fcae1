"""Runs a batch job in a process of its own, as the command does: `python -m tests.support.batch MODEL GENERATION …`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from balance_service.bulk.folder import Folder
from balance_service.bulk.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.settings import Settings

_ROOT = Path(__file__).parents[2]


class JobFailedError(Exception):
    """The process ended with an error; the text is what it said."""


def run_batch(
    settings: Settings,
    model: str,
    files: Path,
    *,
    generation: int = 3,
    master: str = "local[2]",
    split_records: int = 100_000,
    conf: Mapping[str, str] | None = None,
    ends: Mapping[int, int] | None = None,
) -> Manifest:
    """Runs a job, and returns its manifest.

    Args:
        model: its name, if it is shipped, or `module:Class`.
        ends: by default, where the serving generation stands.

    Raises:
        JobFailedError: the job failed.
    """
    given = {
        "model": model,
        "generation": generation,
        "files": str(files),
        "master": master,
        "split_records": split_records,
        "conf": dict(conf or {}),
        "ends": None if ends is None else {str(p): end for p, end in ends.items()},
    }
    environment = {
        **os.environ,
        "BALANCE_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "BALANCE_SCHEMA_REGISTRY_URL": settings.schema_registry_url or "",
        "BALANCE_STATE_DIR": str(settings.state_dir),
        "BALANCE_APPLICATION_ID": settings.application_id,
        "BALANCE_TOPIC": settings.topic,
        "BALANCE_IDEMPOTENCY_WINDOW": str(settings.idempotency_window_seconds),
        "BALANCE_MODELS": model,
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.support.batch", json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise JobFailedError(f"{done.stdout}\n{done.stderr}")
    return Manifest.decoded(done.stdout.partition("\n#manifest\n")[2].encode())


def folder_of(manifest: Manifest, files: Path) -> Folder:
    return Folder.of(str(files), manifest.application_id, manifest.model, manifest.generation)


def main() -> None:
    """Runs the job of the first argument."""
    given = json.loads(sys.argv[1])
    from balance_service.process.scratch import temporary_scratch
    from balance_service.settings import load_settings
    from balance_service.spark.batch_session import launch_driver

    settings = load_settings()
    with temporary_scratch() as scratch:
        launch_driver(settings, scratch, given["master"])
        from balance_service.avro.registry import SchemaRegistry
        from balance_service.cli.models import chosen_models
        from balance_service.errors import BalanceServiceError
        from balance_service.kafka.topics import Topics
        from balance_service.model.placing import stages_of
        from balance_service.spark.batch_job import BatchJob, run
        from balance_service.spark.batch_start import starting_point

        try:
            (model,) = chosen_models(settings, [given["model"]])
            last, topics = stages_of(model, settings)[-1], Topics(settings)
            source = topics.find(last.source)
            assert source is not None
            with closing(SchemaRegistry.from_settings(settings)) as registry:
                start = starting_point(settings, topics, registry, last, source)
            ends = start.ends if given["ends"] is None else {int(p): end for p, end in given["ends"].items()}
            job = BatchJob(
                settings=settings,
                read_model=model,
                stage=last.of_generation(given["generation"]),
                source=source,
                former_changelog=last.changelog,
                begins=topics.offsets(source.name, range(source.partitions), earliest=True),
                ends=ends,
                letters=start.letters,
                master=given["master"],
                files=given["files"],
                conf=given["conf"],
                split_records=given["split_records"],
            )
            manifest = run(job, scratch, lambda at, of: print(f"progress {at} of {of}", file=sys.stderr))
        except BalanceServiceError as error:
            sys.exit(f"{type(error).__name__}: {error}")
    sys.stdout.write("\n#manifest\n" + manifest.encoded().decode())


if __name__ == "__main__":
    main()
