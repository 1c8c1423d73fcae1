"""Prints the entries of the lock file that the service needs at run time: `runtime_requirements.py REPORT LOCK`.

REPORT is the report of `pip install --dry-run --report` for the project's dependencies. Only names are taken from it;
versions and hashes come from LOCK.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path

_ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[^\]]*\])?==(?:.*\\\n)*.*\n?", re.MULTILINE)


def normalized(name: str) -> str:
    """The name of a distribution, normalized. Source: PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(report: str, lock: str) -> str:
    """The entries of a lock file, with hashes, for the packages of a report.

    If a package is pinned to several versions by markers, all its entries are kept.

    Raises:
        SystemExit: the lock file does not pin a package.
    """
    entries: defaultdict[str, str] = defaultdict(str)
    for entry in _ENTRY.finditer(lock):
        entries[normalized(entry["name"])] += entry[0]
    names = sorted(normalized(item["metadata"]["name"]) for item in json.loads(report)["install"])
    if missing := [name for name in names if name not in entries]:
        raise SystemExit(f"requirements.lock does not pin {', '.join(missing)}; run `make lock`")
    return "".join(entries[name] for name in names)


if __name__ == "__main__":
    sys.stdout.write(needed(*(Path(name).read_text() for name in sys.argv[1:3])))
