"""Loads the models that BALANCE_MODELS names: shipped ones, entry points, and a user's own modules."""

from __future__ import annotations

import inspect
import re
import sys
from typing import TYPE_CHECKING

# Not only in tests, which unload what they have imported.
import pyspark.sql.functions
import pytest

from balance_service.errors import ConfigurationError
from balance_service.model import loading
from balance_service.model.loading import load_models
from balance_service.read_models.activity import Activity
from balance_service.read_models.balance import Balance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SHIPPED = {"balance": Balance, "activity": Activity}

MODEL = """\
from balance_service.model.stream import Stream
from balance_service.model.folds import RunningSum
from balance_service.model.read_model import ReadModel


class {name}(ReadModel):
    name = "{model}"
    source = Stream("balance", "FundsAdded")
    key = "customerId"
    state = "BalanceState"
    amount = RunningSum("FundsAdded.amount")

"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, whose modules are unloaded after the test."""
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def model(name: str = "Orders", called: str | None = None) -> str:
    return MODEL.format(name=name, model=called or name.lower())


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def loaded(*names: str) -> list[str]:
    return [f"{model.__module__}:{model.__name__}" for model in load_models(names, SHIPPED)]


def refused(*names: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_models(names, SHIPPED)
    message = str(error.value)
    assert message.startswith("BALANCE_MODELS: ")
    assert "\n" not in message
    return message


def test_a_shipped_model_is_loaded_by_its_name() -> None:
    assert load_models(["activity", "balance"], SHIPPED) == [Activity, Balance]


def test_a_module_gives_every_read_model_that_it_defines(folder: Path) -> None:
    imported = "from balance_service.read_models.balance import Balance\n"
    write(folder, {"shop/orders.py": imported + model("Orders") + model("Returns")})

    assert loaded("shop.orders") == ["shop.orders:Orders", "shop.orders:Returns"]


def test_a_package_gives_those_of_its_modules_that_it_imports(folder: Path) -> None:
    imports = "from top.shop.orders import Orders\nfrom top.elsewhere import Returns\n"
    write(
        folder, {"top/shop/__init__.py": imports, "top/shop/orders.py": model(), "top/elsewhere.py": model("Returns")}
    )

    assert loaded("top.shop") == ["top.shop.orders:Orders"]


def test_a_class_is_loaded_by_its_name_even_from_a_module_that_only_imports_it(folder: Path) -> None:
    write(
        folder,
        {"shop/orders.py": model("Orders") + model("Returns"), "shop/all.py": "from shop.orders import Orders\n"},
    )

    assert loaded("shop.orders:Returns") == ["shop.orders:Returns"]
    assert loaded("shop.all:Orders") == ["shop.orders:Orders"]


def test_models_are_loaded_in_the_order_of_their_names_and_each_once(folder: Path) -> None:
    write(folder, {"shop/orders.py": model("Orders") + model("Returns")})

    assert loaded("shop.orders:Returns", "balance", " shop.orders ", "balance") == [
        "shop.orders:Returns",
        "balance_service.read_models.balance:Balance",
        "shop.orders:Orders",
    ]


def test_the_working_directory_comes_last_and_only_while_models_are_loaded(folder: Path) -> None:
    # The second file has the name of a module of Python.
    in_orders = f"import colorsys, sys\npath = [*sys.path]\n{model()}"
    write(folder, {"orders.py": in_orders, "colorsys.py": "raise SystemExit"})
    before = [*sys.path]

    (found,) = load_models(["orders:Orders"], SHIPPED)

    assert sys.modules["orders"].path == [*before, str(folder)]
    assert sys.path == before
    assert inspect.getsourcefile(found) == str(folder / "orders.py")


def test_a_working_directory_that_is_on_the_path_stays_where_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    write(folder, {"orders.py": model()})
    before = [*sys.path]

    assert loaded("orders:Orders") == ["orders:Orders"]
    assert sys.path == before


def test_an_entry_point_is_loaded_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"shop/orders.py": model("Orders") + model("Returns")})
    declare(folder, monkeypatch, "shop", "orders = shop.orders:Orders", "all-of-it = shop.orders")

    assert loaded("orders") == ["shop.orders:Orders"]
    assert loaded("all-of-it") == ["shop.orders:Orders", "shop.orders:Returns"]


