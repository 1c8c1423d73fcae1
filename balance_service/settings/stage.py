"""What a stage is called, in Kafka and on disk, and which topics it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """The work on one topic, `source`, for a read model or for retries; its tasks are `<name>_<partition>`."""

    name: str
    application_id: str
    source: str
    passes_on: bool = False
    """Whether it writes the topic that the next stage of its read model reads."""
    reads_rekeyed: bool = False
    """Whether its source is the topic that the stage before it writes, which may be purged."""
    outputs: tuple[str, ...] = ()
    """The topics that its read model emits to."""
    tables: tuple[str, ...] = ()
    """The topics of the tables that it joins with, which have as many partitions as its source."""
    global_tables: tuple[str, ...] = ()
    """The topics of the tables that it joins with, and that may have any."""
    next_table: str | None = None
    """The table by whose keys it passes records on, to a topic of as many partitions; None: there is none."""
    retries: bool = False
    """Whether it has no read model, and its source is where another producer keeps its dead letters."""

    @property
    def full_name(self) -> str:
        """What tells it from the stages of all applications."""
        return f"{self.application_id}-{self.name}"

    @property
    def rekeyed(self) -> str:
        """The topic that it writes, if it passes records on."""
        return self.full_name

    @property
    def targets(self) -> tuple[str, ...]:
        """Every topic that it sends to, beside its own."""
        return (self.rekeyed,) if self.passes_on else self.outputs

    @property
    def changelog(self) -> str:
        """The compacted topic that holds the stores, record for record."""
        return f"{self.application_id}-{self.name}-changelog"

    @property
    def dead_letters(self) -> str:
        """The topic that keeps the source's records which could not be applied; the topics between stages share one."""
        return f"{self.application_id if self.reads_rekeyed else self.source}-dead-letters"

    def transactional_id(self, partition: int) -> str:
        """Of the one producer that may write the changelog of a partition."""
        return f"{self.application_id}-{self.name}-{partition}"
