"""`balance-service init`: the project works, and existing files stay."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from balance_service.avro.codec import AvroCodec
from balance_service.avro.from_json import record_line
from balance_service.cli.init import TEMPLATES, write_project
from balance_service.cli.main import cli
from balance_service.errors import ConfigurationError
from balance_service.model.converters import record_converter
from balance_service.testing.fakes import FakeRegistry

WAIT_SECONDS = 240
ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_project(tmp_path / "shop")
    return tmp_path / "shop"


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_files_of_a_project_are_written_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    done = CliRunner().invoke(cli, ["init", "web_shop"])

    assert done.exit_code == 0
    files = written(tmp_path / "web_shop")
    assert files >= {
        "pyproject.toml",
        "web_shop/orders.py",
        "web_shop/events.py",
        "tests/test_orders.py",
    }
    assert {line.removeprefix("wrote web_shop/") for line in done.output.splitlines() if "wrote" in line} == files
    assert "balance-service try web_shop.orders:Orders --events samples/orders.jsonl" in done.output


def test_a_project_may_read_a_json_topic(tmp_path: Path) -> None:
    for given in ((), ("--format", "json")):
        folder = tmp_path / ("of_json" if given else "of_avro")
        assert CliRunner().invoke(cli, ["init", *given, str(folder)]).exit_code == 0

        declared = 'Stream("orders", OrderPlaced, format="json")' if given else 'Stream("orders", OrderPlaced)'
        assert declared in (folder / folder.name / "orders.py").read_text()
        text = "".join((folder / name).read_text() for name in written(folder))
        assert "{{" not in text
        # Only the compose file names the registry, to have it not used.
        assert ("schema registry" in text) is (not given)
        assert text.count("BALANCE_SCHEMA_REGISTRY_URL") == 1
        override = yaml.safe_load((folder / "compose.override.yml").read_text())["services"]
        for service in override.values():
            assert service["environment"].get("BALANCE_SCHEMA_REGISTRY_URL") == ("" if given else None)


def test_the_project_can_be_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shop").mkdir()
    monkeypatch.chdir(tmp_path / "shop")

    assert CliRunner().invoke(cli, ["init", "."]).exit_code == 0
    assert (tmp_path / "shop" / "shop" / "orders.py").is_file()


@pytest.mark.parametrize("there", ["README.md", "shop/orders.py", "shop", "tests", "dangling"])
def test_existing_files_are_never_overwritten(tmp_path: Path, there: str) -> None:
    folder = tmp_path / "shop"
    path = folder / ("README.md" if there == "dangling" else there)
    path.parent.mkdir(parents=True)
    if there == "dangling":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_text("mine")

    with pytest.raises(ConfigurationError, match=re.escape(f"already contains {path.relative_to(folder)}")):
        write_project(folder)

    assert [found for found in folder.rglob("*") if not found.is_dir()] == [path]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["Shop", "web-shop", "2shop", "class", "json", "tests", "balance_service", "läden"])
def test_an_invalid_package_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' is not a valid name for the project's package"):
        write_project(tmp_path / name)

    assert not (tmp_path / name).exists()


def test_every_template_is_filled(project: Path) -> None:
    assert len(written(project)) == len([*TEMPLATES.rglob("*.tmpl")])
    for name in written(project):
        assert "{{package}}" not in name + (project / name).read_text()


def test_python_files_parse_and_the_entry_point_names_the_model(project: Path) -> None:
    for name in written(project):
        if name.endswith(".py"):
            ast.parse((project / name).read_text())
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]

    # On the public index, balance-service is another project's name.
    assert "balance-service" not in str([declared["dependencies"], declared.get("optional-dependencies")])
    assert declared["entry-points"]["balance_service.read_models"] == {"orders": "shop.orders:Orders"}
    assert "class Orders(ReadModel):" in (project / "shop" / "orders.py").read_text()


def test_samples_are_ten_events_with_their_keys(project: Path) -> None:
    lines = (project / "samples" / "orders.jsonl").read_bytes().splitlines()
    schema = record_converter(runpy.run_path(str(project / "shop" / "events.py"))["OrderPlaced"]).schema

    assert len(lines) == 10
    for line in lines:
        key, record = record_line(line, schema, "|", takes_tombstones=False)
        assert record is not None
        assert record["customerId"].encode() == key
        AvroCodec(FakeRegistry(), "orders", schema).encode(record)


def test_the_readme_has_at_most_thirty_lines_and_the_commands(project: Path) -> None:
    readme = (project / "README.md").read_text()

    assert len(readme.splitlines()) <= 30
    assert "balance-service try shop.orders:Orders --events samples/orders.jsonl" in readme
    assert "balance-service produce orders --key-separator '|' < samples/orders.jsonl" in readme


def test_the_override_replaces_the_image_of_services_in_the_compose_file(project: Path) -> None:
    override = yaml.safe_load((project / "compose.override.yml").read_text())["services"]
    ours = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

    assert override.keys() == {name for name, service in ours.items() if "deploy/Dockerfile" in str(service)}
    for service in override.values():
        assert service["environment"] == {"BALANCE_MODELS": "shop.orders:Orders"}
        assert service["build"]["dockerfile"] == "Dockerfile"


@pytest.mark.parametrize("topic_format", ["avro", "json"])
def test_the_projects_own_test_passes_and_its_samples_are_folded(tmp_path: Path, topic_format: str) -> None:
    project = tmp_path / "shop"
    write_project(project, topic_format)
    tested = in_project(project, "pytest", "-q")
    tried = in_project(project, "balance_service", "try", "shop.orders:Orders", "--events", "samples/orders.jsonl")

    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert tried.returncode == 0, tried.stderr
    rows = [line.split() for line in tried.stdout.splitlines()]
    assert ["ada", "3", "166.00", "129.00"] in rows
    assert ["9", "amount-not-positive"] in [row[:2] for row in rows]


def test_a_strict_type_checker_accepts_the_project_and_the_types_of_schemas(project: Path) -> None:
    files = [str(file) for file in (ROOT / "schemas").glob("*.avsc")]
    written = in_project(project, "balance_service", "schemas", "types", *files)
    assert (written.returncode, written.stderr) == (0, "")
    assert written.stdout.count("@dataclass") >= len(files) > 0
    (project / "shop" / "written.py").write_text(written.stdout)

    # Only errors of the project count; those of the package are found by its own check.
    checked = in_project(project, "mypy", "--strict", "--follow-imports=silent", "shop", "tests")

    assert checked.returncode == 0, checked.stdout + checked.stderr
    (project / "shop" / "orders.py").write_text(
        (project / "shop" / "orders.py").read_text().replace("event.amount <= 0", "event.amonut <= 0")
    )
    misspelt = in_project(project, "mypy", "--strict", "--follow-imports=silent", "shop", "tests")
    assert '"OrderPlaced" has no attribute "amonut"; maybe "amount"?' in misspelt.stdout


def in_project(project: Path, module: str, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *given]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