def test_an_entry_point_of_two_packages_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(folder, monkeypatch, "shop", "orders = shop.orders:Orders")
    declare(folder, monkeypatch, "store", "orders = store.orders:Orders")

    assert refused("orders") == (
        "BALANCE_MODELS: 'orders' is an entry point of two installed packages, for shop.orders:Orders and for "
        "store.orders:Orders; name one of these instead"
    )


def declare(folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, *points: str) -> None:
    info = folder / "site" / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{loading.ENTRY_POINTS}]", *points]))
    monkeypatch.syspath_prepend(folder / "site")


def test_the_message_for_an_unknown_name_lists_the_known_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(folder, monkeypatch, "shop", "orders = shop.orders:Orders")

    assert refused("balances") == (
        "BALANCE_MODELS: 'balances' is unknown (shipped models: activity, balance; entry points: orders); write the "
        "name of a model of your own as `package.module:Class`"
    )


def test_the_message_for_the_name_of_a_module_says_how_to_name_its_class(folder: Path) -> None:
    write(folder, {"orders.py": model()})

    assert refused("orders").endswith("write the name of a model of your own as `orders:Class`")


@pytest.mark.parametrize("name", ["shop/orders.py", "shop.orders:", "shop..orders", "shop.orders:Orders()", ""])
def test_the_message_for_a_malformed_name_shows_the_right_form(name: str) -> None:
    assert refused(name) == (
        f"BALANCE_MODELS: '{name}' is not the name of a read model; write `package.module:Class`, with dots and "
        "without `.py`"
    )


def test_the_message_for_a_missing_package_names_the_folder_searched(folder: Path) -> None:
    assert refused("shop.orders") == (
        f"BALANCE_MODELS: 'shop.orders' is not found: there is no module shop on sys.path or in {folder}; change to "
        "the folder that contains it, or install its package"
    )


def test_the_message_for_a_missing_module_lists_those_of_its_package(folder: Path) -> None:
    write(folder, {"shop/__init__.py": "", "shop/orders.py": model(), "shop/returns.py": ""})

    found = refused("shop.order:Orders")

    assert found == (
        f"BALANCE_MODELS: 'shop.order:Orders' is not found: there is no order in {folder / 'shop'}, which has orders, "
        "returns"
    )


def test_the_message_for_a_class_after_a_dot_shows_the_colon(folder: Path) -> None:
    write(folder, {"orders.py": model()})

    assert refused("orders.Orders") == (
        f"BALANCE_MODELS: 'orders.Orders' is not found: orders ({folder / 'orders.py'}) is a module, not a package; "
        "write `orders:Class` for a class in it"
    )


def test_the_message_for_a_missing_import_inside_a_module_names_its_line(folder: Path) -> None:
    write(folder, {"shop/orders.py": "\nimport shop.pricing\n"})

    assert refused("shop.orders") == (
        f"BALANCE_MODELS: 'shop.orders' cannot be imported: {folder / 'shop' / 'orders.py'}:2 imports shop.pricing, "
        "which is not installed; install it, or correct the import"
    )


def test_the_message_for_a_module_that_raises_names_the_innermost_line_of_the_users_code(folder: Path) -> None:
    write(folder, {"shop/orders.py": "import shop.rates\n", "shop/rates.py": "import json\n\njson.loads('{')\n"})

    assert refused("shop.orders") == (
        f"BALANCE_MODELS: 'shop.orders' cannot be imported: {folder / 'shop' / 'rates.py'}:3 raises JSONDecodeError: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1); correct the file"
    )


