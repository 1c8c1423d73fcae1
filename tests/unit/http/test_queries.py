"""Queries over HTTP: answered from the local store, by the owner one hop away, or with an error; never wrongly."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from yarl import URL

from balance_service.engine.store import StateStore, StoreView
from balance_service.errors import StoreCorruptedError, UnreadableRecordError
from balance_service.http.answer import problems
from balance_service.http.peers.trust import FORWARDED_HEADER
from balance_service.read_models.balance import Balance
from tests.support.api import GET_BALANCE as PATH
from tests.support.collector import no_collector
from tests.support.querying import (
    ASKING_SECONDS,
    BUSY_SECONDS,
    CUSTOMER,
    EPOCH,
    OTHER_PARTITION,
    PARTITION,
    POSITIONS,
    TIMEOUT_SECONDS,
    Answer,
    Instance,
    UnknownSchemas,
    _ask,
    ask,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


# --- answered here


@pytest.mark.parametrize(
    "amount",
    ["12.34", "0.10", "0.00", "-5.00", "9007199254740993.01", "9" * 36 + ".99", "-" + "9" * 36 + ".99"],
)
def test_the_owner_answers_with_the_exact_digits(instance: Instance, amount: str) -> None:
    instance.put(amount)

    answer = ask(instance)

    assert (answer.status, answer.text) == (200, f'{{"amount":{amount}}}')
    assert answer.headers["Content-Type"].startswith("application/json")


@pytest.mark.shows("position")
def test_an_answer_names_its_instance_role_and_position(instance: Instance) -> None:
    instance.put("1.00")
    instance.move_to(93)

    headers = ask(instance).headers

    assert {name: value for name, value in headers.items() if name.startswith("Balance-")} == {
        "Balance-Application-Server": "asker:1",
        "Balance-Role": "active",
        "Balance-Position": f"{PARTITION}:93",
        "Balance-Epoch": str(EPOCH),
        "Balance-Generation": "1",
        "Balance-Lag": "7",
    }


@pytest.mark.shows("no-500")
def test_a_view_that_raises_fails_only_its_query(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    instance.put("1.00")
    instance.put("2.00", "other")
    view = Balance.view
    monkeypatch.setattr(Balance, "fields", {"amount": "decimal"}, raising=False)
    monkeypatch.setattr(
        Balance, "view", lambda model, state: view(model, state) if state["amount"] == 1 else state["absent"]
    )

    failed = ask(instance, customerId="other")

    assert (failed.status, failed.detail) == (500, "an internal error occurred; the service's log has the details")
    assert ask(instance).text == '{"amount":1.00}'


def test_an_unknown_customer_is_a_404_with_a_position(instance: Instance) -> None:
    answer = ask(instance)

    assert (answer.status, answer.detail) == (404, "no such customer")
    assert answer.headers["Balance-Position"] == f"{PARTITION}:10"


@pytest.mark.shows("404")
def test_without_an_owner_the_answer_is_503_and_not_404(instance: Instance) -> None:
    instance.owns = False

    answer = ask(instance)

    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"
    assert "no instance answers for partition" in answer.detail


def test_an_instance_whose_lease_has_expired_does_not_answer_as_owner(instance: Instance) -> None:
    instance.put("12.34")
    instance.clock.now += 9

    answer = ask(instance)

    assert answer.status == 503
    assert "Retry-After" in answer.headers
    assert "12.34" not in answer.text


def test_an_instance_without_a_lease_refuses_forwarded_queries(instance: Instance) -> None:
    instance.put("12.34")
    instance.lease.revoke()

    assert ask(instance, headers={FORWARDED_HEADER: "peer:1"}).status == 421


def test_an_instance_does_not_proxy_to_itself(instance: Instance) -> None:
    instance.owns = False
    instance.hear_of_owner(instance.address)

    assert ask(instance).status == 503


def test_an_owner_answers_forwarded_queries(instance: Instance) -> None:
    instance.put("12.34")

    assert ask(instance, headers={FORWARDED_HEADER: "peer:1"}).text == '{"amount":12.34}'


def test_a_damaged_store_is_reported_and_answers_no_query(instance: Instance) -> None:
    damage(instance)

    answer = ask(instance)

    assert (answer.status, instance.damaged) == (503, [PARTITION])
    assert "Retry-After" in answer.headers


def test_a_damaged_store_can_be_replaced_after_a_query_has_met_it(instance: Instance) -> None:
    damage(instance)

    with no_collector():
        assert ask(instance).status == 503
        # A closed task has no view.
        instance.damaged_tasks.clear()
        instance.store.close()
        StateStore(instance.store.path, POSITIONS).close()


def test_states_that_the_class_cannot_read_are_not_called_damaged(instance: Instance) -> None:
    damage(instance, UnreadableRecordError, "'points' is a long there and a string here")

    answer = ask(instance)

    assert (answer.status, answer.detail) == (503, "'points' is a long there and a string here")
    assert len(instance.damaged_tasks) == 1


@pytest.mark.parametrize("is_away", [False, True])
def test_another_thread_asks_the_registry_for_the_schema_of_a_state(instance: Instance, *, is_away: bool) -> None:
    instance.put("1.00")
    instance.schemas = UnknownSchemas()
    instance.schemas.is_away = is_away

    answer = ask(instance)

    assert [name.rpartition("_")[0] for name in instance.schemas.threads] == ["schemas"]
    if is_away:
        assert (answer.status, answer.detail) == (503, "the schema registry is away")
    else:
        assert (answer.status, answer.text) == (200, '{"amount":1.00}')


def test_a_query_that_waits_for_the_registry_ends_in_time_and_holds_no_store(instance: Instance) -> None:
    instance.put("1.00")
    instance.schemas = UnknownSchemas()
    instance.timeout_seconds = ASKING_SECONDS / 2

    with no_collector():
        answer = ask(instance)
        instance.store.close()
        StateStore(instance.store.path, POSITIONS).close()

    assert answer.status == 503
    assert "the schema registry did not answer within" in answer.detail


def damage(
    instance: Instance, error: type[Exception] = StoreCorruptedError, message: str = "checksum mismatch"
) -> None:
    class Damaged(StoreView):
        def get(self, key: bytes) -> bytes | None:
            raise error(message)

    view = instance.store.view
    assert view is not None
    # `damaged` in test_store.py shows the same with a real flipped bit.
    view.__class__ = Damaged


@pytest.mark.parametrize("parameters", [{"customerId": ""}, {"customerId": "a\nb"}, {"minPosition": "x"}])
def test_a_malformed_query_is_a_problem(instance: Instance, parameters: dict[str, str]) -> None:
    answer = ask(instance, headers=None, **parameters)

    assert answer.status == 400
    assert answer.detail


# --- read your writes


def test_a_query_for_a_reached_position_is_answered_at_once(instance: Instance) -> None:
    instance.put("1.00")
    instance.timeout_seconds = 30

    answer = ask(instance, minPosition=f"{PARTITION}:10")

    assert answer.status == 200
    assert answer.seconds < instance.timeout_seconds / 2


def test_a_query_waits_until_its_position_is_reached(instance: Instance) -> None:
    instance.put("1.00")
    instance.timeout_seconds = 30

    async def run() -> Answer:
        async with instance.app() as app:
            asked = asyncio.ensure_future(_ask(app, {}, {"customerId": CUSTOMER, "minPosition": f"{PARTITION}:11"}))
            await asyncio.sleep(0.2)
            assert not asked.done()
            instance.put("3.00")
            instance.move_to(11)
            return await asked

    answer = asyncio.run(run())

    assert answer.text == '{"amount":3.00}'
    assert answer.headers["Balance-Position"] == f"{PARTITION}:11"


@pytest.mark.shows("min-position")
def test_a_waiting_query_reads_the_store_only_at_its_position(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.timeout_seconds = 30
    reads: list[bytes] = []
    get = StoreView.get

    def counted(view: StoreView, key: bytes) -> bytes | None:
        reads.append(key)
        return get(view, key)

    monkeypatch.setattr(StoreView, "get", counted)

    async def run() -> Answer:
        async with instance.app() as app:
            asked = asyncio.ensure_future(_ask(app, {}, {"customerId": CUSTOMER, "minPosition": f"{PARTITION}:11"}))
            await asyncio.sleep(0.2)
            assert reads == []
            instance.put("3.00")
            assert reads == []
            instance.move_to(11)
            return await asked

    assert asyncio.run(run()).text == '{"amount":3.00}'
    assert reads == [CUSTOMER.encode()]


@pytest.mark.shows("min-position")
def test_a_position_that_is_not_reached_in_time_is_a_503(instance: Instance) -> None:
    instance.put("1.00")

    answer = ask(instance, minPosition=f"{PARTITION}:11")

    assert answer.status == 503
    assert "Retry-After" in answer.headers
    assert TIMEOUT_SECONDS <= answer.seconds < TIMEOUT_SECONDS + BUSY_SECONDS


def test_a_query_for_an_unknown_customer_waits_for_its_position(instance: Instance) -> None:
    assert ask(instance, minPosition=f"{PARTITION}:11").status == 503


def test_a_position_of_another_partition_is_refused(instance: Instance) -> None:
    answer = ask(instance, minPosition=f"{OTHER_PARTITION}:1")

    assert answer.status == 400
    assert f"the customer is in partition {PARTITION}" in answer.detail


# --- what is said


def test_an_unexpected_error_is_a_problem_without_details(instance: Instance) -> None:
    async def run() -> Answer:
        async def fails(_request: web.Request) -> web.StreamResponse:
            raise RuntimeError("the balance of c1 is 12.34")

        app = web.Application(middlewares=[problems])
        app.router.add_get(PATH, fails)
        return await _ask(app, {}, {})

    answer = asyncio.run(run())

    assert answer.status == 500
    assert "12.34" not in answer.text


def test_a_wrong_method_is_a_problem_that_names_the_right_one(instance: Instance) -> None:
    async def run() -> Mapping[str, Any]:
        async with (
            instance.app() as app,
            TestServer(app) as server,
            ClientSession() as client,
            client.post(server.make_url(PATH)) as response,
        ):
            return {
                "status": response.status,
                "type": response.content_type,
                "allow": response.headers["Allow"],
            }

    assert asyncio.run(run()) == {"status": 405, "type": "application/problem+json", "allow": "GET"}


def test_an_unknown_path_is_a_problem(instance: Instance) -> None:
    async def run() -> tuple[int, str]:
        async with (
            instance.app() as app,
            TestServer(app) as server,
            ClientSession() as client,
            client.get(URL(server.make_url("/nowhere"))) as response,
        ):
            return response.status, response.content_type

    assert asyncio.run(run()) == (404, "application/problem+json")
