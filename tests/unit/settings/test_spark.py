"""Spark's own settings: which ones `spark-defaults.conf` may have, and where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from balance_service.errors import ConfigurationError
from balance_service.settings import load_settings
from balance_service.settings.spark import (
    OWN_SETTINGS,
    PREFERRED_SETTINGS,
    SETTINGS_WITHOUT_UI,
    VALUE_SETTINGS,
    spark_defaults,
)
from balance_service.spark import jvm

if TYPE_CHECKING:
    from pathlib import Path

_ALLOWED = """\
# Memory, logging, the user interface, Hadoop.
spark.memory.fraction            0.5
spark.log.level                  WARN
spark.eventLog.enabled  true
spark.ui.port=4100
spark.ui.retainedJobs : 20
spark.sql.ui.explainMode         extended
spark.sql.streaming.ui.enabled   false
spark.hadoop.fs.s3a.endpoint     http://store:9000
hive.metastore.uris              thrift://not-of-spark:1
"""


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that SPARK_CONF_DIR names."""
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    return tmp_path


def _write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "spark-defaults.conf"
    file.write_text(text, encoding="utf-8")
    return file


def test_memory_logging_user_interface_and_hadoop_come_from_the_file(conf: Path) -> None:
    _write(conf, _ALLOWED)

    assert spark_defaults() == {
        "spark.memory.fraction": "0.5",
        "spark.log.level": "WARN",
        "spark.eventLog.enabled": "true",
        "spark.ui.port": "4100",
        "spark.ui.retainedJobs": "20",
        "spark.sql.ui.explainMode": "extended",
        "spark.sql.streaming.ui.enabled": "false",
        "spark.hadoop.fs.s3a.endpoint": "http://store:9000",
    }


@pytest.mark.parametrize("name", sorted({**VALUE_SETTINGS, **OWN_SETTINGS}))
def test_what_the_service_sets_is_refused_by_name(conf: Path, name: str) -> None:
    file = _write(conf, f"spark.log.level INFO\n{name} {({**VALUE_SETTINGS, **OWN_SETTINGS})[name]}\n")

    with pytest.raises(ConfigurationError) as refused:
        spark_defaults()

    assert str(refused.value) == (
        f"{file} (SPARK_CONF_DIR): {name} is set by the service: remove it, or name a folder without "
        "spark-defaults.conf in SPARK_CONF_DIR"
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("spark.app.name", "BALANCE_APPLICATION_ID"),
        ("spark.driver.extraClassPath", "BALANCE_SPARK_JARS"),
        ("spark.driver.extraJavaOptions", "JAVA_TOOL_OPTIONS"),
        ("spark.driver.memory", "BALANCE_SPARK_DRIVER_MEMORY"),
        ("spark.jars.packages", "BALANCE_SPARK_JARS"),
        ("spark.local.dir", "BALANCE_STATE_DIR"),
        ("spark.ui.enabled", "BALANCE_SPARK_UI"),
    ],
)
def test_what_has_a_setting_of_the_service_is_refused_with_its_name(conf: Path, name: str, instead: str) -> None:
    _write(conf, f"{name} x\n")

    with pytest.raises(ConfigurationError, match=rf": {name} has no effect \(set {instead} instead\): remove it"):
        spark_defaults()


def test_every_other_setting_of_spark_sql_is_refused_and_all_in_one_message(conf: Path) -> None:
    _write(conf, "spark.sql.shuffle.partitions 8\nspark.master yarn\nspark.sql.extensions com.acme.Extensions\n")

    with pytest.raises(ConfigurationError) as refused:
        spark_defaults()

    could = (
        "could change values (of spark.sql.*, only spark.sql.ui.*, spark.sql.streaming.ui.*, spark.sql.redaction.* "
        "can not)"
    )
    assert (
        ": spark.master has no effect (each instance runs a Spark of its own, in its JVM); "
        f"spark.sql.extensions {could}; spark.sql.shuffle.partitions {could}: remove them, or"
    ) in str(refused.value)


def test_the_file_is_where_spark_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "home").mkdir()
    file = _write(tmp_path / "home" / "conf", "spark.memory.fraction 0.4\n")
    assert spark_defaults() == {}

    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "home"))
    assert spark_defaults() == {"spark.memory.fraction": "0.4"}
    file.write_text("spark.master local[2]\n")
    with pytest.raises(ConfigurationError, match=rf"^{file} \(SPARK_HOME\): spark.master "):
        spark_defaults()

    # As in Spark, the other folder then does not count, even if this one has no file.
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "conf"))
    assert spark_defaults() == {}


def test_the_file_is_read_as_java_reads_properties(conf: Path) -> None:
    _write(
        conf,
        "  ! a comment, which ends with its line \\\n"
        "spark.a\\ b\\:c = 1\r\n"
        "spark.long  one,\\\n    two,\\\n\ttwo\\\\\n"
        "spark.empty\n"
        "spark.equals==\n"
        "spark.code \\u00e4\\t|\\q  \n"
        "\\u0073park.name=ü",
    )

    assert spark_defaults() == {
        "spark.a b:c": "1",
        "spark.long": "one,two,two\\",
        "spark.empty": "",
        "spark.equals": "=",
        "spark.code": "ä\t|q",
        "spark.name": "ü",
    }


def test_a_file_that_cannot_be_read_is_refused(conf: Path) -> None:
    file = _write(conf, "")
    file.write_bytes(b"spark.app.name \xff\n")

    with pytest.raises(ConfigurationError, match=rf"^{file} \(SPARK_CONF_DIR\) cannot be read: it is not UTF-8"):
        spark_defaults()


def test_a_wrong_file_is_refused_before_the_jvm_starts(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(conf, "spark.sql.ansi.enabled false\n")
    started: list[object] = []
    monkeypatch.setattr(jvm, "SparkJvm", lambda *arguments, **_: started.append(arguments))
    monkeypatch.setattr(jvm, "_launched", [])

    with pytest.raises(ConfigurationError, match=r"spark\.sql\.ansi\.enabled is set by the service"):
        jvm.launch_jvm(load_settings(), None)  # type: ignore[arg-type]

    assert started == []
    monkeypatch.setenv("SPARK_CONF_DIR", "/nowhere")
    jvm.launch_jvm(load_settings(), None)  # type: ignore[arg-type]
    assert len(started) == 1


def test_the_service_sets_each_setting_once() -> None:
    groups = (VALUE_SETTINGS, OWN_SETTINGS, PREFERRED_SETTINGS, SETTINGS_WITHOUT_UI)

    assert len({name for group in groups for name in group}) == sum(map(len, groups))
