"""`balance-service schemas register`: the subjects that it registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.cli.init import write_project
from balance_service.cli.main import cli
from balance_service.errors import RetriableError
from balance_service.testing.fakes import FakeRegistry

if TYPE_CHECKING:
    from pathlib import Path

    from balance_service.avro.schemas import Schema

pytestmark = pytest.mark.usefixtures("no_environment")


class Registry(FakeRegistry):
    """Records the schema of each subject."""

    def __init__(self) -> None:
        super().__init__()
        self.subjects: dict[str, Schema] = {}

    def register(self, subject: str, schema: Schema) -> int:
        self.subjects[subject] = schema
        return super().register(subject, schema)

    def close(self) -> None: ...


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry()
    monkeypatch.setattr(SchemaRegistry, "from_settings", lambda *_: registry)
    return registry


def register(*models: str) -> Any:
    return CliRunner(env={"BALANCE_MODELS": ",".join(models)}).invoke(cli, ["schemas", "register"])


def test_the_schemas_of_topics_that_the_service_writes_are_registered(registry: Registry) -> None:
    done = register("balance", "symbols")

    assert done.exit_code == 0, done.output
    expected = {
        subject_of(topic, load_schema(name)): load_schema(name)
        for topic, names in {
            "balance": ["FundsAdded"],
            "symbols": ["Symbol"],
            "balance-service-balance-changelog": ["BalanceState", "IdempotencyMarker", "Position", "Letter"],
            "balance-service-application-servers": ["ApplicationServer"],
            "balance-service-dead-letter-decisions": ["DeadLetterDecision"],
        }.items()
        for name in names
    }
    assert registry.subjects.items() >= expected.items()


def test_each_subject_is_printed_once_with_its_id(registry: Registry) -> None:
    printed = register("balance", "activity").output.splitlines()

    assert printed == [
        f"{subject}: schema id {registry.schemas.index(schema) + 1}" for subject, schema in registry.subjects.items()
    ]


def test_the_schemas_of_other_producers_are_not_registered(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_project(tmp_path / "web_shop")
    monkeypatch.chdir(tmp_path / "web_shop")

    done = register("web_shop.orders:Orders")

    assert done.exit_code == 0, done.output
    subjects = registry.subjects
    assert any(subject.startswith("balance-service-orders-changelog-") for subject in subjects)
    assert not any("OrderPlaced" in subject for subject in subjects)


def test_a_registry_that_does_not_answer_is_reported(registry: Registry) -> None:
    registry.is_up = False

    assert isinstance(register("balance").exception, RetriableError)
