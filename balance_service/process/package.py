"""The version of this package, its data files, and the extras that bring what it imports."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

DISTRIBUTION = "balance-read-models"
"""The name that pip knows this package by."""

_PACKAGE = Path(__file__).parents[1]
# By extra, the packages that an installation without it lacks.
_BROUGHT_BY = {
    "service": {
        "aiohttp", "confluent_kafka", "cryptography", "jwt", "opentelemetry", "prometheus_client", "py4j", "pyspark",
        "rocksdict",
    },
    "testing": {"hypothesis"},
}  # fmt: skip


def resource(relative: str) -> Path:
    """Path of a shipped file, such as `schemas/FundsAdded.avsc`: inside an installed package, or in the checkout."""
    packaged = _PACKAGE / "_resources" / relative
    return packaged if packaged.exists() else _PACKAGE.parent / relative


def with_extra(name: str) -> str:
    """The distribution with an extra, as pip takes it: `balance-read-models[service]`."""
    return f"{DISTRIBUTION}[{name}]"


def remedy_for(error: ModuleNotFoundError) -> str:
    """How to install what an import lacks; empty if no extra brings it."""
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, brought in _BROUGHT_BY.items() if package in brought), None)
    return "" if extra is None else f"install {with_extra(extra)}, which brings {package}"
