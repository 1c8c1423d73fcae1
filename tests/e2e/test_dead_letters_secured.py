"""Dead letters where clients have tokens: who may see them and decide, and whose decision it was."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.e2e.http_api import assert_problem
from tests.e2e.letters import PATH, Unread, of_partition
from tests.support.commands import assert_refused, run
from tests.support.service import PARTITIONS, address, application, new_instance, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

    Pair = tuple[LocalInstance, LocalInstance]

_SCOPES = {
    "reader": ["balance:read"],
    "viewer": ["balance:operations"],
    "customer": ["balance:read", "balance:add", "balance:operations"],
    "operator": ["balance:operate"],
}
_TOKENS = {name: f"a-long-and-random-token-of-the-{name}" for name in _SCOPES}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.json"
    listed = [
        {"name": name, "sha256": hashlib.sha256(_TOKENS[name].encode()).hexdigest(), "scopes": scopes}
        for name, scopes in _SCOPES.items()
    ]
    tokens.write_text(json.dumps({"tokens": listed}))
    return application(BALANCE_TOKENS_FILE=str(tokens), BALANCE_PEER_SECRET="a secret that all instances share")


@pytest.fixture(scope="module")
def pair(stack: LocalStack, settings: dict[str, str]) -> Iterator[Pair]:
    """Each owns a partition."""
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        eventually(
            lambda: all(set(owners(instance)) == set(range(PARTITIONS)) for instance in (first, second)),
            "both know the owners of all partitions",
        )
        assert set(owners(first).values()) == {address(first), address(second)}
        yield first, second


@pytest.fixture(scope="module")
def unread(stack: LocalStack, settings: dict[str, str], pair: Pair) -> Iterator[Unread]:
    with Unread(stack, settings) as writer:
        yield writer


@pytest.fixture
def garbage(pair: Pair, unread: Unread) -> list[str]:
    """A letter of each partition, in their order."""
    letters = [unread.put(of_partition(partition), b"garbage") for partition in range(PARTITIONS)]
    for letter in letters:
        eventually(lambda of=letter: asked(pair[0], f"/{of}").status_code == 200, "it is there")  # type: ignore[misc]
    return letters


def test_nobody_sees_dead_letters_or_decides_without_the_scope(pair: Pair, unread: Unread, garbage: list[str]) -> None:
    for instance in pair:
        for client in ("reader", "viewer", "customer", None, "stranger"):
            answers = [asked(instance, path, client) for path in ("", *(f"/{one}" for one in garbage))]
            answers += [decided(instance, decision, garbage, client) for decision in ("redrive", "discard")]

            for answer in answers:
                assert_problem(
                    answer, 403 if client in _TOKENS else 401, "balance:operate" if client in _TOKENS else ""
                )
                assert garbage[0] not in answer.text

    assert [asked(pair[0], f"/{one}").json()["status"] for one in garbage] == ["waiting"] * PARTITIONS
    assert unread.decisions(*garbage) == []


def test_a_client_that_says_it_is_a_peer_decides_nothing(pair: Pair, unread: Unread, garbage: list[str]) -> None:
    for instance in pair:
        for partition, letter in enumerate(garbage):
            parameters = {
                "stage": "balance",
                "partitions": str(partition),
                "offsets": letter.rpartition(":")[2],
                "by": "somebody else",
                "reason": "x",
            }
            for headers in ({}, bearing("reader"), bearing("operator")):
                answer = httpx.post(
                    f"{instance.url}{PATH}.discard",
                    params=parameters,
                    headers={**headers, "Balance-Forwarded": "127.0.0.1:1"},
                )
                assert_problem(answer, 403, "proof")

    assert unread.decisions(*garbage) == []


def test_a_decision_names_the_client_that_made_it_also_where_a_peer_carries_it_out(
    pair: Pair, unread: Unread, garbage: list[str]
) -> None:
    # One of the two is not its own.
    done = decided(pair[0], "discard", garbage, "operator")

    assert (done.status_code, done.json()) == (202, {"accepted": garbage, "refused": []})
    told = {decision["id"]: (decision["decision"], decision["by"]) for decision in unread.decisions(*garbage)}
    assert told == dict.fromkeys(garbage, ("discard", "token:operator"))


def test_the_command_line_needs_the_scope_too(pair: Pair, unread: Unread, garbage: list[str]) -> None:
    arguments = ("dead-letters", "discard", garbage[0], "--reason", "x")

    refused = run({**pair[0].environment, "BALANCE_TOKEN": _TOKENS["customer"]}, *arguments)
    assert_refused(refused, 1, "balance:operate", "BALANCE_TOKEN")
    done = run({**pair[0].environment, "BALANCE_TOKEN": _TOKENS["operator"]}, *arguments)

    assert (done.code, done.stdout) == (0, "1 discarded, 0 refused\n"), done
    assert [decision["by"] for decision in unread.decisions(*garbage)] == ["token:operator"]


def asked(instance: LocalInstance, path: str, client: str | None = "operator") -> httpx.Response:
    return httpx.get(f"{instance.url}{PATH}{path}", headers=bearing(client), timeout=30)


def decided(instance: LocalInstance, decision: str, ids: list[str], client: str | None) -> httpx.Response:
    body = {"ids": ids, "reason": "a test"}
    return httpx.post(f"{instance.url}{PATH}.{decision}", json=body, headers=bearing(client), timeout=30)


def bearing(client: str | None) -> dict[str, str]:
    return {} if client is None else {"Authorization": f"Bearer {_TOKENS.get(client, client)}"}


def owners(instance: LocalInstance) -> dict[int, str]:
    """The owner of each partition, as far as an instance knows."""
    known = httpx.get(f"{instance.url}/api/status", headers=bearing("viewer"), timeout=30).json()
    return {
        task["partition"]: server["applicationServer"]
        for server in known["applicationServers"]
        for task in server["tasks"]
        if task["role"] == "active" and task["state"] == "RUNNING" and not server["suspect"]
    }
