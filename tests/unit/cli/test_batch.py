"""The folder of a batch job after the request for its generation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.bulk.folder import Folder
from balance_service.cli.batch import BatchRebuild
from balance_service.client import InvalidCallError, UnavailableError
from tests.unit.bulk.test_folder import manifest

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.client import ClientError


@pytest.mark.parametrize("is_mine", [True, False], ids=["its own", "of another job"])
@pytest.mark.parametrize("error", [InvalidCallError, UnavailableError])
def test_only_a_command_that_is_refused_deletes_files_and_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[ClientError], *, is_mine: bool
) -> None:
    mine, folder = manifest(), Folder(tmp_path.as_uri() + "/files")

    def made(*_: object) -> str:
        folder.write_manifest(mine if is_mine else replace(mine, version=mine.version + 1))
        return mine.digest

    def rebuild(*_: object, **__: object) -> None:
        raise error("refused")

    client: Any = SimpleNamespace(generations=lambda _model: None, rebuild=rebuild)
    monkeypatch.setattr(BatchRebuild, "_job", lambda *_: SimpleNamespace(folder=folder))
    monkeypatch.setattr(BatchRebuild, "_made", made)
    monkeypatch.setattr("balance_service.spark.batch_session.check_cluster", lambda *_: None)
    monkeypatch.setattr("balance_service.cli.batch.temporary_scratch", nullcontext)
    for of_the_process in ("configure_logging", "keep_files_private", "raise_limit"):
        monkeypatch.setattr(f"balance_service.cli.batch.{of_the_process}", lambda *_: None)

    with pytest.raises(error):
        BatchRebuild("local[1]", folder.uri, {}, keeps_files=False).run(client, "m", {})

    assert (folder.manifest() is None) == (is_mine and error is InvalidCallError)
