"""Two secured instances: HTTPS, client certificates, tokens, and the scope for dead letters."""

from __future__ import annotations

import hashlib
import json
import ssl
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from balance_service.client import Client
from balance_service.devtools.local.processes import HOST, free_port
from tests.e2e.clients import assert_problem
from tests.e2e.dead_letters import PATH as DEAD_LETTERS
from tests.e2e.dead_letters import customer_in
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.commands import assert_refused, run
from tests.support.credentials import Authority
from tests.support.service import (
    PARTITIONS,
    address,
    amount_of,
    application,
    customers_of,
    new_instance,
    retried,
    running,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack
    from tests.e2e.dead_letters import PoisonWriter

    Pair = tuple[LocalInstance, LocalInstance]

_SCOPES = {
    "checkout": ["balance:read", "balance:add"],
    "reader": ["balance:read"],
    "viewer": ["balance:operations"],
    "customer": ["balance:read", "balance:add", "balance:operations"],
    "operator": ["balance:operate"],
}
_TOKENS = {name: f"a-long-and-random-token-of-the-{name}" for name in _SCOPES}
_PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def clients(authority: Authority) -> Iterator[httpx.Client]:
    """An HTTP client with a certificate of the authority."""
    with httpx.Client(verify=context(authority, "client"), timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def settings(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings that both instances share."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.json"
    listed = [
        {"name": name, "sha256": hashlib.sha256(_TOKENS[name].encode()).hexdigest(), "scopes": scopes}
        for name, scopes in _SCOPES.items()
    ]
    tokens.write_text(json.dumps({"tokens": listed}))
    return application(
        BALANCE_TLS_CA=str(authority.certificate),
        BALANCE_TLS_CLIENT_CA=str(authority.certificate),
        BALANCE_TOKENS_FILE=str(tokens),
        BALANCE_PEER_SECRET="a secret that all instances share",
    )


@pytest.fixture(scope="module")
def pair(stack: LocalStack, settings: dict[str, str], authority: Authority, clients: httpx.Client) -> Iterator[Pair]:
    """Two instances; each owns a partition."""
    first, second = (new_instance(stack, settings | certified(authority, name)) for name in ("first", "second"))
    with running(first, second):
        eventually(
            lambda: all(len(known) == 2 for known in (owners(clients, i) for i in (first, second))),
            "each instance owns a partition, and both know it",
            _PATIENCE_SECONDS,
        )
        yield first, second


@pytest.fixture
def garbage(clients: httpx.Client, pair: Pair, poison: PoisonWriter) -> list[str]:
    """The ids of one dead letter in each partition."""
    letters = [poison.put(customer_in(partition), b"garbage") for partition in range(PARTITIONS)]
    for letter in letters:
        eventually(
            lambda of=letter: get_dead_letters(clients, pair[0], f"/{of}").status_code == 200,  # type: ignore[misc]
            "the dead letter exists",
        )
    return letters


def certified(authority: Authority, name: str) -> dict[str, str]:
    """Returns the settings that differ between instances."""
    certificate, key = authority.issue(name, password="open sesame")
    return {
        "BALANCE_TLS_CERTIFICATE": str(certificate),
        "BALANCE_TLS_KEY": str(key),
        "BALANCE_TLS_KEY_PASSWORD": "open sesame",
        "BALANCE_HEALTH_PORT": str(free_port()),
    }


def context(authority: Authority, name: str | None) -> ssl.SSLContext:
    """Returns a client context that presents a certificate with this name, or none."""
    made = ssl.create_default_context(cafile=str(authority.certificate))
    if name is not None:
        made.load_cert_chain(*map(str, authority.issue(name)))
    return made


def at(instance: LocalInstance, path: str) -> str:
    return f"https://{HOST}:{instance.port}{path}"


def bearing(client: str | None) -> dict[str, str]:
    """Returns the headers of a client in `_TOKENS`, of a stranger, or of a client without a token."""
    return {} if client is None else {"Authorization": f"Bearer {_TOKENS.get(client, client)}"}


def owners(clients: httpx.Client, instance: LocalInstance) -> dict[str, int]:
    """Returns the owners that an instance knows, each with its partition."""
    answer = clients.get(at(instance, "/api/status"), headers=bearing("viewer"))
    assert answer.status_code == 200, answer.text
    known: list[dict[str, Any]] = answer.json()["applicationServers"]
    return {
        server["applicationServer"]: task["partition"]
        for server in known
        for task in server["tasks"]
        if task["role"] == "active" and task["state"] == "RUNNING" and not server["suspect"]
    }


def add(clients: httpx.Client, instance: LocalInstance, customer: str, client: str) -> httpx.Response:
    body = {"customerId": customer, "amount": "1.50"}
    return clients.post(at(instance, ADD_FUNDS), json=body, headers=bearing(client))


def query_balance(clients: httpx.Client, instance: LocalInstance, parameters: dict[str, str]) -> httpx.Response:
    """Queries a balance; retries on 503, since the first commit of a process takes seconds."""
    return retried(lambda: clients.get(at(instance, GET_BALANCE), params=parameters, headers=bearing("reader")))


def get_dead_letters(
    clients: httpx.Client, instance: LocalInstance, path: str, client: str | None = "operator"
) -> httpx.Response:
    return clients.get(at(instance, DEAD_LETTERS + path), headers=bearing(client))


def decide(
    clients: httpx.Client, instance: LocalInstance, decision: str, ids: list[str], client: str | None
) -> httpx.Response:
    body = {"ids": ids, "reason": "a test"}
    return clients.post(at(instance, f"{DEAD_LETTERS}.{decision}"), json=body, headers=bearing(client))


def test_each_instance_returns_the_owners_answer_over_mutual_tls(pair: Pair, clients: httpx.Client) -> None:
    homes = owners(clients, pair[0])
    assert set(homes) == {address(instance) for instance in pair}
    for owner, partition in homes.items():
        (customer,) = customers_of(partition, 1)
        added = add(clients, pair[0], customer, "checkout")
        assert added.status_code == 202, added.text
        parameters = {"customerId": customer, "minPosition": added.headers["Balance-Position"]}

        for asked in pair:
            answer = query_balance(clients, asked, parameters)

            assert str(amount_of(answer)) == "1.50"
            assert answer.headers["Balance-Application-Server"] == owner


def test_each_instance_sends_each_change_over_mutual_tls(
    pair: Pair, clients: httpx.Client, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    for partition in range(PARTITIONS):
        *_, customer = customers_of(partition, 3)
        for asked in pair:
            options: dict[str, Any] = {"tls": context(authority, "client"), "token": _TOKENS["reader"]}
            with Client(at(asked, ""), trust_env=False, **options) as client:
                changes = client.changes("balance", key=customer)
                present = next(changes).value
                for number in range(1, 8):
                    assert add(clients, asked, customer, "checkout").status_code == 202
                    before = Decimal(0) if present is None else present["amount"]
                    assert next(changes).value["amount"] == before + number * Decimal("1.50")

    # A stream that stands still is found, and opened again, by the client.
    assert not [record.message for record in caplog.records if "interrupted" in record.message]


@pytest.mark.shows("tokens")
def test_a_token_allows_its_scopes_only(pair: Pair, clients: httpx.Client) -> None:
    for partition in range(PARTITIONS):
        _, customer = customers_of(partition, 2)
        for asked in pair:
            statuses = [
                clients.get(at(asked, GET_BALANCE), params={"customerId": customer}, headers=headers).status_code
                for headers in ({}, bearing("not-a-token"), bearing("viewer"), bearing("reader"))
            ]
            statuses += [add(clients, asked, customer, client).status_code for client in ("x", "reader")]

            # 404 shows that the refused commands added nothing.
            assert statuses == [401, 401, 403, 404, 401, 403]


def test_a_client_without_a_certificate_of_the_authority_gets_no_response(
    pair: Pair, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stranger = Authority(tmp_path_factory.mktemp("stranger"), "stranger")
    strange = context(authority, None)
    strange.load_cert_chain(*map(str, stranger.issue("stranger")))
    for presented in (context(authority, None), strange):
        with httpx.Client(verify=presented, timeout=30) as client, pytest.raises(httpx.TransportError):
            client.get(at(pair[0], "/health/live"))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{HOST}:{pair[0].port}/health/live", timeout=30)


def test_dead_letters_and_decisions_require_the_scope(
    pair: Pair, clients: httpx.Client, poison: PoisonWriter, garbage: list[str]
) -> None:
    for instance in pair:
        for client in ("reader", "viewer", "customer", None, "stranger"):
            answers = [
                get_dead_letters(clients, instance, path, client) for path in ("", *(f"/{one}" for one in garbage))
            ]
            answers += [decide(clients, instance, decision, garbage, client) for decision in ("redrive", "discard")]

            for answer in answers:
                assert_problem(
                    answer, 403 if client in _TOKENS else 401, "balance:operate" if client in _TOKENS else ""
                )
                assert garbage[0] not in answer.text

    assert [get_dead_letters(clients, pair[0], f"/{one}").json()["status"] for one in garbage] == [
        "waiting"
    ] * PARTITIONS
    assert poison.decisions(*garbage) == []


def test_a_client_that_poses_as_a_peer_makes_no_decision(
    pair: Pair, clients: httpx.Client, poison: PoisonWriter, garbage: list[str]
) -> None:
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
                answer = clients.post(
                    at(instance, f"{DEAD_LETTERS}.discard"),
                    params=parameters,
                    headers={**headers, "Balance-Forwarded": "127.0.0.1:1"},
                )
                assert_problem(answer, 403, "proof")

    assert poison.decisions(*garbage) == []


@pytest.mark.shows("decision")
def test_a_decision_names_its_client_even_if_a_peer_carries_it_out(
    pair: Pair, clients: httpx.Client, poison: PoisonWriter, garbage: list[str]
) -> None:
    # The other instance owns one of the two partitions.
    done = decide(clients, pair[0], "discard", garbage, "operator")

    assert (done.status_code, done.json()) == (202, {"accepted": garbage, "refused": []})
    told = {decision["id"]: (decision["decision"], decision["by"]) for decision in poison.decisions(*garbage)}
    assert told == dict.fromkeys(garbage, ("discard", "token:operator"))


def test_the_command_line_needs_the_scope(pair: Pair, poison: PoisonWriter, garbage: list[str]) -> None:
    arguments = ("dead-letters", "discard", garbage[0], "--reason", "x")

    refused = run({**pair[0].environment, "BALANCE_TOKEN": _TOKENS["customer"]}, *arguments)
    assert_refused(refused, 1, "balance:operate", "BALANCE_TOKEN")
    done = run({**pair[0].environment, "BALANCE_TOKEN": _TOKENS["operator"]}, *arguments)

    assert (done.code, done.stdout) == (0, "1 discarded, 0 refused\n"), done
    assert [decision["by"] for decision in poison.decisions(*garbage)] == ["token:operator"]
