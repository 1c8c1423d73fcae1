"""What runs without an extra: models, `init`, `try`, the test driver, the contract and the client.

The packages of the extra `service` are blocked, as if they were not installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import balance_service
from balance_service.cli.init import write_project
from balance_service.process.package import _BROUGHT_BY, DISTRIBUTION

_ROOT = Path(__file__).parents[2]
_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
sys.meta_path.insert(0, Blocked())
"""
_IMPORTED_AS = {"pyjwt": "jwt", "aiohappyeyeballs": "", "typing-extensions": ""}
# The service itself is no part of what runs without it.
_NAMES = sorted({*balance_service.__all__} - {"Application", "__version__"})


def run(code: str, folder: Path = _ROOT) -> subprocess.CompletedProcess[str]:
    """Runs code in an interpreter that lacks the packages of the extra `service`."""
    blocked = _BLOCKED.format(blocked=_BROUGHT_BY["service"])
    return subprocess.run(
        [sys.executable, "-c", blocked + code], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.argv[1:] = {arguments!r}; from balance_service.cli.main import main; main()"
    return run(code, folder)


def requirements(extra: str | None = None) -> set[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return {re.split(r"[\[<>=]", one)[0] for one in wanted}


def test_what_is_blocked_here_is_what_the_extra_brings() -> None:
    brought = {_IMPORTED_AS.get(name, name.replace("-", "_")) for name in requirements("service") - {DISTRIBUTION}}

    # PySpark brings py4j, and opentelemetry-api the package opentelemetry.
    assert {*brought, "py4j", "opentelemetry"} - {"", "opentelemetry_api"} == _BROUGHT_BY["service"]
    assert not requirements() & requirements("service")


@pytest.mark.parametrize(
    "light",
    [
        f"from balance_service import {', '.join(_NAMES)}",
        "import balance_service.testing, balance_service.testing.strategies",
        "import balance_service.client",
        "import balance_service.read_models",
        "from balance_service.cli import main, init, try_model, client, generations",
    ],
)
def test_a_light_part_imports_nothing_of_the_service(light: str) -> None:
    done = run(light)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_new_project_is_tried_and_tested(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    assert command("init", str(shop), folder=tmp_path).returncode == 0

    tried = command("try", "shop.orders:Orders", "--events", "samples/orders.jsonl", folder=shop)
    tested = run("import pytest; raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider']))", shop)

    assert (tried.returncode, tried.stderr) == (0, "")
    assert "10 events: 9 applied, 1 dead letter" in tried.stdout
    assert tested.returncode == 0, tested.stdout


def test_a_trial_joins_without_the_service() -> None:
    events, rows = "samples/score-events.txt", ["players", "products"]
    tables = [argument for topic in rows for argument in ("--rows", f"{topic}=samples/{topic}.txt")]

    done = command("try", "leaderboard", "--events", events, *tables, folder=_ROOT)

    assert (done.returncode, done.stderr) == (0, "")
    assert "leaderboard" in done.stdout


def test_a_trial_of_a_transform_says_which_extra_runs_it() -> None:
    done = command("try", "purchases", "--events", "samples/pos.txt", folder=_ROOT)

    assert done.returncode == 2
    assert f"has a `transform`, which Spark runs: install {DISTRIBUTION}[service]" in done.stderr


def test_a_model_that_imports_spark_says_which_extra_brings_it(tmp_path: Path) -> None:
    write_project(tmp_path / "shop")
    model = tmp_path / "shop" / "shop" / "orders.py"
    model.write_text("from pyspark.sql import functions as F\n" + model.read_text())

    done = command("try", "shop.orders", "--events", "samples/orders.jsonl", folder=tmp_path / "shop")

    assert done.returncode == 2
    assert "imports pyspark, which is not installed; install" in done.stderr
    assert f"install {DISTRIBUTION}[service], which brings pyspark" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("serve",), ("local",), ("topics", "create"), ("dead-letters", "list"), ("flow", "balance")]
)
def test_a_command_of_the_service_says_which_extra_brings_it(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = command(*arguments, folder=tmp_path)

    assert done.returncode == 2
    assert f"which is not installed: install {DISTRIBUTION}[service], which brings" in done.stderr
    assert "Traceback" not in done.stderr
