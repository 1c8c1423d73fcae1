"""`balance-service dead-letters redrive` and `discard` of more letters than fit into one request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from httpx import Response

from balance_service.cli import dead_letters as command
from balance_service.cli.client import AnsweredError
from balance_service.errors import BalanceServiceError, RetriableError
from balance_service.http import bodies

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("no_environment")

_IDS = [f"balance/0:{offset:018}" for offset in range(2_000)]


class Service:
    """Refuses every tenth letter; fails at the request with a number."""

    def __init__(self, fails_at: int = -1, error: BalanceServiceError | None = None) -> None:
        self.fails_at = fails_at
        self.error = error or RetriableError("nobody answers")
        self.asked: list[list[str]] = []

    def ask(
        self, _settings: object, _url: object, path: str, _parameters: object, *, names: object, body: Any
    ) -> Response:
        assert path == "/api/deadLetters.discard"
        self.asked.append(body["ids"])
        if len(self.asked) == self.fails_at + 1:
            raise self.error
        refused = [{"id": one, "reason": "no sense"} for one in body["ids"] if one.endswith("0")]
        return Response(202, json={"accepted": [one for one in body["ids"] if one[-1] != "0"], "refused": refused})


def discard(monkeypatch: pytest.MonkeyPatch, service: Service, ids: Sequence[str] = _IDS) -> Any:
    monkeypatch.setattr(command, "ask", service.ask)
    return CliRunner().invoke(command.dead_letters, ["discard", *ids, "--reason", "x"], catch_exceptions=True)


def test_all_are_decided_about_in_as_many_requests_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()

    done = discard(monkeypatch, service)

    assert (done.exit_code, done.stdout) == (0, "1800 discarded, 200 refused\n")
    assert done.stderr.count(": not done: no sense") == 200
    assert [one for some in service.asked for one in some] == _IDS
    assert len(service.asked) > 2


def test_no_request_has_more_ids_than_an_instance_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    ids = [f"balance/0:{offset}" for offset in range(1_001)]

    discard(monkeypatch, service, ids)

    taken = [bodies.decision(json.dumps({"ids": some, "reason": "x"}).encode())[0] for some in service.asked]
    assert [str(one) for some in taken for one in some] == ids
    assert len(taken) == 3


def test_what_was_done_before_an_error_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(fails_at=1)

    done = discard(monkeypatch, service)

    assert isinstance(done.exception, BalanceServiceError)
    refused = sum(one.endswith("0") for one in service.asked[0])
    accepted = len(service.asked[0]) - refused
    assert done.stderr.splitlines()[-1] == f"{accepted} discarded, {refused} refused before this error:"
    assert done.stdout == ""


@pytest.mark.parametrize("status", [404, 409, 503])
def test_a_request_refused_whole_does_not_keep_the_others_from_being_sent(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    service = Service(fails_at=1, error=AnsweredError(status, "balance/0:9: no sense"))

    done = discard(monkeypatch, service)

    assert [one for some in service.asked for one in some] == _IDS
    refused = service.asked[1]
    assert f"none of {len(refused)} done: balance/0:9: no sense" in done.stderr.splitlines()
    others = [one for one in _IDS if one not in refused]
    accepted = sum(not one.endswith("0") for one in others)
    assert done.stdout == f"{accepted} discarded, {len(_IDS) - accepted} refused\n"
    assert isinstance(done.exception, BalanceServiceError)
    assert str(done.exception) == f"1 of {len(service.asked)} requests were refused whole; see above"


@pytest.mark.parametrize("status", [400, 401, 403, 429])
def test_what_is_said_of_every_request_ends_the_command(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    service = Service(fails_at=1, error=AnsweredError(status, "no"))

    assert discard(monkeypatch, service).exception is service.error
    assert len(service.asked) == 2


def test_one_request_refused_whole_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(fails_at=0, error=AnsweredError(409, "balance/0:9: no sense"))

    done = discard(monkeypatch, service, _IDS[:3])

    assert (done.exception, done.output) == (service.error, "")


def test_a_letter_is_shown_with_each_header_and_with_a_key_that_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = [{"name": "b", "value": "1"}, {"name": "b", "valueBase64": "/w=="}, {"name": "b", "value": "1"}]
    letter = {"id": "balance/1:42", "key": None, "keyBase64": "QP8Aww==", "headers": headers, "valueBase64": None}
    monkeypatch.setattr(command, "ask", lambda *_, **__: Response(200, json=letter))

    done = CliRunner().invoke(command.dead_letters, ["show", "balance/1:42"], catch_exceptions=False)

    assert done.stdout.splitlines() == [
        "id       balance/1:42",
        "key      base64:QP8Aww==",
        'headers  {"name": "b", "value": "1"}',
        '         {"name": "b", "valueBase64": "/w=="}',
        '         {"name": "b", "value": "1"}',
    ]