@pytest.mark.parametrize("expression", ['F.col("amount") > 1', 'F.sum("amount")'])
def test_the_message_for_an_expression_of_pyspark_names_transform(
    folder: Path, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another test may have started Spark.
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    write(folder, {"shop/orders.py": f"from pyspark.sql import functions as F\n\nLARGE = {expression}\n"})

    assert refused("shop.orders") == (
        f"BALANCE_MODELS: 'shop.orders' cannot be imported: {folder / 'shop' / 'orders.py'}:3 has an expression of "
        "PySpark, and no Spark runs there: `where` takes `col` of balance_service, and expressions of PySpark belong "
        "in the model's method `transform(self, events: DataFrame) -> DataFrame`"
    )


def test_a_module_that_exits_is_refused(folder: Path) -> None:
    write(folder, {"shop/orders.py": "import sys\nsys.exit()\n"})

    assert refused("shop.orders").endswith("orders.py:2 raises SystemExit; correct the file")


def test_the_message_for_a_syntax_error_names_its_line(folder: Path) -> None:
    write(folder, {"shop/orders.py": "def broken(:\n"})

    found = refused("shop.orders")

    assert f"cannot be imported: {folder / 'shop' / 'orders.py'}:1: " in found


def test_the_message_for_an_invalid_declaration_names_the_line_of_its_class(folder: Path) -> None:
    wrong = model().replace("FundsAdded.amount", "FundsAdded.id")
    write(folder, {"shop/orders.py": wrong})
    (orders,) = load_models(["shop.orders"], SHIPPED)

    with pytest.raises(ConfigurationError) as error:
        orders()

    said = r"the read model Orders \(\S+orders.py:6\) folds FundsAdded.id into 'amount'"
    assert re.match(said, str(error.value))


def test_a_module_without_a_read_model_is_refused(folder: Path) -> None:
    write(folder, {"shop/orders.py": "from balance_service.read_models.balance import Balance\n"})

    assert refused("shop.orders") == (
        f"BALANCE_MODELS: 'shop.orders' defines no read model: {folder / 'shop' / 'orders.py'} has no subclass of "
        "ReadModel; add one, or name the module that has it"
    )


def test_the_message_for_a_missing_class_lists_the_models_of_the_module(folder: Path) -> None:
    write(folder, {"shop/orders.py": model("Orders") + model("Returns")})

    assert refused("shop.orders:Order") == (
        f"BALANCE_MODELS: 'shop.orders:Order' is not found: {folder / 'shop' / 'orders.py'} has no class Order; it "
        "defines Orders, Returns"
    )


@pytest.mark.parametrize(
    ("name", "what"),
    [("Cart", "Cart"), ("LIMIT", "LIMIT, of type int,"), ("ReadModel", "ReadModel")],
)
def test_a_name_of_something_else_than_a_read_model_is_refused(folder: Path, name: str, what: str) -> None:
    write(folder, {"shop/orders.py": f"{model()}class Cart:\n    pass\n\nLIMIT = 3\n"})

    assert refused(f"shop.orders:{name}") == (
        f"BALANCE_MODELS: 'shop.orders:{name}' is not a read model: {what} in {folder / 'shop' / 'orders.py'} "
        "is not a subclass of ReadModel; name another class"
    )


def test_the_message_for_two_models_of_one_name_names_both_places(folder: Path) -> None:
    write(folder, {"shop/orders.py": model("Balance")})

    shipped = f"{inspect.getsourcefile(Balance)}:{inspect.getsourcelines(Balance)[1]}"
    assert refused("balance", "shop.orders") == (
        f"BALANCE_MODELS: Balance ({shipped}) and Balance ({folder / 'shop' / 'orders.py'}:6) both have the name "
        "'balance' and the version 1; rename one of them, give the newer one a higher version, or remove one"
    )


def test_messages_name_the_setting(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^MODEL: 'nothing' is unknown"):
        load_models(["nothing"], SHIPPED, setting="MODEL")
