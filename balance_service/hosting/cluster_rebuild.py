"""What a batch job needs to know of the application whose read model it folds: what instances know from their start.

The job runs in the process of a command, which is no instance: it joins no group and writes to no topic. The generation
begins once the files are complete, by a request to an instance.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from balance_service.avro.own_schemas import OwnSchemas
from balance_service.avro.registry import SchemaRegistry
from balance_service.cluster.generations import GenerationLog
from balance_service.errors import ConfigurationError
from balance_service.hosting.offline_rebuild import refuse_incomplete
from balance_service.kafka.topics import Topics
from balance_service.model.placing import stages_of
from balance_service.model.versions import declaration_of
from balance_service.spark.batch_job import BatchJob
from balance_service.spark.batch_start import starting_point

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.model.read_model import ReadModel
    from balance_service.settings import Settings


def next_job(settings: Settings, read_model: ReadModel, master: str, files: str, conf: Mapping[str, str]) -> BatchJob:
    """Returns the job that folds the next generation of a read model, up to where the serving one is now.

    Raises:
        InvalidInputError: another generation is being built or kept.
        ConfigurationError: the application has no registry, the model keeps no states, no instance has hosted it yet,
            or its source lacks first records.
        RetriableError: the broker or the registry does not respond.
    """
    name, last = read_model.name, stages_of(read_model, settings)[-1]
    if not read_model.has_states():
        raise ConfigurationError(f"the read model '{name}' keeps no states, so there is nothing to rebuild")
    if last.compacted:
        raise ConfigurationError(
            f"the source of '{name}' is compacted, and a batch job does not see what is deleted while it runs: rebuild "
            "on the instances"
        )
    topics = Topics(settings)
    with closing(SchemaRegistry.from_settings(settings)) as registry:
        if not registry.is_set:
            raise ConfigurationError(
                "a batch job needs BALANCE_SCHEMA_REGISTRY_URL: without a registry, rebuild on the instances, or with "
                "--offline"
            )
        now = GenerationLog(settings, topics, OwnSchemas(registry)).of(name)
        source = topics.find(last.source)
        if not now.number or source is None:
            raise ConfigurationError(f"no instance has hosted '{name}' yet, so there is nothing to rebuild")
        begins = topics.offsets(source.name, range(source.partitions), earliest=True)
        number = now.rebuilt(declaration_of(read_model), None, 0, None, "", "").newest
        serving = last.of_generation(now.serving)
        refuse_incomplete(settings, serving, source, begins)
        start = starting_point(settings, topics, registry, serving, source)
    return BatchJob(
        settings=settings,
        read_model=read_model,
        stage=last.of_generation(number),
        source=source,
        former_changelog=serving.changelog,
        begins=begins,
        ends={partition: max(end, begins[partition]) for partition, end in start.ends.items()},
        letters=start.letters,
        master=master,
        files=files,
        conf=conf,
    )
