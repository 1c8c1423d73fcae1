"""Runs the compose file: three replicas are scaled 3 → 1 → 3 under load and killed, and every balance is recounted.

Then Prometheus must have data for every query of the dashboard, and the read model is rebuilt.

    python -m tests.compose [--customers N] [--only PART] [--folder DIR]

Prints a table. Exits with 0 if all expectations hold, otherwise with 1.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from balance_service.devtools.local.processes import free_port, is_free
from balance_service.errors import ConfigurationError
from tests.compose.docker import ROOT, engine, image_bytes, prepare_images
from tests.compose.stack import Stack
from tests.compose.story import PARTITIONS, PARTS, Report, play

_HOST_PORTS = 10


def main() -> int:
    """Runs the story; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="make compose-test", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--customers", type=int, default=1_000_000, help="number of customers with a balance")
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        help="run one part only, after the common start; may be repeated",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "local-data" / "compose-test",
        help="folder for logs and for the data of a private engine",
    )
    chosen = parser.parse_args()
    folder: Path = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report()
    try:
        with engine(folder / "engine") as environment:
            images = prepare_images(environment, folder)
            report.note("image", f"{image_bytes(environment, images['BALANCE_IMAGE']) / 1e6:.0f} MB")
            stack = Stack(environment, images, _ports())
            report.note("composed by", f"{stack.composed_by}, kafka {images['KAFKA_IMAGE']}")
            stack.down()
            try:
                play(stack, report, chosen.customers, chosen.only or PARTS, folder)
            finally:
                with suppress(ConfigurationError):
                    stack.save_logs(folder / "containers.log")
                stack.down()
    except ConfigurationError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(report.table())
    return 0 if report.passed else 1


def _ports() -> dict[str, str]:
    for _ in range(50):
        first = free_port()
        if all(is_free(port) for port in range(first, first + _HOST_PORTS)):
            break
    return {
        "KAFKA_PORT": str(free_port()),
        "REGISTRY_PORT": str(free_port()),
        "PROMETHEUS_PORT": str(free_port()),
        "BALANCE_HOST_PORTS": f"{first}-{first + _HOST_PORTS - 1}",
        "BALANCE_PARTITIONS": str(PARTITIONS),
    }


if __name__ == "__main__":
    sys.exit(main())
