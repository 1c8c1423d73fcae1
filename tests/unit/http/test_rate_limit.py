"""How often one client may ask."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balance_service.http.access.authorization import RateLimit
from balance_service.http.answer import Problem
from tests.support.fakes import Clock


def is_taken(limit: RateLimit, client: str = "c") -> bool:
    try:
        limit.take(client)
    except Problem as problem:
        return problem.status != 429
    return True


def test_a_burst_is_taken_and_then_as_many_as_the_rate_says() -> None:
    clock = Clock()
    limit = RateLimit(2.0, burst=3, now=clock)

    assert [is_taken(limit) for _ in range(4)] == [True, True, True, False]
    clock.now += 0.5
    assert [is_taken(limit) for _ in range(2)] == [True, False]
    clock.now += 60
    assert [is_taken(limit) for _ in range(4)] == [True, True, True, False]


def test_one_client_does_not_use_up_what_is_anothers() -> None:
    limit = RateLimit(1.0, burst=1, now=Clock())

    assert [is_taken(limit, client) for client in "aab"] == [True, False, True]


@pytest.mark.parametrize(("rate", "seconds"), [(1.0, 1), (0.1, 10), (0.01, 100), (50.0, 1)])
def test_who_is_refused_is_told_when_to_come_back_and_is_served_then(rate: float, seconds: int) -> None:
    clock = Clock()
    limit = RateLimit(rate, burst=1, now=clock)
    limit.take("c")

    with pytest.raises(Problem) as caught:
        limit.take("c")

    assert caught.value.headers["Retry-After"] == str(seconds)
    clock.now += seconds
    assert is_taken(limit)


def test_no_more_clients_are_remembered_than_there_is_room_for() -> None:
    limit = RateLimit(1.0, burst=1, now=Clock(), max_clients=100)

    for number in range(10_000):
        assert is_taken(limit, f"client {number}")

    assert len(limit) == 100
    assert not is_taken(limit, "client 9999")
    assert is_taken(limit, "client 0")


@given(st.integers(1, 10), st.integers(1, 8), st.lists(st.integers(0, 8), max_size=60))
def test_it_is_a_token_bucket(rate: int, burst: int, eighths: list[int]) -> None:
    """Compared with the bucket as the books have it, in exact arithmetic: time in eighths of an interval."""
    clock = Clock(0.0)
    limit = RateLimit(float(rate), burst, now=clock)
    tokens = burst * 8
    waited = 0
    for pause in eighths:
        waited += pause
        clock.now = waited / 8 / rate
        tokens = min(burst * 8, tokens + pause)
        expected = tokens >= 8
        tokens -= 8 if expected else 0
        assert is_taken(limit) == expected
