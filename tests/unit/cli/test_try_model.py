"""`balance-service try`: folds a file of events by the real fold, without a broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli, main
from balance_service.errors import InvalidInputError
from balance_service.process.package import resource

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result

WAIT_SECONDS = 120
OWN = """\
from balance_service.model.stream import Stream
from balance_service.model.read_model import ReadModel


class Counting(ReadModel):
    name = "counting"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"
    fields = {"amount": "decimal(38,2)"}

    def fold(self, state, event):
        if event["id"] == "poor":
            raise KeyError("rates")
        return {"customerId": event["customerId"], "amount": event["amount"] + BONUS}

    def view(self, state):
        return {"amount": state["amount"]}


BONUS = 100
"""


def funds(customer: str, amount: str, name: str = "e") -> str:
    fields = {"id": name, "occurredOn": "2026-01-02T12:00:00.000Z", "customerId": customer, "amount": amount}
    return json.dumps(fields)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join([funds("ada", "5.00"), "", funds("bob", "1.25"), funds("ada", "2.50")]))
    return file


def tried(*given: object) -> Result:
    return CliRunner().invoke(cli, ["try", *map(str, given)])


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def in_child(*given: object, cwd: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a separate process, and then some code in that process."""
    run = (
        "import sys\nfrom balance_service.cli.main import cli\n"
        f"try:\n    cli(sys.argv[1:])\nfinally:\n    {code or 'pass'}"
    )
    command = [sys.executable, "-c", run, "try", *map(str, given)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


def test_a_misspelt_setting_is_refused(
    events: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BALANCE_APLICATION_ID", "shop")
    monkeypatch.setattr(sys, "argv", ["balance-service", "try", "balance", "--events", str(events)])

    with pytest.raises(SystemExit) as exited:
        main()

    assert exited.value.code == 2
    assert "BALANCE_APLICATION_ID is no setting: correct it to BALANCE_APPLICATION_ID" in capsys.readouterr().err


def test_states_are_printed_as_in_answers_to_queries(events: Path) -> None:
    done = tried("activity", "--events", events)

    assert done.exit_code == 0
    printed = rows(done.output)
    assert printed[0] == ["activity:", "2", "keys"]
    assert printed[1] == ["customerId", "additions", "first", "latest", "greatest"]
    day = "2026-01-02T12:00:00.000Z"
    assert printed[3:] == [
        ["ada", "2", day, day, "5.00"],
        ["bob", "1", day, day, "1.25"],
        ["3", "events:", "3", "applied"],
    ]


def test_spark_and_clients_are_not_imported(events: Path, tmp_path: Path) -> None:
    heavy = "('pyspark', 'py4j', 'httpx', 'pydantic', 'confluent_kafka.schema_registry', 'hypothesis')"
    done = in_child(
        "activity", "--events", events, cwd=tmp_path, code=f"print([m for m in {heavy} if m in sys.modules])"
    )

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_rows_beyond_the_limit_are_counted(events: Path) -> None:
    printed = tried("balance", "--events", events, "--limit", 1).output

    assert "ada" in printed
    assert "bob" not in printed
    assert "… and 1 more; --limit shows more" in printed


@pytest.mark.parametrize(("given", "separator"), [((), "|"), (("--key-separator", " => "), " => ")])
def test_dead_letters_are_printed_with_line_and_cause(events: Path, given: tuple[str, ...], separator: str) -> None:
    events.write_text("\n".join(f"ada{separator}{funds(who, '1.00')}" for who in ("ada", "bob")))

    printed = tried("balance", "--events", events, *given).output

    assert "1 dead letter\n" in printed
    assert ["2", "key-is-not-customer-id"] in [row[:2] for row in rows(printed)]
    assert "the record's key is not the customerId of its event" in printed
    assert printed.endswith("2 events: 1 applied, 1 dead letter\n")


def test_emitted_records_are_printed_by_topic(tmp_path: Path) -> None:
    invoice = {
        "invoiceNumber": "I-1",
        "storeId": "S-1",
        "customerCardNo": "49",
        "deliveryType": "TAKEAWAY",
        "totalAmount": 50.00,
        "lines": [],
    }
    file = tmp_path / "invoices.jsonl"
    file.write_text("\n".join(json.dumps(invoice | {"customerType": kind}) for kind in ("PRIME", "PRIME", "OTHER")))

    printed = tried("rewards", "--events", file).output

    assert "emitted to notifications: 2 records" in printed
    assert ["I-1", "49", "50.00", "1.0000", "2.0000"] in rows(printed)
    assert printed.endswith("3 events: 2 applied, 1 ignored\n")


def test_tombstones_delete_states_if_the_topic_takes_tombstones(tmp_path: Path) -> None:
    file = tmp_path / "symbols.txt"
    symbol = resource("samples/symbols.txt").read_text().splitlines()[0]
    file.write_text(f"{symbol}\n{symbol.partition('|')[0]}|null\n")

    assert tried("symbols", "--events", file).output.startswith("symbols: 0 keys")


def test_the_key_of_a_line_is_written_as_queries_name_it(tmp_path: Path) -> None:
    file = tmp_path / "orders.txt"
    file.write_text('-5|{"amount": 2}\n7|{"amount": 3}\n-5|{"amount": 1}\n7|null\n')

    printed = tried("tests.support.record_keys:OrdersById", "--events", file).output

    assert printed.startswith("own-orders-by-id: 1 key\n")
    assert rows(printed)[1] == ["key", "total", "orders"]
    assert ["-5", "3", "2"] in rows(printed)


def test_a_key_of_another_form_is_refused_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "orders.txt"
    file.write_text('five|{"amount": 2}\n')

    refused = tried("tests.support.record_keys:OrdersById", "--events", file)

    assert "orders.txt, line 1: key must be a number of at most 64 bits, such as 42" in str(refused.exception)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"id": "e"}', "'occurredOn' is missing"),
        ("nonsense", "not JSON: Expecting value at character 1"),
        (f"|{funds('ada', '1.00')}", "no key before '|'"),
        (funds("ada", "1.005"), "'amount' must be a number or a string of digits, at most 16 before the point"),
    ],
)
def test_the_message_for_a_bad_line_names_file_and_number(
    events: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, why: str
) -> None:
    with events.open("a") as file:
        file.write(f"\n{line}\n")
    monkeypatch.setattr(sys, "argv", ["balance-service", "try", "balance", "--events", str(events)])

    with pytest.raises(SystemExit) as exited:
        main()

    assert exited.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{events}, line 5: {why}" in printed.err


