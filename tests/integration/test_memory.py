"""What an instance holds on to: no more after many micro-batches than after a few."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.integration.engines import Writer, catch_up, running_engine, settings_for

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.engine import Engine
    from balance_service.local.stack import LocalStack

_PLAN = "org.apache.spark.sql.classic.Dataset"


def _held(engine: Engine, java_class: str) -> int:
    """How many instances of a class the JVM holds, once it has collected its garbage."""
    gateway: Any = engine._spark.sparkContext._gateway
    jvm = gateway.jvm
    arguments = gateway.new_array(jvm.Object, 1)
    arguments[0] = gateway.new_array(jvm.String, 0)
    types = gateway.new_array(jvm.String, 1)
    types[0] = "[Ljava.lang.String;"
    commands = jvm.javax.management.ObjectName("com.sun.management:type=DiagnosticCommand")
    beans = jvm.java.lang.management.ManagementFactory.getPlatformMBeanServer()
    histogram = beans.invoke(commands, "gcClassHistogram", arguments, types)
    found = re.search(rf"^ *\d+: +(\d+) +\d+ +{re.escape(java_class)}$", histogram, re.MULTILINE)
    return 0 if found is None else int(found[1])


def test_plans_of_micro_batches_are_let_go_of(stack: LocalStack, names: dict[str, str], tmp_path: Path) -> None:
    settings = settings_for(stack, names, tmp_path / "state", max_records_per_batch=10)
    with running_engine(settings) as engine, Writer(stack, settings.topic) as writer:
        writer.add("first", "1.00")
        catch_up(engine)
        before = _held(engine, _PLAN)
        for _ in range(60):
            writer.add("many", *["0.01"] * 10)
        catch_up(engine)

        assert _held(engine, _PLAN) < before + 20
