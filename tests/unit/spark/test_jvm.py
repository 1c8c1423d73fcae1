"""What Spark's JVM is given: the jars that are needed, and the options that Spark's own launcher gives."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark

from balance_service.process.package import resource
from balance_service.settings import load_settings
from balance_service.spark.handover_jar import handover_jar
from balance_service.spark.jvm import MODULE_OPTIONS, class_path, spark_java

if TYPE_CHECKING:
    import pytest

_JARS = Path(pyspark.__file__).parent / "jars"


def test_the_class_path_has_the_connectors_first_then_our_jar_and_of_spark_what_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BALANCE_SPARK_JARS", "z.jar,a.jar")

    jars = class_path(load_settings())

    assert jars[:3] == ["z.jar", "a.jar", str(handover_jar())]
    names = [Path(jar).name for jar in jars[3:]]
    assert names == sorted(set(names))
    assert any(name.startswith("spark-sql_") for name in names)
    assert any(name.startswith("hive-storage-api-") for name in names)
    assert not any(name.startswith(("hive-exec-", "kubernetes-", "spark-mllib")) for name in names)


def test_every_pattern_of_the_jars_left_out_names_one() -> None:
    lines = resource("deploy/spark-jars-left-out.txt").read_text().splitlines()

    assert [line for line in lines if line and not line.startswith("#") and not any(_JARS.glob(line))] == []


def test_the_options_are_those_of_sparks_launcher_but_for_the_module_of_vectors(tmp_path: Path) -> None:
    (launcher,) = _JARS.glob("spark-launcher_*.jar")
    with zipfile.ZipFile(launcher) as jar:
        assert "org/apache/spark/launcher/JavaModuleOptions.class" in jar.namelist()
    source = tmp_path / "Show.java"
    source.write_text(
        "class Show { public static void main(String[] a) { "
        "System.out.print(org.apache.spark.launcher.JavaModuleOptions.defaultModuleOptions()); } }"
    )
    shown = subprocess.run(
        [spark_java(), "-cp", launcher, source], capture_output=True, text=True, check=True, timeout=60
    )

    assert set(MODULE_OPTIONS) == set(shown.stdout.split()) - {"--add-modules=jdk.incubator.vector"}
