"""`balance-service dead-letters`: more ids than fit into one request, and the display of a dead letter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from click.testing import CliRunner

from balance_service.cli.dead_letters import dead_letters
from balance_service.client import ClientError
from balance_service.engine.records import MISPLACED
from balance_service.errors import BalanceServiceError
from balance_service.http.dead_letters import DecisionBody

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.usefixtures("no_environment")

_IDS = [f"balance/0:{offset:018}" for offset in range(2_000)]


class Instance:
    """Refuses every tenth id; fails at the request with this number, by a status or without a response."""

    def __init__(self, fails_at: int = -1, failure: int | None = None, detail: str = "") -> None:
        self.fails_at = fails_at
        self.failure = failure
        self.detail = detail
        self.bodies: list[bytes] = []

    @property
    def ids(self) -> list[list[str]]:
        """The ids of each request."""
        return [json.loads(body)["ids"] for body in self.bodies]

    def send(self, _client: object, request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/api/deadLetters.discard")
        self.bodies.append(request.content)
        if len(self.bodies) == self.fails_at + 1:
            if self.failure is None:
                raise httpx.ConnectError("refused")
            return httpx.Response(self.failure, json={"detail": self.detail})
        ids = self.ids[-1]
        refused = [{"id": one, "reason": "no sense"} for one in ids if one.endswith("0")]
        return httpx.Response(202, json={"accepted": [one for one in ids if one[-1] != "0"], "refused": refused})


def discard(monkeypatch: pytest.MonkeyPatch, instance: Instance, ids: Sequence[str] = _IDS) -> Any:
    monkeypatch.setattr("httpx.Client.send", lambda client, request, *, stream: instance.send(client, request))
    return CliRunner().invoke(dead_letters, ["discard", *ids, "--reason", "x"], catch_exceptions=True)


def test_all_ids_are_sent_in_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance()

    done = discard(monkeypatch, instance)

    assert (done.exit_code, done.stdout) == (0, "1800 discarded, 200 refused\n")
    assert done.stderr.count(": not done: no sense") == 200
    assert [one for batch in instance.ids for one in batch] == _IDS
    assert len(instance.ids) > 2


def test_no_request_exceeds_the_limits_of_an_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance()
    ids = [f"balance/0:{offset}" for offset in range(1_001)]

    discard(monkeypatch, instance, ids)

    taken = [DecisionBody.of_json(body).letter_ids for body in instance.bodies]
    assert [str(one) for batch in taken for one in batch] == ids
    assert len(taken) == 3


def test_the_result_so_far_is_printed_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = Instance(fails_at=1)

    done = discard(monkeypatch, instance)

    assert str(done.exception).endswith(
        "does not answer (refused); start it, ask another instance with --url, or correct BALANCE_APPLICATION_SERVER"
    )
    refused = sum(one.endswith("0") for one in instance.ids[0])
    accepted = len(instance.ids[0]) - refused
    assert done.stderr.splitlines()[-1] == f"{accepted} discarded, {refused} refused before this error:"
    assert done.stdout == ""


@pytest.mark.parametrize("status", [404, 409, 503])
def test_the_next_requests_are_sent_after_one_that_is_refused_entirely(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    instance = Instance(1, status, "balance/0:9: no sense")

    done = discard(monkeypatch, instance)

    assert [one for batch in instance.ids for one in batch] == _IDS
    refused = instance.ids[1]
    assert f"none of {len(refused)} done: balance/0:9: no sense" in done.stderr.splitlines()
    others = [one for one in _IDS if one not in refused]
    accepted = sum(not one.endswith("0") for one in others)
    assert done.stdout == f"{accepted} discarded, {len(_IDS) - accepted} refused\n"
    assert isinstance(done.exception, BalanceServiceError)
    assert str(done.exception) == f"1 of {len(instance.ids)} requests were refused entirely; see above"


@pytest.mark.parametrize("status", [400, 401, 403, 429])
def test_an_error_that_concerns_all_requests_ends_the_command(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    instance = Instance(1, status, "no")

    failed = discard(monkeypatch, instance).exception

    assert isinstance(failed.__cause__, ClientError)
    assert failed.__cause__.status == status
    assert len(instance.ids) == 2


def test_the_error_of_a_single_request_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    done = discard(monkeypatch, Instance(0, 409, "balance/0:9: no sense"), _IDS[:3])

    assert isinstance(done.exception, BalanceServiceError)
    assert (str(done.exception), done.output) == ("balance/0:9: no sense", "")


def test_a_dead_letter_is_shown_with_repeated_headers_and_a_binary_key(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = [{"name": "b", "value": "1"}, {"name": "b", "valueBase64": "/w=="}, {"name": "b", "value": "1"}]
    record = {"key": None, "keyBase64": "QP8Aww==", "headers": headers, "valueBase64": None}
    letter = {
        "id": "balance/1:42",
        "detail": "so",
        "status": "applied",
        "redriveRefused": "",
        "discardWarning": "",
        **record,
    }
    monkeypatch.setattr("httpx.Client.send", lambda *_, stream: httpx.Response(200, json=letter))

    done = CliRunner().invoke(dead_letters, ["show", "balance/1:42"], catch_exceptions=False)

    assert done.stdout.splitlines() == [
        "id       balance/1:42",
        "detail   so",
        "status   applied",
        "key      base64:QP8Aww==",
        'headers  {"name": "b", "value": "1"}',
        '         {"name": "b", "valueBase64": "/w=="}',
        '         {"name": "b", "value": "1"}',
    ]


def letter(offset: int, cause: str = "too-much", status: str = "waiting", **more: Any) -> dict[str, Any]:
    known = {"model": "balance", "key": "ada", "detail": "", "attempt": 0, "dueAt": None, "redriveRefused": ""}
    further = {"discardWarning": "", "failedAt": "2026-01-02T03:04:05.678Z"}
    return {"id": f"balance/0:{offset}", "cause": cause, "status": status, **known, **further, **more}


FINAL = "its cause, key-null, never goes away: discard it"


def listed(monkeypatch: pytest.MonkeyPatch, letters: Sequence[dict[str, Any]], *options: str) -> list[str]:
    page = {"deadLetters": letters, "next": None}
    monkeypatch.setattr("httpx.Client.send", lambda *_, stream: httpx.Response(200, json=page))
    lines: list[str] = CliRunner().invoke(dead_letters, ["list", *options], catch_exceptions=False).stdout.splitlines()
    return lines


def test_a_list_says_of_each_dead_letter_what_is_wrong_since_when_and_why_no_redrive_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind = "it waits behind an earlier record of its key: redrive or discard that record"
    letters = [
        letter(1, detail="50 is more\nthan 10"),
        letter(2, "key-null", key="bob", redriveRefused=FINAL),
        letter(3, "schema-id-unknown", "scheduled", attempt=2, dueAt="2026-01-02T05:06:07.891Z"),
        letter(4, "behind-another", "behind", redriveRefused=behind),
        letter(5, "key-null", "discarded", redriveRefused="it is discarded already"),
    ]

    assert listed(monkeypatch, letters)[:9] == [
        "ID           KEY  CAUSE              STATUS     SINCE                 TRIED  DUE",
        "balance/0:1  ada  too-much           waiting    2026-01-02T03:04:05Z  0      -",
        "    50 is more\ufffdthan 10",
        "balance/0:2  bob  key-null           waiting    2026-01-02T03:04:05Z  0      -",
        f"    no redrive: {FINAL}",
        "balance/0:3  ada  schema-id-unknown  scheduled  2026-01-02T03:04:05Z  2      2026-01-02T05:06:07Z",
        "balance/0:4  ada  behind-another     behind     2026-01-02T03:04:05Z  0      -",
        f"    no redrive: {behind}",
        "balance/0:5  ada  key-null           discarded  2026-01-02T03:04:05Z  0      -",
    ]


def test_a_list_ends_with_the_commands_for_those_that_wait_for_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [letter(1), letter(2, "key-null", redriveRefused=FINAL), letter(3, status="parked")]
    undecided = [letter(4, status="scheduled"), letter(5, status="applied", redriveRefused="it is applied already")]

    assert listed(monkeypatch, [*letters, *undecided], "--url", "http://a:1")[-7:] == [
        "",
        "Look at a record:",
        "  balance-service dead-letters show balance/0:1 --url http://a:1",
        "Retry, once the cause is removed:",
        "  balance-service dead-letters redrive balance/0:1 balance/0:3 --reason R --url http://a:1",
        "Exclude permanently, as no redrive is possible:",
        "  balance-service dead-letters discard balance/0:2 --reason R --url http://a:1",
    ]
    assert len(listed(monkeypatch, undecided)) == 3


def test_no_command_is_offered_for_letters_that_a_rebuild_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    misplaced = letter(1, "key-not-of-this-partition", redriveRefused="the key is misplaced", discardWarning="keep it")

    assert listed(monkeypatch, [misplaced])[-5:] == [
        "    no redrive: the key is misplaced",
        "    warning: keep it",
        "",
        "Look at a record:",
        "  balance-service dead-letters show balance/0:1",
    ]


def test_a_filter_does_not_discard_what_a_rebuild_may_apply_but_an_id_does(monkeypatch: pytest.MonkeyPatch) -> None:
    warning = "discard it only if"
    misplaced = [letter(offset, MISPLACED, discardWarning=warning) for offset in (2, 3)]
    letters = [letter(1, "magic-byte-unknown"), *misplaced]
    sent: list[list[str]] = []

    def send(_client: object, request: httpx.Request, *, stream: bool) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"deadLetters": letters, "next": None})
        sent.append(json.loads(request.content)["ids"])
        return httpx.Response(202, json={"accepted": sent[-1], "refused": []})

    monkeypatch.setattr("httpx.Client.send", send)

    done = CliRunner().invoke(dead_letters, ["discard", "--model", "balance", "--reason", "x"], catch_exceptions=False)
    CliRunner().invoke(dead_letters, ["discard", "balance/0:2", "--reason", "x"], catch_exceptions=False)

    assert sent == [["balance/0:1"], ["balance/0:2"]]
    assert done.stdout == "1 discarded, 0 refused\n"
    assert done.stderr == f"2 skipped, which can be discarded by id only: {warning}\n"


def test_a_list_of_many_ends_with_the_commands_for_their_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = [letter(offset, "too-much" if offset % 2 else "a cause") for offset in range(11)]

    assert listed(monkeypatch, letters)[-3:] == [
        "Retry, once the cause is removed:",
        "  balance-service dead-letters redrive --model balance --cause 'a cause' --reason R",
        "  balance-service dead-letters redrive --model balance --cause too-much --reason R",
    ]


def test_a_dead_letter_is_shown_with_the_command_that_decides_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {**letter(2, "key-null", redriveRefused=FINAL), "headers": None, "valueBase64": None}
    monkeypatch.setattr("httpx.Client.send", lambda *_, stream: httpx.Response(200, json=shown))

    done = CliRunner().invoke(dead_letters, ["show", "balance/0:2"], catch_exceptions=False)

    assert f"redriveRefused  {FINAL}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-2:] == [
        "Exclude permanently, as no redrive is possible:",
        "  balance-service dead-letters discard balance/0:2 --reason R",
    ]
    shown |= {"redriveRefused": "", "detail": ""}
    redriven = CliRunner().invoke(dead_letters, ["show", "balance/0:2"], catch_exceptions=False).stdout
    assert "redriveRefused" not in redriven
    assert redriven.splitlines()[-1] == "  balance-service dead-letters redrive balance/0:2 --reason R"


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_list_has_what_answers_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...]
) -> None:
    page = {"deadLetters": [letter(1)], "next": None, "missing": ["activity/0", "balance/1"]}
    asked = []

    def send(_client: object, request: httpx.Request, *, stream: bool) -> httpx.Response:
        asked.append(request.url.params.get("partial"))
        return httpx.Response(200, json=page)

    monkeypatch.setattr("httpx.Client.send", send)

    done = CliRunner().invoke(dead_letters, ["list", *option])

    assert "balance/0:1" in done.stdout
    assert isinstance(done.exception, BalanceServiceError)
    assert str(done.exception).startswith("no instance could read the dead letters of activity/0, balance/1; ")
    assert asked == ["true"]


def test_a_list_of_nothing_that_answers_does_not_say_that_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"deadLetters": [], "next": None, "missing": ["balance/0", "balance/1"]}
    monkeypatch.setattr("httpx.Client.send", lambda *_, stream: httpx.Response(200, json=page))

    done = CliRunner().invoke(dead_letters, ["list"])

    assert done.stdout == ""
    assert "balance/0, balance/1" in str(done.exception)
