"""Two instances, as they run in production where the network is not trusted: HTTPS, client certificates, tokens."""

from __future__ import annotations

import hashlib
import json
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from balance_service.devtools.local.processes import HOST, free_port
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.credentials import Authority
from tests.support.service import PARTITIONS, address, amount_of, application, customers_of, new_instance, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

    Pair = tuple[LocalInstance, LocalInstance]

_SCOPES = {
    "checkout": ["balance:read", "balance:add"],
    "reader": ["balance:read"],
    "operator": ["balance:operations"],
}
_TOKENS = {name: f"a-long-and-random-token-of-the-{name}" for name in _SCOPES}
_PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def clients(authority: Authority) -> Iterator[httpx.Client]:
    """Presents a certificate, and knows whose it accepts."""
    with httpx.Client(verify=context(authority, "client"), timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def pair(
    stack: LocalStack, authority: Authority, clients: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Each owns a partition."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.json"
    listed = [
        {"name": name, "sha256": hashlib.sha256(_TOKENS[name].encode()).hexdigest(), "scopes": scopes}
        for name, scopes in _SCOPES.items()
    ]
    tokens.write_text(json.dumps({"tokens": listed}))
    settings = application(
        BALANCE_TLS_CA=str(authority.certificate),
        BALANCE_TLS_CLIENT_CA=str(authority.certificate),
        BALANCE_TOKENS_FILE=str(tokens),
        BALANCE_PEER_SECRET="a secret that all instances share",
    )
    first, second = (new_instance(stack, settings | secured(authority, name)) for name in ("first", "second"))
    with running(first, second):
        eventually(
            lambda: all(len(known) == 2 for known in (owners(clients, i) for i in (first, second))),
            "each owns a partition, and both know it",
            _PATIENCE_SECONDS,
        )
        yield first, second


def secured(authority: Authority, name: str) -> dict[str, str]:
    """What differs between instances."""
    certificate, key = authority.issue(name, password="open sesame")
    return {
        "BALANCE_TLS_CERTIFICATE": str(certificate),
        "BALANCE_TLS_KEY": str(key),
        "BALANCE_TLS_KEY_PASSWORD": "open sesame",
        "BALANCE_HEALTH_PORT": str(free_port()),
    }


def context(authority: Authority, name: str | None) -> ssl.SSLContext:
    """Of a client that presents a certificate of this name, or none."""
    made = ssl.create_default_context(cafile=str(authority.certificate))
    if name is not None:
        made.load_cert_chain(*map(str, authority.issue(name)))
    return made


def at(instance: LocalInstance, path: str) -> str:
    return f"https://{HOST}:{instance.port}{path}"


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def owners(clients: httpx.Client, instance: LocalInstance) -> dict[str, int]:
    """The owners of partitions that an instance knows of, each with a partition of its own."""
    answer = clients.get(at(instance, "/api/status"), headers=bearing(_TOKENS["operator"]))
    assert answer.status_code == 200, answer.text
    known: list[dict[str, Any]] = answer.json()["applicationServers"]
    return {
        server["applicationServer"]: task["partition"]
        for server in known
        for task in server["tasks"]
        if task["role"] == "active" and task["state"] == "RUNNING" and not server["suspect"]
    }


def add(clients: httpx.Client, instance: LocalInstance, customer: str, token: str) -> httpx.Response:
    body = {"customerId": customer, "amount": "1.50"}
    return clients.post(at(instance, ADD_FUNDS), json=body, headers=bearing(token))


def answered(clients: httpx.Client, instance: LocalInstance, parameters: dict[str, str]) -> httpx.Response:
    """A balance, asked for again while it is 503, as any client would: the first commit of a process takes long."""
    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        url = at(instance, GET_BALANCE)
        answers.append(clients.get(url, params=parameters, headers=bearing(_TOKENS["reader"])))
        return answers[-1].status_code != 503

    eventually(is_answered, lambda: answers[-1].text)
    return answers[-1]


def test_whichever_is_asked_gives_the_owners_answer_over_mutual_tls(pair: Pair, clients: httpx.Client) -> None:
    homes = owners(clients, pair[0])
    assert set(homes) == {address(instance) for instance in pair}
    for owner, partition in homes.items():
        (customer,) = customers_of(partition, 1)
        added = add(clients, pair[0], customer, _TOKENS["checkout"])
        assert added.status_code == 202, added.text
        parameters = {"customerId": customer, "minPosition": added.headers["Balance-Position"]}

        for asked in pair:
            answer = answered(clients, asked, parameters)

            assert str(amount_of(answer)) == "1.50"
            assert answer.headers["Balance-Application-Server"] == owner


def test_nobody_gets_more_than_his_token_allows(pair: Pair, clients: httpx.Client) -> None:
    for partition in range(PARTITIONS):
        _, customer = customers_of(partition, 2)
        for asked in pair:
            statuses = [
                clients.get(at(asked, GET_BALANCE), params={"customerId": customer}, headers=headers).status_code
                for headers in ({}, bearing("not-a-token"), bearing(_TOKENS["operator"]), bearing(_TOKENS["reader"]))
            ]
            statuses += [add(clients, asked, customer, token).status_code for token in ("x", _TOKENS["reader"])]

            # Refused, or not there: nothing was added.
            assert statuses == [401, 401, 403, 404, 401, 403]


def test_who_has_no_certificate_of_the_authority_is_not_answered(
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
