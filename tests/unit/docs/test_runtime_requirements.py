"""The entries of the lock file that the image installs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
LOCK = """\
aiohttp==3.14.5 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
mypy==2.4.1 \\
    --hash=sha256:cc
typing-extensions==4.16.0 ; python_version < '3.13' \\
    --hash=sha256:dd
"""


@pytest.fixture
def needed() -> Callable[[str, str], str]:
    spec = importlib.util.spec_from_file_location(
        "runtime_requirements", ROOT / "deploy" / "image" / "runtime_requirements.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[str, str], str] = module.needed
    return function


def report(*names: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": name}} for name in names]})


def test_needed_packages_keep_their_hashes_and_markers(needed: Callable[[str, str], str]) -> None:
    assert needed(report("typing_extensions", "aiohttp"), LOCK) == (
        "aiohttp==3.14.5 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "typing-extensions==4.16.0 ; python_version < '3.13' \\\n    --hash=sha256:dd\n"
    )


def test_all_entries_of_a_package_with_several_versions_are_kept(needed: Callable[[str, str], str]) -> None:
    older = "numpy==2.4.6 ; python_full_version < '3.12' \\\n    --hash=sha256:ee\n"
    newer = "numpy==2.5.5 ; python_full_version >= '3.12' \\\n    --hash=sha256:ff\n"

    assert needed(report("numpy"), LOCK + older + newer) == older + newer


def test_a_package_that_is_not_locked_is_named(needed: Callable[[str, str], str]) -> None:
    with pytest.raises(SystemExit, match="does not pin rocksdict"):
        needed(report("rocksdict", "aiohttp"), LOCK)


def test_the_lock_file_of_the_project_is_parsed(needed: Callable[[str, str], str]) -> None:
    lock = (ROOT / "requirements.lock").read_text()

    (line, *hashes) = needed(report("PySpark"), lock).splitlines()
    assert line.startswith("pyspark==4.2.")
    assert hashes
    assert all(entry.strip().startswith("--hash=sha256:") for entry in hashes)
