"""The generations of a read model: each transition, each refusal, and what holds after any number of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.avro.codec import AvroCodec
from balance_service.avro.rules import DECODER_RULES
from balance_service.avro.schemas import fields_of, load_schema
from balance_service.errors import InvalidInputError
from balance_service.model.generations import Building, Comparison, Declaration, Generations, Switch
from balance_service.model.stage import generation_name, model_and_generation
from tests.support.fakes import DECLARED, FakeRegistry

if TYPE_CHECKING:
    from collections.abc import Callable

EQUAL = Comparison(equal=3)
UNEQUAL = [Comparison(3, different=1), Comparison(3, only_serving=1), Comparison(3, only_building=1)]
CODEC = AvroCodec(FakeRegistry(), "generations", load_schema("Generations"))


NEXT = replace(DECLARED, version=2, fingerprint="another")


def first() -> Generations:
    return Generations("balance").begun(DECLARED)


def built(switch: Switch = Switch.NEVER, keep_old_seconds: int = 60) -> Generations:
    return first().rebuilt(DECLARED, switch, keep_old_seconds, 500, "alice", "states were lost")


def ready(comparison: Comparison = EQUAL) -> Generations:
    return built().compared(2, comparison)


def switched() -> Generations:
    return ready().switched(2, "alice", "it is right")


def told(generations: Generations) -> tuple[int, str, str, str]:
    return generations.number, generations.action, generations.by, generations.reason


def refusal(transition: Callable[[], Generations]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        transition()
    return str(caught.value)


def test_a_read_model_without_a_record_serves_its_first_generation() -> None:
    now = Generations("balance")

    assert (now.number, now.serving, now.live) == (0, 1, [1])


def test_the_first_record_says_what_the_first_generation_is_folded_by() -> None:
    now = first()

    assert (now.declarations, now.newest_version, now.live) == ({1: DECLARED}, 1, [1])
    assert now.begun(NEXT) is now


def test_a_generation_of_a_higher_version_is_built_once() -> None:
    after = first().upgraded(NEXT, Switch.ALWAYS, 60)

    assert after.declarations == {1: DECLARED, 2: NEXT}
    assert after.building == Building(2, Switch.ALWAYS, 60)
    assert after.upgraded(NEXT, Switch.ALWAYS, 60) is after
    # An operator has dropped it, so it is not begun again by itself.
    dropped = after.dropped(2, "alice", "its fold is wrong")
    assert dropped.upgraded(NEXT, Switch.ALWAYS, 60) is dropped


@pytest.mark.parametrize("live", [built(), ready(), switched()])
def test_no_other_version_is_built_while_two_generations_live(live: Generations) -> None:
    assert live.upgraded(NEXT, Switch.ALWAYS, 60) is live


@pytest.mark.parametrize(
    ("declaration", "switch"),
    [(DECLARED, Switch.WHEN_EQUAL), (replace(DECLARED, fingerprint="x"), Switch.WHEN_EQUAL), (NEXT, Switch.NEVER)],
)
def test_a_rebuild_serves_by_itself_only_in_the_same_version(declaration: Declaration, switch: Switch) -> None:
    after = first().rebuilt(declaration, None, 60, None, "", "")

    assert after.building is not None
    assert after.building.switch is switch


def test_a_declaration_lives_as_long_as_its_generation() -> None:
    upgraded = first().upgraded(NEXT, Switch.NEVER, 60).compared(2, EQUAL).switched(2, "", "")

    assert upgraded.declarations == {1: DECLARED, 2: NEXT}
    assert upgraded.settled().dropped(1, "", "").declarations == {2: NEXT}


def test_a_record_says_where_the_history_of_each_generation_begins() -> None:
    after = first().rebuilt(replace(DECLARED, begins=(0, 500)), None, 60, None, "", "")

    read = Generations.of(CODEC.decode(CODEC.encode(after.record())), model="balance")

    assert {number: declared.begins for number, declared in read.declarations.items()} == {1: (), 2: (0, 500)}


def test_an_offline_rebuild_is_a_new_generation_that_serves_at_once() -> None:
    after = first().replaced(NEXT)

    # Dead letters of one declaration wait on.
    assert (after.declarations, after.newest_version, after.live) == ({1: DECLARED, 2: NEXT}, 2, [2])
    assert after.settled().declarations == {2: NEXT}
    assert (after.serving, after.serving_since, after.is_settled) == (2, after.number, False)
    assert after.upgraded(NEXT, Switch.ALWAYS, 60) is after
    assert (after.action, after.refusal(first())) == ("rebuild offline", "")


def test_an_offline_rebuild_replaces_all_generations_whose_changelogs_are_kept_until_it_has_taken_over() -> None:
    twice = first().replaced(DECLARED).replaced(DECLARED)

    for before, former in ((built(), (1, 2)), (ready(), (1, 2)), (switched().settled(), (1, 2)), (twice, (1, 2, 3))):
        after = before.replaced(DECLARED)

        # No number is used twice.
        assert after.newest == after.serving == before.newest + 1
        assert (after.live, after.former, after.writable) == ([after.serving], former, [*former, after.serving])
        assert (after.building, after.comparison, after.kept, after.kept_until) == (None, None, None, None)
        assert after.settled().declarations == {after.serving: DECLARED}
        assert after.refusal(before) == ""
        settled = after.settled()
        assert (settled.former, settled.writable, settled.is_settled) == ((), [after.serving], True)


def test_an_offline_rebuild_says_which_command_did_it() -> None:
    assert told(first().replaced(DECLARED)) == (2, "rebuild offline", "balance-service rebuild --offline", "")


def test_a_rebuild_within_an_offline_rebuild_forgets_none_of_the_generations_that_this_one_replaced() -> None:
    after = first().replaced(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, None, "", "")

    assert (after.live, after.former, after.writable) == ([2, 3], (1,), [1, 2, 3])


def test_a_generation_serves_since_the_record_that_says_so_and_not_since_a_later_one() -> None:
    forth = switched()
    back = forth.settled().switched(1, "", "")

    assert [before.serving_since for before in (first(), built(), ready())] == [0, 0, 0]
    assert (forth.serving_since, forth.settled().serving_since) == (forth.number, forth.number)
    assert (back.serving_since, back.settled().dropped(2, "", "").serving_since) == (back.number, back.number)


def test_a_rebuild_begins_a_generation_next_to_the_serving_one() -> None:
    after = built(Switch.WHEN_EQUAL)

    assert after.building == Building(2, Switch.WHEN_EQUAL, 60, 500)
    assert (after.serving, after.newest, after.live) == (1, 2, [1, 2])
    assert told(after) == (2, "rebuild", "alice", "states were lost")


@pytest.mark.parametrize("before", [built(), ready()], ids=["is built", "has caught up"])
def test_a_second_rebuild_is_refused_while_a_generation_is_built(before: Generations) -> None:
    why = refusal(lambda: before.rebuilt(DECLARED, Switch.NEVER, 1, None, "", ""))

    assert why == "generation 2 of 'balance' is being built: wait for it, or drop it first"


def test_a_rebuild_is_refused_while_the_former_generation_is_kept() -> None:
    why = refusal(lambda: switched().rebuilt(DECLARED, Switch.NEVER, 1, None, "", ""))

    assert why == "generation 1 of 'balance' is still kept after a switch: drop it first"


@pytest.mark.parametrize("comparison", [EQUAL, *UNEQUAL], ids=str)
@pytest.mark.parametrize("switch", Switch)
def test_a_generation_that_has_caught_up_serves_by_itself_as_its_rebuild_said(
    switch: Switch, comparison: Comparison
) -> None:
    after = built(switch).compared(2, comparison)

    serves = switch is Switch.ALWAYS or (switch is Switch.WHEN_EQUAL and comparison == EQUAL)
    assert (after.serving, after.kept, after.building is None) == ((2, 1, True) if serves else (1, None, False))
    assert after.live == [1, 2]
    assert after.comparison == comparison
    # No operator decided it.
    why = {
        Switch.ALWAYS: "it has caught up, and was to serve then in any case",
        Switch.WHEN_EQUAL: "it has caught up, and all states are equal",
    }
    assert told(after) == (3, "switch", "", why[switch]) if serves else (3, "compare", "", "")


def test_what_the_service_does_by_itself_says_why() -> None:
    settled = switched().settled()

    assert told(first()) == (1, "begin", "", "it is hosted for the first time")
    assert told(settled) == (5, "settle", "", "generation 2 has taken over all partitions")


@pytest.mark.parametrize("switch", Switch)
def test_a_generation_that_must_not_serve_by_itself_is_compared_and_says_why(switch: Switch) -> None:
    after = built(switch).compared(2, EQUAL, why_not="its first events are gone")

    assert (after.serving, after.comparison, after.status_of(2)) == (1, EQUAL, "ready")
    assert told(after) == (3, "compare", "", "" if switch is Switch.NEVER else "its first events are gone")
    assert after.switched(2, "alice", "it is right").serving == 2


def test_a_comparison_is_refused_if_nothing_is_built() -> None:
    dropped = built().dropped(2, "alice", "")

    for before in (first(), switched(), dropped):
        assert refusal(partial(before.compared, 2, EQUAL)) == "generation 2 of 'balance' is not being built"


@pytest.mark.parametrize("to", [2, None])
@pytest.mark.parametrize("comparison", [EQUAL, *UNEQUAL], ids=str)
def test_an_operator_switches_to_a_generation_that_has_caught_up_whatever_its_states(
    comparison: Comparison, to: int | None
) -> None:
    before = datetime.now(UTC)
    after = ready(comparison).switched(to, "alice", "it is right")

    assert (after.serving, after.building, after.kept, after.newest) == (2, None, 1, 2)
    assert after.comparison == comparison
    assert after.kept_until is not None
    assert before <= after.kept_until - timedelta(seconds=60) <= datetime.now(UTC)
    assert told(after) == (4, "switch", "alice", "it is right")


@pytest.mark.parametrize(("begun_at", "now", "begins"), [((), {0: 5, 1: 0}, (5, 0)), ((7, 7), {0: 5, 1: 9}, (7, 9))])
def test_a_generation_that_is_compared_has_at_most_what_the_source_has_then(
    begun_at: tuple[int, ...], now: dict[int, int], begins: tuple[int, ...]
) -> None:
    before = first().rebuilt(replace(DECLARED, begins=begun_at), Switch.NEVER, 60, None, "", "")

    assert before.compared(2, EQUAL, now).declarations[2].begins == begins


@pytest.mark.parametrize("to", [1, None])
def test_an_operator_switches_back_as_long_as_the_former_generation_is_kept(to: int | None) -> None:
    forth = switched()
    back = forth.switched(to, "bob", "it was wrong")
    again = back.switched(None, "bob", "it was right")

    assert (back.serving, back.kept) == (1, 2)
    assert (again.serving, again.kept) == (2, 1)
    assert (told(back), told(again)) == (
        (5, "switch", "bob", "it was wrong"),
        (6, "switch", "bob", "it was right"),
    )


def test_the_time_of_the_kept_generation_begins_again_with_each_switch() -> None:
    late = datetime.now(UTC) - timedelta(seconds=59)
    forth = replace(switched(), kept_until=late)

    for after in (forth.switched(1, "", ""), replace(forth.switched(1, "", ""), kept_until=late).switched(2, "", "")):
        assert after.kept_until is not None
        assert timedelta(seconds=50) < after.kept_until - datetime.now(UTC) <= timedelta(seconds=60)


@pytest.mark.parametrize(
    ("before", "to", "why"),
    [
        (first(), None, "'balance' has no other generation than 1"),
        (first(), 1, "generation 1 of 'balance' serves already"),
        (first(), 2, "'balance' has no generation 2 now"),
        (ready(), 1, "generation 1 of 'balance' serves already"),
        (ready(), 3, "'balance' has no generation 3 now"),
        (switched(), 2, "generation 2 of 'balance' serves already"),
        (switched(), 3, "'balance' has no generation 3 now"),
        (switched().settled().dropped(1, "", ""), 1, "'balance' has no generation 1 now"),
        (switched().settled().dropped(1, "", ""), None, "'balance' has no other generation than 2"),
    ],
)
def test_a_switch_to_a_generation_that_is_not_there_or_serves_is_refused(
    before: Generations, to: int | None, why: str
) -> None:
    assert refusal(lambda: before.switched(to, "", "")) == why


@pytest.mark.parametrize("before", [built(), ready()], ids=["is built", "has caught up"])
def test_a_rebuild_is_cancelled_by_dropping_its_generation(before: Generations) -> None:
    after = before.dropped(2, "alice", "not needed")

    assert (after.serving, after.building, after.kept, after.live) == (1, None, None, [1])
    assert told(after) == (before.number + 1, "drop", "alice", "not needed")


def test_a_kept_generation_is_dropped_with_its_time() -> None:
    after = switched().settled().dropped(1, "alice", "not needed")

    assert (after.serving, after.kept, after.kept_until, after.live) == (2, None, None, [2])
    assert told(after) == (6, "drop", "alice", "not needed")


@pytest.mark.parametrize("unsettled", [switched(), switched().settled().switched(1, "", "")])
def test_a_kept_generation_is_not_dropped_before_the_other_one_sends_all_outputs(unsettled: Generations) -> None:
    assert unsettled.kept is not None

    assert "has not taken over all partitions from" in refusal(lambda: unsettled.dropped(unsettled.kept or 0, "", ""))


@pytest.mark.parametrize(
    ("before", "generation", "why"),
    [
        (first(), 1, "generation 1 of 'balance' serves: switch to another one first"),
        (ready(), 1, "generation 1 of 'balance' serves: switch to another one first"),
        (switched(), 2, "generation 2 of 'balance' serves: switch to another one first"),
        (first(), 2, "'balance' has no generation 2 now"),
        (ready(), 3, "'balance' has no generation 3 now"),
        (switched(), 3, "'balance' has no generation 3 now"),
        (built().dropped(2, "", ""), 2, "'balance' has no generation 2 now"),
    ],
)
def test_a_generation_that_serves_or_is_not_there_cannot_be_dropped(
    before: Generations, generation: int, why: str
) -> None:
    assert refusal(lambda: before.dropped(generation, "", "")) == why


@pytest.mark.parametrize("drops", [built().dropped(2, "", ""), switched().settled().dropped(1, "", "")])
def test_the_number_of_a_dropped_generation_is_not_used_again(drops: Generations) -> None:
    after = drops.rebuilt(DECLARED, Switch.NEVER, 1, None, "", "")

    assert after.building is not None
    assert after.building.generation == 3


_GENERATION = st.integers(1, 6)
_COMPARISON = st.sampled_from([EQUAL, *UNEQUAL])
_STEPS: st.SearchStrategy[Callable[[Generations], Generations]] = st.one_of(
    st.sampled_from(Switch).map(
        lambda switch: lambda now: now.rebuilt(DECLARED, switch, 5, 7 if now.newest % 2 else None, "a", "r")
    ),
    _COMPARISON.map(lambda comparison: lambda now: now.compared(2, comparison)),
    st.just(lambda now: now.settled()),
    st.just(lambda now: now.replaced(DECLARED)),
    st.one_of(st.none(), _GENERATION).map(lambda to: lambda now: now.switched(to, "a", "r")),
    _GENERATION.map(lambda number: lambda now: now.dropped(number, "a", "r")),
)


@given(st.lists(_STEPS, max_size=30))
def test_after_any_requests_numbers_have_only_grown_and_one_generation_serves(
    steps: list[Callable[[Generations], Generations]],
) -> None:
    now, begun = first(), {1}
    for step in steps:
        try:
            after = step(now)
        except InvalidInputError:
            continue
        assert after.number > now.number
        assert after.newest - now.newest in (0, 1)
        assert after.model == "balance"
        new = set(after.live) - set(now.live)
        assert not new & begun
        begun |= new
        assert after.serving in after.live
        assert len(after.live) <= 2
        assert (after.kept is None) == (after.kept_until is None)
        # Two generations were compared, or the newer one is still built. One alone is compared with none.
        assert after.comparison is None or len(after.live) == 2
        assert max(after.live) <= after.newest == max(begun)
        # A generation begins to serve only if it was built, or has served before.
        was_built = now.building is not None and now.building.generation == after.serving
        is_replaced = after.action == "rebuild offline"
        assert after.serving in (now.serving, now.kept) or was_built or is_replaced
        assert after.refusal(now) == ""
        assert after.serving_since == (now.serving_since if after.serving == now.serving else after.number)
        # A changelog that says what was sent exists until another generation has taken that over, or it was dropped.
        assert after.action in ("settle", "drop") or {*now.writable} <= {*after.writable}
        assert after.action == "rebuild offline" or not after.is_settled or not {*after.former} - {*now.former}
        now = after


@given(st.lists(_STEPS, max_size=12))
def test_a_record_keeps_everything(steps: list[Callable[[Generations], Generations]]) -> None:
    now = first()
    for step in steps:
        try:
            now = step(now)
        except InvalidInputError:
            continue

    read = Generations.of(CODEC.decode(CODEC.encode(now.record())), model="balance")

    assert read == now


_COUNTS = st.builds(Comparison, *[st.integers(0, 2)] * 4)


@given(_COUNTS, _COUNTS)
def test_comparisons_add_up_kind_by_kind(one: Comparison, other: Comparison) -> None:
    total = one + other

    assert total.record() == {name: count + other.record()[name] for name, count in one.record().items()}
    assert Comparison.of(total.record()) == total
    assert total.is_equal == (one.is_equal and other.is_equal)


@given(st.from_regex(r"[a-z][a-z0-9-]{0,20}", fullmatch=True), st.integers(1, 999_999_999))
def test_the_name_of_a_stage_says_its_read_model_and_generation(model: str, number: int) -> None:
    assert model_and_generation(generation_name(model, number)) == (model, number)
    assert generation_name(model, 1) == model


@pytest.mark.parametrize("name", ["balance", "a.g", "a.gx", "a.by-card", "app.goods", "a.g1234567890", ".g2"])
def test_a_name_that_is_no_generations_is_that_of_a_first_one(name: str) -> None:
    assert model_and_generation(name) == (name, 1)


def test_a_generation_whose_record_has_no_number_began_under_the_first_rules() -> None:
    older = copy.deepcopy(load_schema("Generations"))
    declared = fields_of(older)["declarations"]["items"]
    declared["fields"] = [field for field in declared["fields"] if field["name"] != "decoderRules"]
    registry = FakeRegistry()
    record = first().record()
    del record["declarations"][0]["decoderRules"]
    frame = AvroCodec(registry, "s", older).encode(record)

    read = Generations.of(AvroCodec(registry, "s", load_schema("Generations")).decode(frame), model="balance")

    assert (read.declarations[1].decoder_rules, DECLARED.decoder_rules) == (1, DECODER_RULES)


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (lambda now: replace(now, number=now.number), "its number is 5, and 6 is next"),
        (lambda now: replace(now, number=now.number + 2), "its number is 7, and 6 is next"),
        (lambda now: replace(now, number=now.number + 1, serving=9), "generation 9 serves in it, which was not live"),
        (lambda now: replace(now, number=now.number + 1, newest=2**31 - 1), "generation 2147483647 is its newest"),
        (lambda now: replace(now, number=now.number + 1, newest=1), "generation 1 is its newest, and 2 was before"),
        (lambda now: replace(now.replaced(DECLARED), former=(2,)), "generation 3 serves in it, which was not live"),
        (lambda now: replace(now.replaced(DECLARED), newest=4, serving=4), "generation 4 serves in it, which was not"),
    ],
)
def test_a_state_that_no_transition_leads_to_is_refused(
    forged: Callable[[Generations], Generations], reason: str
) -> None:
    now = replace(switched(), number=5)

    assert forged(now).refusal(now).startswith(reason)
