"""Queries with minPosition or maxLag: standbys may answer them, with their role, and never too stale."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.engine.records import Role
from balance_service.http.peers.trust import FORWARDED_HEADER
from tests.support.querying import (
    BUSY_SECONDS,
    END,
    EPOCH,
    PARTITION,
    TIMEOUT_SECONDS,
    Instance,
    Peer,
    answering,
    ask,
    ask_with_peers,
)

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp import web

FORWARDED = {FORWARDED_HEADER: "peer:1"}


@pytest.fixture
def standby(tmp_path: Path) -> Instance:
    instance = Instance(tmp_path / "store", role=Role.STANDBY)
    instance.put("12.34")
    instance.move_to(END - 7)
    return instance


@pytest.fixture
def owner(tmp_path: Path) -> Instance:
    instance = Instance(tmp_path / "owner")
    instance.put("12.34")
    instance.move_to(END - 7)
    return instance


def test_a_standby_answers_only_queries_that_allow_it(standby: Instance) -> None:
    assert ask(standby).status == 503
    assert ask(standby, headers=FORWARDED).status == 421


@pytest.mark.shows("max-lag")
def test_a_standby_answers_within_max_lag_and_names_its_role(standby: Instance) -> None:
    answer = ask(standby, maxLag="7")

    assert (answer.status, answer.text) == (200, '{"amount":12.34}')
    assert {name: value for name, value in answer.headers.items() if name.startswith("Balance-")} == {
        "Balance-Application-Server": "asker:1",
        "Balance-Role": "standby",
        "Balance-Position": f"{PARTITION}:{END - 7}",
        "Balance-Epoch": str(EPOCH),
        "Balance-Generation": "1",
        "Balance-Lag": "7",
    }


@pytest.mark.shows("max-lag")
def test_a_standby_beyond_max_lag_does_not_answer(standby: Instance) -> None:
    assert ask(standby, maxLag="6").status == 503
    refused = ask(standby, headers=FORWARDED, maxLag="6")
    assert (refused.status, "7 records behind" in refused.detail) == (503, True)


def test_an_owner_beyond_max_lag_does_not_answer(owner: Instance) -> None:
    refused = ask(owner, maxLag="6")

    assert (refused.status, "7 records behind" in refused.detail) == (503, True)
    assert ask(owner, maxLag="7").headers["Balance-Role"] == "active"


@pytest.mark.shows("max-lag")
@pytest.mark.parametrize("role", [Role.ACTIVE, Role.STANDBY])
def test_with_a_stale_watermark_no_lag_is_within_max_lag(standby: Instance, role: Role) -> None:
    standby.role = role
    standby.clock.now += 3.1

    assert ask(standby, maxLag="1000000").status == 503


def test_an_owner_whose_lease_has_expired_answers_as_a_standby(owner: Instance) -> None:
    owner.lease.revoke()

    assert ask(owner).status == 503
    assert ask(owner, maxLag="7").headers["Balance-Role"] == "standby"


def test_a_standby_asked_by_a_peer_answers_within_max_lag(standby: Instance) -> None:
    assert ask(standby, headers=FORWARDED, maxLag="7").headers["Balance-Role"] == "standby"


def test_a_standby_at_the_wanted_position_answers(standby: Instance) -> None:
    assert ask(standby, minPosition=f"{PARTITION}:{END - 7}").headers["Balance-Role"] == "standby"


def test_a_standby_asked_by_a_peer_waits_for_the_wanted_position(standby: Instance) -> None:
    refused = ask(standby, headers=FORWARDED, minPosition=f"{PARTITION}:{END}")

    assert refused.status == 503
    assert TIMEOUT_SECONDS <= refused.seconds < TIMEOUT_SECONDS + BUSY_SECONDS


def test_a_standby_before_the_wanted_position_asks_the_owner(standby: Instance) -> None:
    peer = Peer(answering(text='{"amount":1.00}', headers={"Balance-Role": "active"}))

    answer = ask_with_peers(standby, peer, owns=True, minPosition=f"{PARTITION}:{END}", maxLag="50")

    assert (answer.text, answer.headers["Balance-Role"]) == ('{"amount":1.00}', "active")
    assert peer.asked[0].query["minPosition"] == f"{PARTITION}:{END}"
    assert peer.asked[0].query["maxLag"] == "50"


def hear(instance: Instance, addresses: list[str]) -> None:
    """The first peer is the owner, the others are standbys."""
    instance.hear_of_owner(addresses[0])
    for address in addresses[1:]:
        instance.hear_of_standby(address)


def test_a_query_goes_to_the_owner_before_a_standby(standby: Instance) -> None:
    owner, other = Peer(answering(headers={"Balance-Role": "active"})), Peer(answering())

    answer = ask_with_peers(standby, owner, other, before=lambda a: hear(standby, a), maxLag="5")

    assert answer.headers["Balance-Role"] == "active"
    assert (len(owner.asked), len(other.asked)) == (1, 0)


@pytest.mark.parametrize("status", [421, 503])
def test_a_query_goes_to_a_standby_if_the_owner_cannot_answer(standby: Instance, status: int) -> None:
    owner, other = Peer(answering(status, text="{}")), Peer(answering(headers={"Balance-Role": "standby"}))

    answer = ask_with_peers(standby, owner, other, before=lambda a: hear(standby, a), maxLag="5")

    assert (answer.status, answer.headers["Balance-Role"]) == (200, "standby")


def test_a_query_without_bounds_goes_to_no_standby(standby: Instance) -> None:
    owner, other = Peer(answering(503, text="{}")), Peer(answering())

    answer = ask_with_peers(standby, owner, other, before=lambda a: hear(standby, a))

    assert (answer.status, len(other.asked)) == (503, 0)


@pytest.mark.shows("slow-peer")
def test_after_half_the_deadline_a_query_goes_from_a_hanging_owner_to_a_standby(standby: Instance) -> None:
    async def hang(_request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError("never")

    owner, other = Peer(hang), Peer(answering(headers={"Balance-Role": "standby"}))
    standby.timeout_seconds = 3

    answer = ask_with_peers(standby, owner, other, before=lambda a: hear(standby, a), maxLag="5")

    assert (answer.status, answer.headers["Balance-Role"]) == (200, "standby")
    assert 1.5 <= answer.seconds < standby.timeout_seconds


@pytest.mark.shows("slow-peer")
@pytest.mark.parametrize("bound", [("minPosition", f"{PARTITION}:{END}"), ("maxLag", "5")])
def test_a_hanging_owner_leaves_time_to_answer_from_the_local_copy(standby: Instance, bound: tuple[str, str]) -> None:
    async def hang(_request: web.Request) -> web.StreamResponse:
        standby.move_to(END)
        await asyncio.sleep(60)
        raise AssertionError("never")

    name, value = bound
    hear_of = standby.hear_of_owner

    answer = ask_with_peers(standby, Peer(hang), before=lambda a: hear_of(a[0]), owns=True, **{name: value})

    assert (answer.status, answer.headers["Balance-Application-Server"]) == (200, "asker:1")
    assert answer.headers["Balance-Role"] == "standby"


def test_a_standby_that_is_restoring_is_not_asked(standby: Instance) -> None:
    other = Peer(answering())

    answer = ask_with_peers(standby, other, before=lambda a: standby.hear_of_standby(a[0], "RESTORING"), maxLag="5")

    assert (answer.status, len(other.asked)) == (503, 0)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "x", "9" * 19])
def test_a_malformed_max_lag_is_a_problem(standby: Instance, value: str) -> None:
    assert ask(standby, maxLag=value).status == 400


@pytest.fixture
def halted(owner: Instance) -> Instance:
    owner.is_halted = True
    return owner


def test_a_halted_owner_answers_within_max_lag_and_names_its_role(halted: Instance) -> None:
    answer = ask(halted, maxLag="7")

    assert (answer.status, answer.text) == (200, '{"amount":12.34}')
    assert (answer.headers["Balance-Role"], answer.headers["Balance-Lag"]) == ("halted", "7")
    assert ask(halted, maxLag="6").status == 503


def test_a_halted_owner_does_not_answer_plain_queries(halted: Instance) -> None:
    for answer in (ask(halted), ask(halted, headers=FORWARDED)):
        assert answer.status == 503
        assert f"with maxLag, maxAge or minPosition, it answers as of offset {END - 7}" in answer.detail


def test_a_halted_owner_answers_plain_queries_if_the_model_says_so(halted: Instance) -> None:
    halted.answers_when_halted = True

    for headers in ({}, FORWARDED):
        answer = ask(halted, headers=headers)
        assert (answer.status, answer.text, answer.headers["Balance-Role"]) == (200, '{"amount":12.34}', "halted")


def test_a_halted_owner_does_not_say_that_there_is_no_such_key(tmp_path: Path) -> None:
    halted = Instance(tmp_path / "empty", is_halted=True, answers_when_halted=True)
    halted.move_to(END - 7)

    refused = ask(halted)

    assert (refused.status, "a newer copy may have it" in refused.detail) == (503, True)


@pytest.mark.shows("owner")
def test_a_halted_owner_whose_lease_has_expired_answers_as_a_standby(halted: Instance) -> None:
    halted.answers_when_halted = True
    halted.lease.revoke()

    assert ask(halted).status == 503
    assert ask(halted, maxLag="7").headers["Balance-Role"] == "standby"


def hear_of_a_halted_owner(instance: Instance, addresses: list[str]) -> None:
    instance.hear_of_owner(addresses[0], state="HALTED")


@pytest.mark.parametrize("parameters", [{}, {"maxLag": "7"}])
def test_a_halted_owner_is_asked_and_decides_whether_it_answers(tmp_path: Path, parameters: dict[str, Any]) -> None:
    asker, owner = Instance(tmp_path / "store"), Peer(answering(headers={"Balance-Role": "halted"}))

    answer = ask_with_peers(asker, owner, before=partial(hear_of_a_halted_owner, asker), owns=False, **parameters)

    assert (answer.status, answer.headers["Balance-Role"]) == (200, "halted")
