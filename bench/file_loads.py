"""`python -m bench.file_loads`: what an owner's load of a partition costs, from files into its changelog and its store.

A broker runs too, whose processor time does not count. The files are made before, and lie on this machine's disk.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import click
import pyarrow as pa
import structlog

from balance_service.avro.codec import AvroCodec
from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.bulk.accepting import made_here
from balance_service.bulk.folder import RECORDS, Folder
from balance_service.bulk.manifest import Manifest, PartitionFiles
from balance_service.devtools.local.stack import LocalStack
from balance_service.engine.assembly import StageServices, processor_of
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.inheritance import open_writer
from balance_service.engine.loading import loads
from balance_service.engine.opening import first_position
from balance_service.engine.records import TaskId
from balance_service.engine.replica import Restoration
from balance_service.engine.schema_records import NO_SCHEMAS
from balance_service.engine.store import StateStore
from balance_service.kafka.topic_specs import prepare_changelog, prepare_topics
from balance_service.kafka.topics import Topics
from balance_service.model.generations import Generations, Load, Switch
from balance_service.model.placing import stages_of
from balance_service.model.versions import declaration_of
from balance_service.observability.logs import configure_logging
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings

if TYPE_CHECKING:
    from balance_service.engine.fold import FoldProcessor
    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.settings import Settings

_GROUP = 20_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--keys", default=1_000_000, show_default=True)
@click.option("--repetitions", default=3, show_default=True)
def main(keys: int, repetitions: int) -> None:
    configure_logging("ERROR")
    with tempfile.TemporaryDirectory() as folder, LocalStack(Path(folder)) as stack:
        for repetition in range(repetitions):
            settings = load_settings(
                bootstrap_servers=stack.bootstrap_servers,
                schema_registry_url=stack.schema_registry_url,
                application_id=f"loads-{repetition}",
                topic=f"loads-{repetition}",
                partitions=1,
            )
            seconds, processor = _loaded(settings, Path(folder) / f"run-{repetition}", keys)
            click.echo(f"{keys:,} keys: {processor:.2f} s of processor time, {seconds:.2f} s")


def _loaded(settings: Settings, folder: Path, keys: int) -> tuple[float, float]:
    topics, model = Topics(settings), Balance()
    first = stages_of(model, settings)[-1]
    stage = first.of_generation(2)
    source = prepare_topics(topics, settings, [first])[first.source]
    changelog = prepare_changelog(topics, stage, source)
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        services = StageServices(
            schemas=OwnSchemas(registry),
            partitions=lambda _name: source.partitions,
            topic_id=lambda _name: source.topic_id,
            config=topics.config,
            joined=cast("Any", None),
            largest_bytes=1 << 20,
            retry_every_ms=300_000,
            idempotency_window_ms=int(settings.idempotency_window_seconds * 1000),
        )
        processor = cast("FoldProcessor", processor_of(stage, model, services))
        declared = declaration_of(model)
        digest = _written(settings, stage, source.topic_id, processor.frames.codec, folder / "files", keys)
        load = Load(2, str(folder / "files"), digest)
        now = Generations("balance").begun(declared).rebuilt(declared, Switch.NEVER, 0, None, "", "", load)
        generations = HostedGenerations(lambda: now)
        there = SimpleNamespace(position=SimpleNamespace(offset=keys, letters={}))
        sender = SimpleNamespace(sends=True, last_view=there)
        generations.add(1, cast("Any", SimpleNamespace(task=lambda _partition: sender)))
        hosted = cast(
            "HostedStage",
            SimpleNamespace(
                name=stage.name,
                stage=stage,
                processor=processor,
                generations=generations,
                schemas=NO_SCHEMAS,
                settings=settings,
                source=source,
                partitioner=stage.partitioner,
            ),
        )
        task_id = TaskId(stage.name, 0)
        writer = open_writer(task_id, settings, stage, topics, source)
        writer.fence()
        store = StateStore(folder / str(task_id), AvroCodec(registry, "positions", load_schema("Position")))
        begun = first_position(hosted, 0, 0, 1, changelog.topic_id)
        began, used = time.monotonic(), time.process_time()
        for _ in loads(hosted, 0, store, writer, begun, Restoration(structlog.get_logger())) or ():
            pass
        spent = time.monotonic() - began, time.process_time() - used
        position = store.position
        if position is None or position.offset != keys:
            raise SystemExit(f"the store stands at {position}, not at {keys}")
        writer.close()
        store.close()
    return spent


def _written(settings: Settings, stage: Any, topic_id: str, codec: AvroCodec, files: Path, keys: int) -> str:
    folder = Folder.of(str(files), stage.application_id, stage.owner, stage.generation)

    def records() -> Any:
        for start in range(0, keys, _GROUP):
            some = [f"customer-{number:09}" for number in range(start, min(start + _GROUP, keys))]
            frames = [codec.encode({"customerId": one, "amount": Decimal("12.00")}) for one in some]
            yield pa.table([[one.encode() for one in some], frames], schema=RECORDS)

    files_of = folder.write(0, "part", records())
    declared = declaration_of(Balance())
    manifest = Manifest(
        application_id=stage.application_id,
        model=stage.owner,
        generation=stage.generation,
        version=declared.version,
        fingerprint=declared.fingerprint,
        owner=stage.mark,
        source=stage.source,
        source_topic_id=topic_id,
        partitioner=stage.partitioner,
        state_schema_id=codec.schema_id,
        made_with=made_here(settings),
        partitions=(
            PartitionFiles(
                partition=0,
                begins=0,
                position=keys,
                events=keys,
                stream_time_ms=-1,
                keys=keys,
                letters={},
                files=tuple(files_of),
            ),
        ),
    )
    folder.write_manifest(manifest)
    return manifest.digest


if __name__ == "__main__":
    main()
