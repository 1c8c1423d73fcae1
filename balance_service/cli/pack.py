"""The command `pack-environment`."""

from __future__ import annotations

from pathlib import Path

import click

from balance_service.devtools.packing import pack
from balance_service.model.loading import load_models
from balance_service.process.open_files import raise_limit
from balance_service.read_models import SHIPPED
from balance_service.settings import load_settings

_MIB = 1 << 20


@click.command("pack-environment")
@click.argument("archive", type=click.Path(dir_okay=False, path_type=Path))
def pack_environment(archive: Path) -> None:
    """Pack this package, what it requires and the models of BALANCE_MODELS for the executors of a Spark cluster.

    ARCHIVE is a .tar.gz, for `rebuild --spark-conf spark.archives=ARCHIVE#balance-service`.
    """
    raise_limit()
    files = pack(archive, [model.__module__ for model in load_models(load_settings().models, SHIPPED)])
    click.echo(f"{archive}: {files} files, {archive.stat().st_size // _MIB} MiB")
