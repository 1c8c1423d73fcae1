"""Checks the locked versions against a database of advisories: `python -m tests.audit`.

Covers the packages of `requirements.lock` and the jars of `deploy/ivy.xml`, but not their bundled dependencies or
PySpark's. Exit code 1 if there is an advisory, 0 if there is none or the database is unreachable.
Source: https://google.github.io/osv.dev/post-v1-querybatch/
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import httpx

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROOT = Path(__file__).parents[1]
_URL = "https://api.osv.dev/v1/querybatch"
_SECONDS = 30.0
_PINNED = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==(?P<version>[^ \\;]+)", re.MULTILINE)
# Statuses of a proxy that denies access, or of a server that is down.
_REFUSED = {403, 407, 429, 500, 502, 503, 504}

Locked = tuple[str, str, str]
"""Ecosystem, name and version."""


def locked() -> list[Locked]:
    """Returns the pinned packages and jars."""
    lock = (_ROOT / "requirements.lock").read_text(encoding="utf-8")
    packages = [("PyPI", pinned["name"], pinned["version"]) for pinned in _PINNED.finditer(lock)]
    dependencies = ET.parse(_ROOT / "deploy/ivy.xml").iter("dependency")
    jars = [("Maven", f"{jar.get('org')}:{jar.get('name')}", jar.get("rev", "")) for jar in dependencies]
    return [*packages, *jars]


def advisories(client: httpx.Client, asked: Sequence[Locked]) -> dict[Locked, list[str]]:
    """Returns the advisory ids of each package that has some.

    Raises:
        httpx.HTTPError: the database is unreachable, or its response is invalid.
    """
    queries = [{"package": {"ecosystem": e, "name": name}, "version": version} for e, name, version in asked]
    answer = client.post(_URL, json={"queries": queries})
    answer.raise_for_status()
    results: list[dict[str, Any]] = answer.json()["results"]
    found = zip(asked, results, strict=True)
    return {one: [str(known["id"]) for known in result["vulns"]] for one, result in found if result.get("vulns")}


def main(client: httpx.Client | None = None) -> int:
    """Prints the advisories; returns the exit code."""
    asked = locked()
    with client or httpx.Client(timeout=_SECONDS) as database:
        try:
            found = advisories(database, asked)
        except httpx.TransportError as error:
            print(f"not checked: no network ({error})")
            return 0
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in _REFUSED:
                raise
            print(f"not checked: no network (the response of {_URL} was {error.response.status_code})")
            return 0
    for (_, name, version), ids in found.items():
        print(f"{name} {version}: {', '.join(ids)}")
    print(f"{len(asked)} locked versions checked, {len(found)} with advisories")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
