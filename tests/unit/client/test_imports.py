"""A program that uses the client needs neither Java nor Kafka."""

from __future__ import annotations

import json
import subprocess
import sys

_HEAVY = ("pyspark", "py4j", "confluent_kafka", "rocksdict", "aiohttp", "pyarrow", "fastavro", "pydantic")


def imported_by(statement: str) -> set[str]:
    """Returns the top-level modules that a new interpreter has after a statement."""
    code = f"{statement}; import json, sys; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return {*json.loads(done.stdout)}


def test_the_client_imports_none_of_the_engines_libraries() -> None:
    assert imported_by("import balance_service.client").isdisjoint(_HEAVY)
    assert "confluent_kafka" in imported_by("import balance_service.kafka.clients"), "the check finds imports"
