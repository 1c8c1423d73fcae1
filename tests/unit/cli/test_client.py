"""Requests of commands to an instance, and errors for responses that are not from an instance."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.errors import BalanceServiceError, ConfigurationError
from tests.support.scripted_server import BY_KEY, answer, scripted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.scripted_server import Received, Reply

pytestmark = pytest.mark.usefixtures("no_environment")

URL = "http://balances.example:5051"


def run(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, *command: str) -> Any:
    monkeypatch.setattr("httpx.Client.send", lambda _client, _request, *, stream: answer)
    return CliRunner().invoke(cli, [*command, "--url", URL])


@pytest.mark.parametrize("command", [["get-balance", "c1"], ["status"], ["dead-letters", "list"], ["status", "--json"]])
@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (httpx.Response(302, headers={"Location": "https://login.example/"}), "302 Found"),
        (httpx.Response(301, json={"amount": 1}), "301 Moved Permanently"),
        (httpx.Response(200, html="<html>Welcome</html>"), "200 OK without JSON"),
        (httpx.Response(200, content=b"\xff"), "200 OK without JSON"),
        (httpx.Response(200, json=[1]), "200 OK without a JSON object"),
        (httpx.Response(204), "204 No Content without JSON"),
    ],
    ids=["302", "301", "html", "bytes", "list", "nothing"],
)
def test_a_response_that_is_not_from_an_instance_is_an_error(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, what: str, command: list[str]
) -> None:
    failed = run(monkeypatch, answer, *command).exception

    assert isinstance(failed, BalanceServiceError)
    assert str(failed).startswith(
        f"the server at balances.example:5051 is not an instance: it answers {what}; correct --url"
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
def test_a_json_object_without_the_expected_fields_is_an_error(
    monkeypatch: pytest.MonkeyPatch, command: list[str], lacking: str
) -> None:
    failed = run(monkeypatch, httpx.Response(200, json={"status": "UP"}), *command).exception

    assert isinstance(failed, BalanceServiceError)
    assert str(failed) == (
        f"the server at balances.example:5051 is not an instance: it answers 200 OK without '{lacking}'; correct --url"
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
def test_the_detail_of_an_error_response_is_the_message(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response, sentence: str
) -> None:
    assert str(run(monkeypatch, answer, "status").exception) == sentence


def test_a_balance_is_printed_with_the_instance_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, text='{"amount":12.30}', headers=BY_KEY)

    done = run(monkeypatch, answer, "get-balance", "c1")

    assert (done.exit_code, done.output) == (0, "12.30  (from localhost:5051)\n")


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_url_with_an_invalid_host_name_is_rejected(host: str) -> None:
    failed = CliRunner().invoke(cli, ["status", "--url", f"http://{host}:5051"]).exception

    assert isinstance(failed, ConfigurationError)
    assert str(failed).startswith(f"http://{host}:5051 is not an http or https URL; give one")


def test_the_status_prints_each_cause_once_with_what_to_do_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    causes = [
        {
            "urgency": "now",
            "what": "Kafka at k:9092 does not answer this instance",
            "since": "2026-01-02T03:04:05.678Z",
            "action": "Restore it",
            "heals": False,
            "follows": ["lags are not known"],
        },
        {
            "urgency": "none",
            "what": "balance.g2 began under older rules of the decoder",
            "since": None,
            "action": "Wait",
            "heals": True,
            "follows": [],
        },
    ]
    empty: dict[str, Any] = {name: [] for name in ("reasons", "models", "tasks", "problems")}
    # Without a broker, an instance does not hear itself either, and does not say so.
    servers: list[Any] = [
        {"applicationServer": one, "suspect": True, "silentSeconds": seconds, "shared": False, "tasks": []}
        for one, seconds in (("a:1", 7), ("b:1", 42), ("c:1", None))
    ]
    known = {"applicationServer": "a:1", "ready": False, "causes": causes, "applicationServers": servers, **empty}

    printed = run(monkeypatch, httpx.Response(200, json=known), "status").stdout

    assert printed.splitlines() == [
        "a:1 is not ready",
        "  NOW: Kafka at k:9092 does not answer this instance. Since 2026-01-02T03:04:05Z.",
        "    Restore it.",
        "      lags are not known",
        "  balance.g2 began under older rules of the decoder.",
        "    Wait. Waiting suffices.",
        "  a:1",
        "  b:1 (silent for 42 s)",
        "  c:1 (silent, not heard of by this instance)",
    ]


def task(name: str, state: str, role: str = "active", **more: Any) -> dict[str, Any]:
    known = {"epoch": 3, "position": 42, "reason": "", "restored": 0, "toRestore": 0, "secondsLeft": None}
    return {"task": name, "state": state, "role": role, **known, **more}


def test_status_says_of_each_task_of_all_instances_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [task("balance_0", "RUNNING"), task("balance_1", "TAILING", "standby")]
    others = [
        task("balance_1", "RESTORING", restored=10, toRestore=50, secondsLeft=3.6, epoch=0, position=-1),
        task("balance_2", "HALTED", reason="its source is another topic"),
        task("balance_3", "CREATED", epoch=0, position=-1),
        task("balance_4", "CLOSED", reason="the broker does not answer"),
        task("balance_5", "RUNNING", reason="balance_5 stands still: partition 5 has been at 42"),
    ]
    status = {
        "applicationServer": "a:1",
        "ready": True,
        "reasons": [],
        "causes": [],
        "problems": [],
        "models": [],
        "tasks": own,
        "applicationServers": [
            {"applicationServer": "a:1", "suspect": False, "shared": False, "tasks": own},
            {"applicationServer": "b:1", "suspect": False, "shared": False, "tasks": others},
        ],
    }

    done = run(monkeypatch, httpx.Response(200, json=status), "status")

    assert done.stdout.splitlines() == [
        "a:1 is ready",
        "  a:1",
        "    balance_0  active RUNNING  epoch 3  position 42",
        "    balance_1  standby TAILING  epoch 3  position 42",
        "  b:1",
        "    balance_1  active RESTORING  epoch -  position -",
        "      it reads its changelog: 10 of 50 records, about 4 s left",
        "    balance_2  active HALTED  epoch 3  position 42",
        "      its source is another topic",
        "    balance_3  active CREATED  epoch -  position -",
        "      it waits for its turn to open its store",
        "    balance_4  active CLOSED  epoch 3  position 42",
        "      the broker does not answer",
        "    balance_5  active RUNNING  epoch 3  position 42",
        "      balance_5 stands still: partition 5 has been at 42",
    ]


def server(address: str, *tasks: dict[str, Any], silent_seconds: int = 0) -> dict[str, Any]:
    silence = {"suspect": silent_seconds > 3, "silentSeconds": silent_seconds}
    return {"applicationServer": address, **silence, "shared": False, "tasks": tasks}


def printed_status(monkeypatch: pytest.MonkeyPatch, *servers: dict[str, Any], **more: Any) -> list[str]:
    empty: dict[str, Any] = {name: [] for name in ("reasons", "causes", "models", "tasks", "problems")}
    known = {"applicationServer": "b:1", "ready": True, "applicationServers": servers, **empty, **more}
    lines: list[str] = run(monkeypatch, httpx.Response(200, json=known), "status").stdout.splitlines()
    return lines


def test_status_prints_silent_instances_last_with_only_the_tasks_that_no_other_one_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = server(
        "a:1",
        task("balance_0", "RUNNING"),
        task("balance_1", "RUNNING"),
        task("balance_2", "RESTORING", restored=1, toRestore=9),
        silent_seconds=42,
    )
    # A standby does not make the partition's owner superfluous.
    live = server("b:1", task("balance_0", "RUNNING", epoch=4), task("balance_1", "TAILING", "standby"))

    assert printed_status(monkeypatch, silent, live)[1:] == [
        "  b:1",
        "    balance_0  active RUNNING  epoch 4  position 42",
        "    balance_1  standby TAILING  epoch 3  position 42",
        "  a:1 (silent for 42 s)",
        "    balance_1  active RUNNING  epoch 3  position 42  (silent)",
        "    balance_2  active RESTORING  epoch 3  position 42  (silent)",
        "    1 task that it had: at the instances above",
    ]


def test_status_says_what_each_of_several_generations_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        {"name": "balance", "model": "balance", "status": "kept"},
        {"name": "balance.g2", "model": "balance", "status": "serving"},
        {"name": "activity.g3", "model": "activity", "status": "serving"},
    ]
    names = ("balance_0", "balance.g2_0", "balance-by-shop_0", "activity.g3_0")

    printed = printed_status(monkeypatch, server("b:1", *(task(name, "RUNNING") for name in names)), models=models)

    assert printed[2:] == [
        "    balance_0  active RUNNING  epoch 3  position 42  kept",
        "    balance.g2_0  active RUNNING  epoch 3  position 42  serving",
        "    balance-by-shop_0  active RUNNING  epoch 3  position 42",
        "    activity.g3_0  active RUNNING  epoch 3  position 42",
    ]


@pytest.fixture
def suspended() -> Iterator[str]:
    """The URL of a server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