def test_the_message_for_a_fold_that_fails_names_the_line_and_the_place(events: Path, tmp_path: Path) -> None:
    (tmp_path / "counting.py").write_text(OWN)
    # More than a batch: the failing batch is rolled back, and repeated in commits of one event each.
    customers = [*["ada"] * 4_000, "bob", "eve", "poor", "zoe"]
    names = [who if who == "poor" else f"{who}-{n}" for n, who in enumerate(customers)]
    events.write_text("\n".join(funds(who, "1.00", name) for who, name in zip(customers, names, strict=True)))

    done = in_child("counting:Counting", "--events", "events.jsonl", cwd=tmp_path)

    assert done.returncode == 1
    assert [row for row in rows(done.stdout) if row[0] in ("ada", "bob", "eve", "poor")] == [
        [who, "101.00"] for who in ("ada", "bob", "eve")
    ]
    at = OWN.splitlines().index('            raise KeyError("rates")') + 1
    assert done.stderr == (
        f"Error: events.jsonl, line 4003: the read model's own code raises KeyError: 'rates' at "
        f"{tmp_path / 'counting.py'}:{at}; this line and those after it are not applied\n"
    )


def test_a_module_with_several_models_is_rejected_with_their_names(events: Path, tmp_path: Path) -> None:
    package = tmp_path / "shop"
    package.mkdir()
    again = OWN.replace("Counting", "Again").replace('"counting"', '"again"')
    (package / "counting.py").write_text(f"{OWN}\n\n{again}")

    refused = in_child("shop.counting", "--events", events, cwd=tmp_path)

    assert "shop.counting has 2 read models; name one: shop.counting:Counting, shop.counting:Again" in refused.stderr


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ("", "reads several records; name that of the file, such as --events Scored="),
        ("Other=", "reads no record Other; it reads Scored, Ended"),
    ],
)
def test_a_record_must_be_named_if_the_model_reads_several(events: Path, record: str, why: str) -> None:
    done = tried("tests.support.models:Summary", "--events", f"{record}{events}")

    assert isinstance(done.exception, InvalidInputError)
    assert why in str(done.exception)


def test_files_of_several_sources_are_folded_one_after_the_other(tmp_path: Path) -> None:
    orders, payments = tmp_path / "orders.jsonl", tmp_path / "payments.jsonl"
    orders.write_text('{"orderId": "o-1", "customerId": "ada", "amount": 5}\n')
    payments.write_text(
        '{"customerId": "ada", "amount": 3, "method": "card"}\n{"customerId": "ada", "amount": 9, "method": "voucher"}'
    )

    printed = tried(
        "tests.unit.model.test_sources:Accounts",
        *("--events", f"OrderPlaced={orders}", "--events", f"PaymentTaken={payments}"),
    ).output

    assert ["ada", "5", "3"] in rows(printed)
    assert printed.endswith("3 events: 2 applied, 1 ignored\n")


def test_a_file_that_does_not_exist_is_refused() -> None:
    done = tried("balance", "--events", "FundsAdded=absent.jsonl")

    assert "--events FundsAdded=absent.jsonl: there is no file 'absent.jsonl'" in done.output


