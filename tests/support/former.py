"""The release before this one, as a checkout that instances run: `tests/data/former-release` has its commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROJECT = Path(__file__).parents[2]
FORMER_RELEASE = (_PROJECT / "tests" / "data" / "former-release").read_text(encoding="utf-8").strip()


def checked_out(folder: Path, commit: str = FORMER_RELEASE) -> Path:
    """Checks a commit out into a folder that does not exist; it runs with the packages of this environment.

    Fails if the repository lacks the commit, as a shallow clone does.
    """
    for command in (
        ("git", "clone", "--quiet", "--shared", "--no-checkout", str(_PROJECT), str(folder)),
        ("git", "-C", str(folder), "checkout", "--quiet", "--detach", commit),
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (
            f"{' '.join(command)}: {done.stderr}; a shallow clone needs `git fetch --unshallow`"
        )
    (folder / ".venv").symlink_to(sys.prefix)
    return folder