READING = [["status"], ["get-balance", "c1"], ["dead-letters", "list"], ["generations", "balance"]]
CHANGING = [
    ["switch", "balance", "--to", "2", "--reason", "r"],
    ["dead-letters", "redrive", "balance/0:1", "--reason", "r"],
]


@pytest.mark.parametrize("command", [*READING, *CHANGING], ids=" ".join)
def test_a_command_says_what_it_waits_for_and_what_to_do_about_an_instance_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, suspended: str, command: list[str]
) -> None:
    is_change, address = command in CHANGING, suspended.removeprefix("http://")
    monkeypatch.setattr("balance_service.cli.waiting.TELL_AFTER_SECONDS", 0.05)
    for name, seconds in (("ANSWER_SECONDS", 0.4), ("CHANGE_SECONDS", 0.5)):
        monkeypatch.setattr(f"balance_service.cli.client.{name}", seconds)

    done = CliRunner(env={"BALANCE_READ_TIMEOUT": "0.01"}).invoke(cli, [*command, "--url", suspended])

    limit = 0.5 if is_change else 0.4
    assert done.stderr == f"waiting for the instance at {address}, up to {limit:g} s …\n"
    assert isinstance(done.exception, BalanceServiceError)
    expected = (
        f"the instance at {address} does not answer (timed out); it had {limit:g} s: look whether "
        "its process is suspended (state T in `ps`) or its machine overloaded, or ask another instance with --url"
    )
    maybe = "; the request may be carried out all the same: look before you repeat it"
    assert str(done.exception) == expected + maybe * is_change


def test_an_answer_in_time_is_not_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, text='{"amount":12.30}', headers=BY_KEY)

    assert run(monkeypatch, answer, "get-balance", "c1").stderr == ""


def test_a_command_tells_after_two_seconds_that_it_waits_ten_at_most() -> None:
    def late(_: Received) -> Reply:
        time.sleep(2.3)
        return answer('{"amount":12.30}')

    with scripted(late) as (url, _):
        done = CliRunner().invoke(cli, ["get-balance", "c1", "--url", url.replace("//", "//me:secret@")])

    assert done.stderr == f"waiting for the instance at {url.removeprefix('http://')}, up to 10 s …\n"
    assert (done.exit_code, done.stdout) == (0, "12.30  (from localhost:5051)\n")
