"""Ten read models from two external packages plus the balance, on four partitions and three instances.

All answers are exact on every instance, also after a kill.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.service import add, application, new_instance, running, status
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

_MODELS = 10
_PARTITIONS = 4
_CUSTOMERS = [f"customer-{n}" for n in range(24)]
_SECONDS = 120.0
# Fold → type in the state, and the expected result over all amounts.
_FOLDS = {
    'RunningSum("FundsAdded.amount")': ("decimal", sum),
    'Greatest("FundsAdded.amount")': ("decimal", max),
    'Least("FundsAdded.amount")': ("decimal", min),
    'Count("FundsAdded")': ("long", len),
    'Latest("FundsAdded.amount")': ("decimal", lambda amounts: amounts[-1]),
}
_KINDS = {"decimal": {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 2}, "long": "long"}


def _fold(number: int) -> tuple[str, str, Any]:
    fold = list(_FOLDS)[number % len(_FOLDS)]
    return fold, *_FOLDS[fold]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two packages; each has a module with five models and their schemas."""
    folder = tmp_path_factory.mktemp("ten")
    for number in range(_MODELS):
        fold, kind, _ = _fold(number)
        package = folder / _package_of(number)
        (package / "schemas").mkdir(parents=True, exist_ok=True)
        schema = {
            "type": "record",
            "name": f"Generated{number}",
            "namespace": "tests",
            "fields": [{"name": "customerId", "type": "string"}, {"name": "result", "type": _KINDS[kind]}],
        }
        (package / "schemas" / f"Generated{number}.avsc").write_text(json.dumps(schema))
        with (package / "models.py").open("a") as module:
            module.write(
                f"from balance_service import {fold.partition('(')[0]}, ReadModel, Stream\n\n\n"
                f"class Generated{number}(ReadModel):\n"
                f'    """One of ten."""\n\n    name = "generated-{number}"\n'
                f'    source = Stream("balance", "FundsAdded")\n'
                f'    key = "customerId"\n    state = "Generated{number}"\n\n    result = {fold}\n\n\n'
            )
    return folder


def _package_of(number: int) -> str:
    return "first" if number % 2 else "second"


@pytest.fixture(scope="module")
def instances(stack: LocalStack, packages: Path) -> Iterator[Sequence[LocalInstance]]:
    """Three instances that host all ten models and the balance."""
    settings = application(
        BALANCE_MODELS="balance,first.models,second.models",
        BALANCE_PARTITIONS=str(_PARTITIONS),
        PYTHONPATH=str(packages),
    )
    with running(*(new_instance(stack, settings) for _ in range(3))) as started:
        yield started


def _get(instance: LocalInstance, path: str) -> Any:
    """Returns the JSON body, or the error as text."""
    try:
        answer = httpx.get(f"{instance.url}/api/models/{path}", timeout=30)
    except httpx.HTTPError as error:
        return repr(error)
    return json.loads(answer.text, parse_float=Decimal)


def _wrong(instances: Sequence[LocalInstance], amounts: dict[str, list[Decimal]]) -> list[str]:
    """Returns the wrong answers."""
    found = []
    for instance in instances:
        for number in range(_MODELS):
            expected = [
                {"key": customer, "value": {"result": _fold(number)[2](of_one)}}
                for customer, of_one in sorted(amounts.items())
            ]
            answer = _get(instance, f"generated-{number}/entries?limit=1000")
            if answer != {"entries": expected, "next": None}:
                found.append(f"{instance.name}: generated-{number}: {str(answer)[:500]}")
    return found


def _await_right(instances: Sequence[LocalInstance], amounts: dict[str, list[Decimal]]) -> None:
    eventually(lambda: not _wrong(instances, amounts), lambda: _report(instances, amounts), _SECONDS)


def _report(instances: Sequence[LocalInstance], amounts: dict[str, list[Decimal]]) -> str:
    """Returns the wrong answers and the log tails of instances that have ended."""
    gone = [f"{each.name} has ended: {each.log.read_text()[-4_000:]}" for each in instances if not each.running]
    return "\n".join((*_wrong(instances, amounts), *gone))


@pytest.mark.timeout(600)
def test_every_instance_answers_for_every_key_of_every_model_after_a_kill(
    instances: Sequence[LocalInstance],
) -> None:
    amounts: dict[str, list[Decimal]] = defaultdict(list)
    for number, customer in enumerate(_CUSTOMERS):
        amount = Decimal(1 + number * 7 % 50) + Decimal("0.10")
        _added(instances, customer, amount)
        amounts[customer].append(amount)
    killed, *others = instances
    killed.kill()
    _await_right(others, amounts)
    killed.launch()
    killed.wait_ready()
    for number, customer in enumerate(_CUSTOMERS):
        _added(instances, customer, amount := Decimal(1 + number * 13 % 50))
        amounts[customer].append(amount)

    _await_right(instances, amounts)
    for number in range(_MODELS):
        for instance in instances:
            for customer, of_one in amounts.items():
                value = _get(instance, f"generated-{number}/keys/{customer}")["value"]
                assert value["result"] == _fold(number)[2](of_one), (instance.name, number, customer)
            assert _get(instance, f"generated-{number}/count") == {"count": len(amounts)}
    for instance, (customer, of_one) in itertools.product(instances, amounts.items()):
        assert _get(instance, f"balance/keys/{customer}")["value"] == {"amount": sum(of_one)}
    tasks = [task["task"] for instance in instances for task in status(instance)["tasks"] if task["role"] == "active"]
    models = ("balance", *(f"generated-{number}" for number in range(_MODELS)))
    assert sorted(tasks) == sorted(f"{model}_{p}" for model in models for p in range(_PARTITIONS))


def _added(instances: Sequence[LocalInstance], customer: str, amount: Decimal) -> None:
    """Adds funds once; retries while a restarted instance refuses commands."""

    def taken() -> bool:
        try:
            add(instances[0].url, customer, str(amount))
        except (AssertionError, httpx.HTTPError):
            return False
        return True

    eventually(taken, "the command is accepted", _SECONDS)
