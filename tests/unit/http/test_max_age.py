"""Queries with maxAge: any copy answers that is young enough, and no old copy says that a key has no state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.records import Role
from balance_service.http.peers.trust import FORWARDED_HEADER
from tests.support.querying import END, PARTITION, Instance, Peer, answering, ask, ask_with_peers

if TYPE_CHECKING:
    from pathlib import Path

FORWARDED = {FORWARDED_HEADER: "peer:1"}


@pytest.fixture
def owner(tmp_path: Path) -> Instance:
    """An owner that had applied all events when the end was read last, 10 s ago; its lease has expired since."""
    instance = Instance(tmp_path / "store")
    instance.put("12.34")
    instance.move_to(END)
    instance.clock.now += 10
    instance.lease.revoke()
    return instance


@pytest.mark.shows("max-age")
def test_without_a_broker_a_copy_answers_that_is_young_enough_and_says_how_old_it_is(owner: Instance) -> None:
    assert ask(owner).status == 503

    answer = ask(owner, maxAge="10")

    assert (answer.status, answer.text) == (200, '{"amount":12.34}')
    assert answer.headers["Balance-Age"] == "10.0"
    assert answer.headers["Balance-Role"] == "standby"
    assert answer.headers["Balance-Position"] == f"{PARTITION}:{END}"
    assert answer.headers["Balance-Generation"] == "1"


@pytest.mark.shows("max-age")
def test_a_copy_that_is_too_old_does_not_answer_and_says_how_old_it_is(owner: Instance) -> None:
    for headers in ({}, FORWARDED):
        refused = ask(owner, headers=headers, maxAge="9.9")
        assert (refused.status, "10.0 s old, and maxAge is 9.9" in refused.detail) == (503, True)


@pytest.mark.shows("max-age")
def test_a_copy_behind_the_end_is_as_old_as_the_last_reading_of_an_end_that_it_has_reached(owner: Instance) -> None:
    ends = {PARTITION: END}
    owner.watermarks._read = lambda: ends
    owner.watermarks.refresh()
    owner.clock.now += 2
    ends = {PARTITION: END + 1}
    owner.watermarks.refresh()
    owner.clock.now += 5

    assert ask(owner, maxAge="7").headers["Balance-Age"] == "7.0"
    assert ask(owner, maxAge="6.9").status == 503


@pytest.mark.shows("max-age")
def test_a_copy_that_was_behind_whenever_the_end_was_read_has_no_age(owner: Instance) -> None:
    owner.move_to(END - 1)

    refused = ask(owner, maxAge="1000000")

    assert (refused.status, "of unknown age" in refused.detail) == (503, True)


@pytest.mark.shows("max-age")
def test_an_old_copy_does_not_say_that_there_is_no_such_key(tmp_path: Path) -> None:
    instance = Instance(tmp_path / "empty")
    instance.move_to(END)

    assert ask(instance, maxAge="10").status == 404, "the owner knows"
    instance.lease.revoke()
    for headers in ({}, FORWARDED):
        refused = ask(instance, headers=headers, maxAge="10")
        assert (refused.status, "a newer copy may have it" in refused.detail) == (503, True)


@pytest.mark.shows("max-age")
def test_a_copy_without_the_key_asks_the_owner(tmp_path: Path) -> None:
    standby, owner = Instance(tmp_path / "empty", role=Role.STANDBY), Peer(answering())
    standby.move_to(END)

    answer = ask_with_peers(standby, owner, owns=True, maxAge="10")

    assert (answer.status, answer.headers["Balance-Role"]) == (200, "active")
    assert owner.asked[0].query["maxAge"] == "10.000"


@pytest.mark.shows("max-age")
def test_a_closed_task_leaves_its_last_state_to_queries_that_take_an_old_one(owner: Instance) -> None:
    owner.is_closed = True

    assert ask(owner, maxAge="10").text == '{"amount":12.34}'
    assert ask(owner, maxLag="1000000").status == 503
    assert ask(owner).status == 503


@pytest.mark.shows("max-age")
@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize(("parameters", "is_asked"), [({"maxAge": "60"}, True), ({"maxLag": "60"}, False)])
def test_only_a_query_for_an_old_state_asks_silent_peers_and_those_without_a_task(
    tmp_path: Path, parameters: dict[str, Any], *, is_asked: bool, is_silent: bool
) -> None:
    asker, other = Instance(tmp_path / "store"), Peer(answering(headers={"Balance-Role": "standby"}))

    def heard_before(addresses: list[str]) -> None:
        if is_silent:
            asker.hear_of_owner(addresses[0])
            asker.clock.now += 60
        else:
            asker.hear_of_host(addresses[0])

    answer = ask_with_peers(asker, other, before=heard_before, owns=False, **parameters)

    assert bool(other.asked) == is_asked
    assert answer.status == (200 if is_asked else 503)


@pytest.mark.shows("max-age")
def test_the_refusal_of_a_copy_is_answered_and_not_that_of_a_peer_without_one(tmp_path: Path) -> None:
    asker = Instance(tmp_path / "store")
    too_old = Peer(answering(503, '{"detail":"40 s old"}'))
    without = Peer(answering(421, '{"detail":"not here"}'))

    def heard_before(addresses: list[str]) -> None:
        asker.hear_of_owner(addresses[0])
        asker.hear_of_host(addresses[1])

    answer = ask_with_peers(asker, too_old, without, before=heard_before, owns=False, maxAge="10")

    assert (answer.status, answer.text, bool(without.asked)) == (503, '{"detail":"40 s old"}', True)


@pytest.mark.shows("max-age")
def test_a_silent_peer_that_did_not_answer_is_asked_after_all_others(tmp_path: Path) -> None:
    asker = Instance(tmp_path / "store")
    asker.hear_of_owner("dead:1")
    asker.hear_of_standby("alive:1")
    asker.clock.now += 60
    routing = asker.routing

    def asked() -> list[str]:
        peers = routing.candidates(PARTITION, takes_standbys=True, takes_suspects=True)
        return [peer.address for peer in peers]

    assert asked() == ["dead:1", "alive:1"]
    routing.doubt(PARTITION, routing.candidates(PARTITION, takes_standbys=True, takes_suspects=True)[0])
    assert asked() == ["alive:1", "dead:1"]


@pytest.mark.shows("max-age")
def test_a_copy_that_is_no_more_folded_does_not_wait_for_a_position(owner: Instance) -> None:
    owner.is_closed = True

    refused = ask(owner, headers=FORWARDED, maxAge="10", minPosition=f"{PARTITION}:{END + 1}")

    assert (refused.status, f"at offset {END}, and minPosition is {END + 1}" in refused.detail) == (503, True)
    assert refused.seconds < 1


@pytest.mark.shows("max-age")
def test_both_bounds_hold(owner: Instance) -> None:
    assert ask(owner, maxAge="10", maxLag="0").status == 503


@pytest.mark.shows("max-age")
@pytest.mark.parametrize("text", ["", "-1", "1e3", "ten", "0.", ".5"])
def test_a_malformed_age_is_a_400(owner: Instance, text: str) -> None:
    assert ask(owner, maxAge=text).status == 400
