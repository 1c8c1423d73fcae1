"""Versions of read models: what identifies a declaration, and what an instance does without the class of one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, make_dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import pytest

from balance_service import PER_KEY, Count, Emit, ReadModel, RunningSum, Stream, col, scale
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.model.generations import Comparison, Generations, Switch
from balance_service.model.loading import load_models
from balance_service.model.placing import hosted_stages, newest
from balance_service.model.versions import OTHER_TRANSFORM, Versions, declaration_of, differences
from balance_service.read_models.leaderboard import Leaderboard
from balance_service.read_models.purchases import Purchases
from balance_service.read_models.rewards import Rewards
from balance_service.settings import load_settings
from balance_service.settings.spark import VALUE_SETTINGS
from tests.support.fakes import FakeAnalysis

if TYPE_CHECKING:
    from collections.abc import Mapping

Money = Annotated[Decimal, scale(2)]
FUNDS = Stream("balance", "FundsAdded")


@dataclass
class Funds:
    customerId: str  # noqa: N815
    amount: Money


class Former(ReadModel):
    name = "funds"
    source = FUNDS
    key = "customerId"
    state = Funds
    amount = RunningSum("FundsAdded.amount")


class Newer(Former):
    version = 2

    def view(self, state: Any) -> Any:
        return {"cents": int(state.amount * 100)}

    fields = {"cents": "long"}  # noqa: RUF012


def changed(**attributes: Any) -> ReadModel:
    made: ReadModel = type("Changed", (Former,), attributes)()
    return made


def versions(*models: ReadModel, now: Generations) -> Versions:
    return Versions(models, load_settings(), lambda _model: now)


def begun(model: ReadModel) -> Generations:
    return Generations("funds").begun(declaration_of(model))


UPGRADED = begun(Former()).upgraded(declaration_of(Newer()), Switch.NEVER, 60)
SWITCHED = UPGRADED.compared(2, Comparison()).switched(2, "", "")


@dataclass
class Counted:
    customerId: str  # noqa: N815
    amount: int


@pytest.mark.parametrize(
    "model",
    [
        changed(amount=Count("FundsAdded"), state=Counted),
        changed(source=FUNDS.where(col("amount") > 1)),
        changed(source=FUNDS.select("amount")),
        changed(source=Stream("balance", "FundsAdded", partitioner="crc32")),
        changed(emits=Emit("sums")),
        changed(order=PER_KEY),
    ],
)
def test_a_declaration_that_folds_in_another_way_has_another_fingerprint(model: ReadModel) -> None:
    before, after = declaration_of(Former()), declaration_of(model)

    assert after.fingerprint != before.fingerprint
    assert after.reads == before.reads


def test_a_version_and_code_are_not_in_the_fingerprint() -> None:
    recoded = changed(version=7, view=lambda _self, state: state, fields={})

    assert declaration_of(recoded).fingerprint == declaration_of(Former()).fingerprint
    assert (declaration_of(recoded).version, declaration_of(recoded).own_view) == (7, True)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_fingerprint_is_the_same_in_every_process(seed: str) -> None:
    code = (
        "from balance_service.model.versions import declaration_of as d\n"
        "from balance_service.read_models.rewards import Rewards\n"
        "from balance_service.read_models.leaderboard import Leaderboard\n"
        "print(d(Rewards()).fingerprint, d(Leaderboard()).fingerprint, sep='\\n')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)

    expected = [declaration_of(Rewards()).fingerprint, declaration_of(Leaderboard()).fingerprint]
    # Spark's start says so.
    assert done.stdout.splitlines()[-2:] == expected


@pytest.mark.parametrize(
    "model",
    [
        changed(version=2, source=Stream("other", "FundsAdded")),
        changed(version=2, source=FUNDS.where(col("amount") > 1).by("customerId")),
    ],
)
def test_versions_that_read_or_re_key_differently_cannot_stand_next_to_each_other(model: ReadModel) -> None:
    with pytest.raises(ConfigurationError, match="'funds', version 2, reads another topic, re-keys differently"):
        versions(Former(), model, now=begun(Former()))


def test_an_instance_whose_class_cannot_follow_the_serving_generation_does_not_start() -> None:
    moved = versions(changed(version=2, source=Stream("other", "FundsAdded")), now=begun(Former()))

    with pytest.raises(ConfigurationError, match="than version 1, which has states"):
        moved.check_serving()
    versions(Newer(), now=begun(Former())).check_serving()


@pytest.mark.shows("versions")
def test_a_class_that_cannot_read_the_states_of_its_version_is_refused_with_field_and_types() -> None:
    other: type[Any] = make_dataclass("Funds", [("customerId", str), ("amount", int)])
    folds = {"amount": Count("FundsAdded"), "state": other}

    with pytest.raises(ConfigurationError) as refused:
        versions(changed(**folds), now=begun(Former())).check_serving()
    said = str(refused.value)
    assert "the read model 'funds', version 1, cannot read the states of its generation 1" in said
    assert "'amount' is a decimal(38,2) there and a long here; give the class the next `version`" in said

    # Another version is built next to the one that serves, and the one that is built does not refuse a start.
    versions(changed(**folds, version=2), now=begun(Former())).check_serving()
    versions(Former(), changed(**folds, version=2), now=UPGRADED).check_serving()


def test_each_generation_is_folded_by_the_class_of_its_version() -> None:
    former, newer = Former(), Newer()
    both = versions(newer, former, now=UPGRADED)

    assert [both.read_model(stage) for stage in both.live("funds")] == [former, newer]
    assert [stage.name for stage in both.live("funds")] == ["funds", "funds.g2"]
    assert [both.why_still(stage) for stage in both.live("funds")] == ["", ""]
    assert (both.of("funds"), both.declaration("funds").version) == ((1, 2), 2)


def test_a_generation_that_is_built_by_an_unknown_version_is_left_alone() -> None:
    old = versions(Former(), now=UPGRADED)

    assert [stage.name for stage in old.live("funds")] == ["funds"]


@pytest.mark.parametrize(
    ("model", "now", "still"),
    [
        (Newer(), UPGRADED, "funds"),
        (Newer(), SWITCHED, "funds"),
        (Former(), SWITCHED, "funds.g2"),
    ],
)
def test_without_its_class_a_generation_that_serves_or_served_stands_still(
    model: ReadModel, now: Generations, still: str
) -> None:
    here = versions(model, now=now)
    reasons = {stage.name: here.why_still(stage) for stage in here.live("funds")}

    assert reasons.keys() == {"funds", "funds.g2"}
    assert [name for name, reason in reasons.items() if reason] == [still]
    assert f"BALANCE_MODELS has only {model.version} here, so its answers stand still" in reasons[still]


def test_answers_that_stand_still_are_those_of_the_version_that_folded_them() -> None:
    state: Mapping[str, Any] = {"customerId": "ada", "amount": Decimal("5.10")}
    here = versions(Newer(), now=UPGRADED)
    standing = here.read_model(here.live("funds")[0])

    assert standing is not None
    assert standing.view_of(state) == Former().view_of(state) == {"amount": Decimal("5.10")}
    assert (standing.name, standing.version, standing.key) == ("funds", 1, "customerId")
    assert standing.field_types == Former().field_types
    assert standing.description() == Former().description()
    assert (standing.state_schema, standing.outputs) == (Former().state_schema, ())


def test_a_version_that_computes_its_answers_needs_its_class_to_answer() -> None:
    here = versions(Former(), now=SWITCHED)
    (standing,) = [here.read_model(stage) for stage in here.live("funds") if here.why_still(stage)]

    assert standing is not None
    with pytest.raises(RetriableError, match="version 2 of 'funds' computes its answers"):
        standing.view_of({"customerId": "ada", "amount": Decimal(1)})


def test_a_declaration_that_changed_under_its_version_is_noticed() -> None:
    same, other = versions(Former(), now=UPGRADED), versions(changed(emits=Emit("sums")), now=UPGRADED)

    assert (same.has_changed("funds", 1), other.has_changed("funds", 1)) == (False, True)
    # Its class is not here.
    assert not same.has_changed("funds", 2)


def transformed(monkeypatch: pytest.MonkeyPatch, fingerprint: str) -> ReadModel:
    FakeAnalysis.take_place(monkeypatch, fingerprint)
    return changed(transform=lambda _self, events: events, amount=RunningSum("amount"))


def test_a_generation_that_another_transform_began_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    former, other = transformed(monkeypatch, "amount * 2"), transformed(monkeypatch, "amount * 3")
    now = begun(former)

    for model, stands_still in ((former, False), (other, True)):
        here = versions(model, now=now)
        here.check_serving()
        (stage,) = here.live("funds")
        assert here.read_model(stage) is model
        assert (OTHER_TRANSFORM in here.why_still(stage)) is stands_still
    # A rebuild begins a generation by the declaration that is here.
    assert versions(other, now=begun(other)).why_still(stage) == ""
    # What Python code computes has no fingerprint.
    (folded,) = versions(changed(emits=Emit("sums")), now=begun(Former())).live("funds")
    assert versions(changed(emits=Emit("sums")), now=begun(Former())).why_still(folded) == ""


ANSI = "spark.sql.ansi.enabled"


def test_a_setting_of_spark_that_a_release_adds_stops_no_generation_and_a_changed_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = transformed(monkeypatch, "amount * 2")
    now = begun(model)
    stage = versions(model, now=now).live("funds")[0]
    with monkeypatch.context() as release:
        release.setattr("balance_service.model.versions.VALUE_SETTINGS", {**VALUE_SETTINGS, "spark.sql.new": "default"})
        assert versions(model, now=now).why_still(stage) == ""
        release.setattr("balance_service.model.versions.VALUE_SETTINGS", {**VALUE_SETTINGS, ANSI: "false"})
        told = versions(model, now=now).why_still(stage)
        # A rebuild begins a generation with what is here.
        assert versions(model, now=begun(model)).why_still(stage) == ""

    assert f"What differs: Spark's {ANSI}, which was true and is false. Give back" in told


def test_what_differs_between_two_declarations_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    former, other = transformed(monkeypatch, "amount * 2"), transformed(monkeypatch, "amount * 3")
    more = changed(emits=Emit("sums"))

    assert differences(declaration_of(former), declaration_of(other)) == ["its `transform`"]
    assert differences(declaration_of(Former()), declaration_of(more)) == ["its outputs"]


def test_a_model_without_states_has_no_generations() -> None:
    here = versions(Purchases(), now=Generations("purchases"))

    assert here.with_states == []
    assert here.read_model(Purchases().stages[-1]) is not None


def test_the_newest_version_is_served_and_two_of_one_version_are_refused() -> None:
    again = changed()

    assert newest([Former(), Newer()])[0].version == newest([Newer(), Former()])[0].version == 2
    assert len(hosted_stages([Former(), Newer()], load_settings())) == 1
    with pytest.raises(ConfigurationError, match="both have the name 'funds' and the version 1"):
        hosted_stages([Former(), again], load_settings())
    with pytest.raises(ConfigurationError, match="rename one of them, give the newer one a higher version"):
        load_models(["a", "b"], {"a": Former, "b": type(again)})
    assert load_models(["a", "b"], {"a": Former, "b": Newer}) == [Former, Newer]


@pytest.mark.parametrize("version", [0, -1, True, "2", 2**31])
def test_a_version_is_a_whole_number_from_one(version: Any) -> None:
    with pytest.raises(ConfigurationError, match="it must be a whole number from 1 to 2147483647"):
        changed(version=version)
