"""Commands that ask an instance: what is no answer of one is said to be none, in a sentence."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.errors import BalanceServiceError, ConfigurationError

pytestmark = pytest.mark.usefixtures("no_environment")

URL = "http://balances.example:5051"


def told(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, *command: str) -> Any:
    monkeypatch.setattr("httpx.Client.send", lambda _client, _request: answer)
    return CliRunner().invoke(cli, [*command, "--url", URL])


@pytest.mark.parametrize("command", [["get-balance", "c1"], ["status"], ["dead-letters", "list"], ["status", "--json"]])
@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (httpx.Response(302, headers={"Location": "https://login.example/"}), "302 Found"),
        (httpx.Response(301, json={"amount": 1}), "301 Moved Permanently"),
        (httpx.Response(200, html="<html>Welcome</html>"), "200 OK without a JSON object"),
        (httpx.Response(200, content=b"\xff"), "200 OK without a JSON object"),
        (httpx.Response(200, json=[1]), "200 OK without a JSON object"),
        (httpx.Response(204), "204 No Content without a JSON object"),
    ],
    ids=["302", "301", "html", "bytes", "list", "nothing"],
)
def test_what_no_instance_answers_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, what: str, command: list[str]
) -> None:
    failed = told(monkeypatch, answer, *command).exception

    assert isinstance(failed, BalanceServiceError)
    assert str(failed).startswith(
        f"what answers at balances.example:5051 is no instance: it says {what}; correct --url"
    )


@pytest.mark.parametrize(
    ("command", "lacking"),
    [
        (["get-balance", "c1"], "amount"),
        (["get-balance", "c1", "--json"], "amount"),
        (["status"], "applicationServer"),
        (["dead-letters", "list"], "deadLetters"),
        (["dead-letters", "show", "balance/0:1"], "id"),
        (["dead-letters", "discard", "balance/0:1", "--reason", "x"], "accepted"),
    ],
)
def test_another_json_object_is_no_answer_of_an_instance(
    monkeypatch: pytest.MonkeyPatch, command: list[str], lacking: str
) -> None:
    failed = told(monkeypatch, httpx.Response(200, json={"status": "UP"}), *command).exception

    assert isinstance(failed, BalanceServiceError)
    assert str(failed) == (
        f"what answers at balances.example:5051 is no instance: it says 200 OK without '{lacking}'; correct --url"
    )


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (httpx.Response(400, json={"detail": "no such key"}), "no such key"),
        (httpx.Response(500, json={"error": "x"}), '500: {"error":"x"}'),
        (httpx.Response(502, text="Bad Gateway"), "502: Bad Gateway"),
        (httpx.Response(502, json=["detail"]), '502: ["detail"]'),
        (httpx.Response(401, json={"detail": "who are you"}), "who are you (BALANCE_TOKEN)"),
    ],
)
def test_an_answer_that_is_an_error_is_told(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, sentence: str
) -> None:
    assert str(told(monkeypatch, answer, "status").exception) == sentence


def test_an_instances_answer_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, text='{"amount":12.30}', headers={"Balance-Application-Server": "a:1"})

    done = told(monkeypatch, answer, "get-balance", "c1")

    assert (done.exit_code, done.output) == (0, "12.30  (from a:1)\n")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_url_whose_host_no_resolver_can_be_asked_for_is_refused_in_a_sentence(host: str) -> None:
    failed = CliRunner().invoke(cli, ["status", "--url", f"http://{host}:5051"]).exception

    assert isinstance(failed, ConfigurationError)
    assert str(failed) == f"{host} in --url is no host's name; correct it"