@pytest.fixture
def watching(events: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "counting.py").write_text(OWN)
    command = [sys.executable, "-m", "balance_service", "try", "counting:Counting", "--events", str(events), "--watch"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        yield child
        child.kill()


def until_watching(child: subprocess.Popen[str]) -> str:
    """The output of a run."""
    assert child.stdout is not None
    printed = ""
    for line in child.stdout:
        if line.startswith("watching "):
            return printed
        printed += line
    raise AssertionError(f"the command ended: {printed}")


def test_a_save_runs_the_command_again_until_ctrl_c(
    watching: subprocess.Popen[str], events: Path, tmp_path: Path
) -> None:
    assert ["ada", "102.50"] in rows(until_watching(watching))

    events.write_text(funds("eve", "1.00"))
    assert ["eve", "101.00"] in rows(until_watching(watching))

    (tmp_path / "counting.py").write_text(OWN.replace("BONUS = 100", "BONUS = 3000"))
    assert ["eve", "3001.00"] in rows(until_watching(watching))

    time.sleep(0.1)
    watching.send_signal(2)
    assert watching.wait(timeout=WAIT_SECONDS) == 0


CITIES = """\
from dataclasses import dataclass

from balance_service import Count, Global, ReadModel, Stream


@dataclass
class City:
    city: str
    orders: int


class Cities(ReadModel):
    name = "cities"
    source = (
        Stream("orders", "Ordered")
        .join(Global("customers", "Customer"), on="customerId", take={"city": "city"})
        .by("city", record="OrderedInCity")
    )
    state = City
    orders = Count("OrderedInCity")
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with a model that joins, its schemas, orders and customers."""
    (tmp_path / "schemas").mkdir()
    for name, fields in {"Ordered": ["customerId"], "Customer": ["city"], "OrderedInCity": ["city"]}.items():
        of = [{"name": field, "type": "string"} for field in fields]
        schema = {"type": "record", "name": name, "namespace": "shop", "fields": of}
        (tmp_path / "schemas" / f"{name}.avsc").write_text(json.dumps(schema))
    (tmp_path / "cities.py").write_text(CITIES)
    (tmp_path / "orders.jsonl").write_text("\n".join(f'{{"customerId": "{who}"}}' for who in ("ada", "eve", "bob")))
    (tmp_path / "customers.txt").write_text('ada|{"city": "Oslo"}\nbob|{"city": "Bonn"}\neve|{"city": "x"}\neve|null\n')
    (tmp_path / "joined.jsonl").write_text('{"city": "Oslo"}\n')
    return tmp_path


def of_shop(shop: Path, *given: str) -> subprocess.CompletedProcess[str]:
    return in_child("cities:Cities", *given, cwd=shop)


def test_events_are_joined_with_the_rows_of_a_file(shop: Path) -> None:
    done = of_shop(shop, "--events", "orders.jsonl", "--rows", "customers=customers.txt")

    assert done.returncode == 0, done.stderr
    printed = rows(done.stdout)
    assert printed[0] == ["cities:", "2", "keys"]
    assert printed[3:5] == [["Bonn", "1"], ["Oslo", "1"]]
    assert any(row[:2] == ["2", "join-missing"] and row[-1] == '{"customerId":"eve"}' for row in printed)
    assert done.stdout.endswith("3 events: 2 applied, 1 dead letter\n")
    assert done.stderr == ""


def test_without_rows_the_command_says_how_to_give_them(shop: Path) -> None:
    done = of_shop(shop, "--events", "orders.jsonl")

    assert done.stdout.endswith("3 events: 0 applied, 3 dead letters\n")
    assert done.stderr == "no rows of customers: give them by --rows customers=FILE\n"


def test_with_the_joined_record_the_command_begins_after_the_joins(shop: Path) -> None:
    done = of_shop(shop, "--events", "OrderedInCity=joined.jsonl")

    assert ["Oslo", "1"] in rows(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--rows", "customers"), "--rows customers: give topic and file, such as --rows customers=customers.jsonl"),
        (("--rows", "customers=absent"), "--rows customers=absent: there is no file 'absent'"),
        (("--rows", "people=customers.txt"), "--rows people=customers.txt: cities joins with customers"),
        (("--rows", "customers=joined.jsonl"), "joined.jsonl, line 1: a row needs its key, such as `ada|{…}`"),
        (("--rows", "customers=orders.jsonl"), "orders.jsonl, line 1: 'customerId' is no field of Customer"),
        (
            ("--events", "Other=orders.jsonl"),
            "cities reads no record Other; it reads Ordered, and after its joins OrderedInCity",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_refused(shop: Path, given: tuple[str, ...], why: str) -> None:
    done = of_shop(shop, "--events", "orders.jsonl", *given)

    assert done.returncode != 0
    assert why in done.stderr
