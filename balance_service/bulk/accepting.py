"""What a folder of a batch job must agree with before its records become states: the manifest is checked as a whole.

An instance does so before it begins the generation, and each owner before it loads its partition: files may be
replaced, the source may be recreated, and an owner may run another version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING

from balance_service.avro.rules import DECODER_RULES
from balance_service.bulk.manifest import MANIFEST, MadeWith, Manifest
from balance_service.errors import InvalidInputError
from balance_service.process.package import __version__
from balance_service.settings.spark import VALUE_SETTINGS

if TYPE_CHECKING:
    from balance_service.bulk.folder import Folder
    from balance_service.model.generations import Declaration
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Partitioner
    from balance_service.settings import Settings

_MOST_TOLD = 3
AGAIN = "run the rebuild again"


@cache
def _spark_version() -> str:
    # Of the metadata: the package itself takes most of a second to import.
    return version("pyspark")


def made_here(settings: Settings) -> MadeWith:
    """Returns what this process would make files with."""
    return MadeWith(
        package=__version__,
        spark=_spark_version(),
        decoder_rules=DECODER_RULES,
        sql=VALUE_SETTINGS,
        idempotency_window_ms=int(settings.idempotency_window_seconds * 1000),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The content that a manifest must have: of the generation, its source, and the versions that read and fold here.

    Attributes:
        stage: the last stage of the read model in that generation.
        partitioner, partitions: of the source.
    """

    stage: Stage
    declaration: Declaration
    source_topic_id: str
    partitioner: Partitioner
    partitions: int
    made_with: MadeWith

    def read(self, folder: Folder, digest: str) -> Manifest:
        """Returns the manifest of a folder, which has this digest and says all that it must.

        Raises:
            InvalidInputError: it is missing, altered or another one, or differs; the message names what.
            ConfigurationError, RetriableError: as `Folder.manifest`.
        """
        manifest = folder.manifest()
        if manifest is None:
            raise InvalidInputError(f"{folder.uri}/{MANIFEST} is missing: {AGAIN}")
        if manifest.digest != digest:
            raise InvalidInputError(
                f"{folder.uri}/{MANIFEST} has digest {manifest.digest}, and the rebuild began with {digest}: another "
                f"job has replaced the files; {AGAIN}"
            )
        if differences := self._differences(manifest):
            told = "; ".join(differences[:_MOST_TOLD])
            more = f"; and {len(differences) - _MOST_TOLD} more" if len(differences) > _MOST_TOLD else ""
            raise InvalidInputError(f"{folder.uri} does not fit: {told}{more}; {AGAIN}")
        return manifest

    def _differences(self, manifest: Manifest) -> list[str]:
        stage, declaration, made, ours = self.stage, self.declaration, manifest.made_with, self.made_with
        pairs = [
            ("application id", manifest.application_id, stage.application_id),
            ("read model", manifest.model, stage.owner),
            ("generation", manifest.generation, stage.generation),
            ("owner", manifest.owner, stage.mark),
            ("version of the read model", manifest.version, declaration.version),
            ("fingerprint of the declaration", manifest.fingerprint, declaration.fingerprint),
            ("source", manifest.source, stage.source),
            ("id of the source topic", manifest.source_topic_id, self.source_topic_id),
            ("partitioner", manifest.partitioner, self.partitioner),
            (
                "partitions",
                [one.partition for one in manifest.partitions],
                [*range(self.partitions)],
            ),
            ("version of balance-read-models", made.package, ours.package),
            ("version of Spark", made.spark, ours.spark),
            ("rules of the decoder", made.decoder_rules, ours.decoder_rules),
            ("BALANCE_IDEMPOTENCY_WINDOW in ms", made.idempotency_window_ms, ours.idempotency_window_ms),
            *((name, made.sql.get(name), ours.sql.get(name)) for name in sorted({*made.sql, *ours.sql})),
        ]
        return [
            f"its {name} is {_shown(theirs)}, and here it is {_shown(here)}"
            for name, theirs, here in pairs
            if theirs != here
        ]


def _shown(value: object) -> str:
    return repr(value.replace("\0", "/")) if isinstance(value, str) else "not set" if value is None else str(value)
