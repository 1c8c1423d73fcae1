"""Downloads are used only if they match the digests."""

from __future__ import annotations

import hashlib
import pwd
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.process import jars as module
from balance_service.process.jars import cache_folder, connectors, digests, renew, resolve_jars, shipped_digests
from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVED = {"a-1.jar": b"a", "b-2.jar": b"b"}
DIGESTS = {name: hashlib.sha256(contents).hexdigest() for name, contents in SERVED.items()}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Files that Ivy downloads for each configuration: initially those with the right digests. The cache is empty."""
    files = dict(SERVED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def ivy(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        folder = Path(command[-1]).parent
        for name, contents in files.items():
            (folder / name).write_bytes(contents)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", ivy)
    monkeypatch.setattr(module, "java_executable", lambda: Path("java"))
    write_digests(monkeypatch, tmp_path, {f"bench/{name}": digest for name, digest in DIGESTS.items()})
    return files


def write_digests(monkeypatch: pytest.MonkeyPatch, folder: Path, expected: Mapping[str, str]) -> None:
    file = folder / "jars.sha256"
    file.write_text("# comment\n" + "".join(f"{digest}  {path}\n" for path, digest in expected.items()))
    monkeypatch.setattr(module, "resource", lambda name: file if name == "deploy/jars.sha256" else resource(name))


def test_files_with_the_right_digests_are_downloaded_once(served: dict[str, bytes]) -> None:
    assert [jar.name for jar in resolve_jars("bench")] == ["a-1.jar", "b-2.jar"]

    served["a-1.jar"] = b"another"

    assert [jar.read_bytes() for jar in resolve_jars("bench")] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("served_instead", "named"),
    [
        ({"a-1.jar": b"another", "b-2.jar": b"b"}, "a-1.jar"),
        ({"a-1.jar": b"a"}, "b-2.jar"),
        (SERVED | {"c-3.jar": b"c"}, "c-3.jar"),
    ],
    ids=["another", "missing", "one more"],
)
def test_files_with_other_digests_are_rejected_by_name_and_removed(
    served: dict[str, bytes], served_instead: dict[str, bytes], named: str
) -> None:
    served.clear()
    served.update(served_instead)

    with pytest.raises(ConfigurationError, match=rf"^{named}: not as deploy/jars.sha256 says"):
        resolve_jars("bench")

    assert not [path for path in cache_folder().rglob("*") if path.suffix == ".jar"]
    served.update(SERVED)
    served.pop("c-3.jar", None)
    assert len(resolve_jars("bench")) == 2


def test_a_configuration_without_digests_is_rejected(served: dict[str, bytes]) -> None:
    with pytest.raises(ConfigurationError, match=r"^a-1.jar, b-2.jar: not as"):
        resolve_jars("kafka")


def test_digests_and_the_connectors_of_this_package_are_renewed_from_a_download(
    served: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_digests(monkeypatch, tmp_path, {})
    monkeypatch.setattr(module, "_CONNECTORS", tmp_path / "connectors")
    renewed = renew()
    (tmp_path / "jars.sha256").write_text(renewed)

    assert [jar.name for jar in resolve_jars("bench")] == ["a-1.jar", "b-2.jar"]
    assert len(renewed.splitlines()) == 1 + len(SERVED) * 4
    assert [jar.read_bytes() for jar in connectors()] == [b"a", b"b"]


def test_the_shipped_digests_match_the_jars_in_the_package() -> None:
    expected = shipped_digests()

    assert expected.keys() == {"spark", "kafka", "registry", "bench"}
    assert digests(connectors()[0].parent) == expected["spark"]


def test_a_user_without_a_home_names_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)

    with pytest.raises(ConfigurationError, match="has no home directory for the cache; set XDG_CACHE_HOME"):
        cache_folder()
