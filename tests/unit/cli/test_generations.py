"""`balance-service generations`, `rebuild`, `switch` and `drop`: what they send, and what they print."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from balance_service.cli.main import cli
from balance_service.client import ClientError
from balance_service.engine.commit import Committed
from balance_service.errors import BalanceServiceError, ConfigurationError
from balance_service.hosting import offline_rebuild
from balance_service.hosting.offline_rebuild import Rebuilt
from balance_service.http.generations import DropBody, RebuildBody, SwitchBody
from tests.support.scripted_server import Received, Scripted, problem, scripted

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.http.requests import JsonBody
    from balance_service.model.read_model import ReadModel
    from tests.support.scripted_server import Reply

pytestmark = pytest.mark.usefixtures("no_environment")

EQUAL = {"equal": 3, "different": 0, "onlyServing": 0, "onlyBuilding": 0}


RULES = {"decoderRules": 2, "readOtherwise": list[int]()}


def generation(number: int, status: str, lag: int | None = 0) -> dict[str, Any]:
    of_it = {"partitions": 4, "halted": "", "running": 3, "position": 1200, "lag": lag}
    return {"generation": number, "version": 1, "declarationChanged": False, "status": status, **of_it, **RULES}


def told(*generations: dict[str, Any], **more: Any) -> Scripted:
    """What an instance answers about the generations of `balance`."""
    nothing: dict[str, Any] = {"comparison": None, "switch": None, "keptUntil": None, "problem": ""}
    asked = {"action": "", "by": "", "reason": ""}
    return Scripted(
        body=json.dumps({"model": "balance", "generations": generations, **nothing, **asked, **more}).encode()
    )


ONE = told(generation(1, "serving"))
BUILDING = told(generation(1, "serving"), generation(2, "building", 500), switch="when_equal")
READY = told(
    generation(1, "serving"), generation(2, "ready"), comparison={**EQUAL, "different": 2}, switch="when_equal"
)
SWITCHED = told(generation(1, "kept"), generation(2, "serving"), comparison=EQUAL, keptUntil="2026-01-02T03:04:05.678Z")


DROPS_KEPT = (
    "`balance-service drop balance --generation 1 --reason R` drops it now, and no switch leads back to it then"
)


def run(*command: str, replies: list[Reply | Callable[[Received], Reply]]) -> tuple[Any, list[Received]]:
    """The result of a command, and the requests that the instance received."""
    with scripted(*replies) as (url, received):
        return CliRunner().invoke(cli, [*command, "--url", url]), received


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("balance_service.cli.generations._LOOK_SECONDS", 0.001)


@pytest.mark.parametrize(
    ("reply", "lines"),
    [
        (ONE, ["balance 1  serving   version 1  3 of 4 partitions run  position 1200  lag 0"]),
        (
            told(generation(1, "serving"), generation(2, "building", None), problem="the tasks have not closed yet"),
            [
                "balance 1  serving   version 1  3 of 4 partitions run  position 1200  lag 0",
                "balance 2  building  version 1  3 of 4 partitions run  position 1200  lag unknown",
                "  the tasks have not closed yet",
            ],
        ),
        (
            READY,
            [
                "balance 1  serving   version 1  3 of 4 partitions run  position 1200  lag 0",
                "balance 2  ready     version 1  3 of 4 partitions run  position 1200  lag 0",
                "  keys: 3 equal, 2 different, 0 only in the old, 0 only in the new",
                "  `balance-service switch balance --reason R` has the new one serve",
            ],
        ),
        (
            SWITCHED,
            [
                "balance 1  kept      version 1  3 of 4 partitions run  position 1200  lag 0",
                "balance 2  serving   version 1  3 of 4 partitions run  position 1200  lag 0",
                "  keys: 3 equal, 0 different, 0 only in the old, 0 only in the new",
                "  the kept generation is dropped at 2026-01-02T03:04:05.678Z, and no rebuild can begin before",
                f"  {DROPS_KEPT}",
            ],
        ),
        (
            told(
                {**generation(1, "serving"), "decoderRules": 1, "readOtherwise": [7]},
                generation(2, "ready"),
                comparison={**EQUAL, "different": 2},
            ),
            [
                "balance 1  serving   version 1  3 of 4 partitions run  position 1200  lag 0",
                "  it began under rules 1 of the decoder, and newer rules read other values of events under schema 7: "
                "`balance-service rebuild balance` reads all by the newest",
                "balance 2  ready     version 1  3 of 4 partitions run  position 1200  lag 0",
                "  keys: 3 equal, 2 different, 0 only in the old, 0 only in the new",
                "  a reason of differences: they began under rules 1 and 2 of the decoder, which read other values of "
                "events under schema 7",
                "  `balance-service switch balance --reason R` has the new one serve",
            ],
        ),
    ],
    ids=["one", "is built", "has caught up", "is kept", "began under older rules"],
)
def test_generations_are_printed_with_what_can_be_done(reply: Scripted, lines: list[str]) -> None:
    done, (request,) = run("generations", "balance", replies=[reply])

    assert (done.exit_code, done.stdout.splitlines()) == (0, lines)
    assert (request.method, request.target) == ("GET", "/api/models/balance/generations")


def test_generations_are_printed_as_json_one_read_model_a_line() -> None:
    done, _ = run("generations", "balance", "activity", "--json", replies=[SWITCHED, READY])

    assert done.exit_code == 0
    assert [json.loads(line)["generations"] for line in done.stdout.splitlines()] == [
        [generation(1, "kept"), generation(2, "serving")],
        [generation(1, "serving"), generation(2, "ready")],
    ]
    assert json.loads(done.stdout.splitlines()[0])["keptUntil"] == "2026-01-02T03:04:05.678Z"


def test_a_switch_anyway_prints_what_is_lost() -> None:
    lost = "r (anyway: generation 2 begins at offset 500 of balance-0)"
    switched = told(generation(1, "kept"), generation(2, "serving"), reason=lost)

    done, _ = run("switch", "balance", "--anyway", "--reason", "r", replies=[switched])

    assert (done.exit_code, done.stdout.splitlines()[2:]) == (0, [f"  {lost}"])


def test_without_a_name_the_generations_of_all_read_models_with_states_are_printed() -> None:
    status = {
        "applicationServer": "a:1",
        "ready": True,
        "reasons": [],
        "causes": [],
        "tasks": [],
        "problems": [],
        "applicationServers": [],
        "models": [
            {"name": name, "model": name.partition(".")[0]}
            for name in ("activity.g3", "balance", "balance.g2", "purchases")
        ],
    }
    models = [{"name": "activity", "key": "customerId"}, {"name": "balance", "key": "customerId"}]
    models += [{"name": "elsewhere", "key": "id"}, {"name": "purchases", "key": ""}]

    def reply(request: Received) -> Scripted:
        match request.target:
            case "/api/status":
                return Scripted(body=json.dumps(status).encode())
            case "/api/models":
                return Scripted(body=json.dumps({"models": models}).encode())
            case target:
                return told(generation(1, "serving"), model=target.split("/")[3])

    done, _ = run("generations", replies=[reply])

    assert done.exit_code == 0, done.exception
    assert [line.partition("  ")[0] for line in done.stdout.splitlines()] == ["activity 1", "balance 1"]


def test_a_refusal_is_printed_as_the_error() -> None:
    done, _ = run(
        "switch", "balance", "--reason", "r", replies=[READY, problem(409, "generation 2 has not caught up yet")]
    )

    assert isinstance(done.exception, BalanceServiceError)
    assert isinstance(done.exception.__cause__, ClientError)
    assert "generation 2 has not caught up yet" in str(done.exception)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("now", "way_out"),
    [
        (
            SWITCHED,
            f"; {DROPS_KEPT}",
        ),
        (BUILDING, "; `balance-service drop balance --generation 2 --reason R` drops it now"),
        (READY, "; `balance-service drop balance --generation 2 --reason R` drops it now"),
        (ONE, ""),
    ],
    ids=["one is kept", "one is built", "one is ready", "none"],
)
def test_a_refused_rebuild_names_the_command_that_removes_the_generation_in_the_way(
    now: Scripted, way_out: str
) -> None:
    done, received = run("rebuild", "balance", replies=[problem(409, "not now"), now])

    assert isinstance(done.exception, BalanceServiceError)
    assert str(done.exception) == f"not now{way_out}"
    assert [request.method for request in received] == ["POST", "GET"]


def test_a_rebuild_of_several_says_which_have_begun_before_one_is_refused() -> None:
    done, _ = run("rebuild", "activity", "balance", replies=[BUILDING, problem(503, "the broker does not respond")])

    assert str(done.exception) == "the broker does not respond"
    assert done.stderr == "before this error, rebuilds of activity have begun, and go on\n"


BODIES: list[tuple[list[str], type[JsonBody], dict[str, Any]]] = [
    (
        ["rebuild", "balance", "--detach"],
        RebuildBody,
        {"model": "balance", "keepOld": "86400", "reason": "rebuild"},
    ),
    (
        ["rebuild", "balance", "--detach", "--switch=never", "--keep-old=0", "--max-rate=7", "--reason=lost"],
        RebuildBody,
        {"model": "balance", "switch": "never", "keepOld": "0", "maxRate": "7", "reason": "lost"},
    ),
    (["rebuild", "balance", "--detach", "--switch", "always"], RebuildBody, {"switch": "always"}),
    (["switch", "balance", "--reason", "r"], SwitchBody, {"to": "2", "reason": "r"}),
    (["switch", "balance", "--anyway", "--reason", "r"], SwitchBody, {"anyway": True}),
    (["switch", "balance", "--to", "1", "--reason", "r"], SwitchBody, {"model": "balance", "to": "1", "reason": "r"}),
    (
        ["drop", "balance", "--generation", "2", "--reason", "r"],
        DropBody,
        {"model": "balance", "generation": "2", "reason": "r"},
    ),
]


@pytest.mark.parametrize(
    ("command", "body", "fields"), BODIES, ids=lambda one: " ".join(one) if isinstance(one, list) else ""
)
def test_a_command_sends_a_body_that_an_instance_takes(
    command: list[str], body: type[JsonBody], fields: dict[str, Any]
) -> None:
    done, received = run(*command, replies=[BUILDING])

    assert done.exit_code == 0, done.exception
    # A switch without a number looks at the generations first; a command may ask for the models last.
    (sent,) = [request for request in received if request.method == "POST"]
    assert (sent.method, sent.target) == ("POST", f"/api/models.{command[0]}")
    assert sent.json.items() >= fields.items()
    body.of_json(sent.body)


def test_a_rebuild_that_must_not_serve_by_itself_fails_and_says_why() -> None:
    why = "generation 2 begins at offset 500 of balance-0, and 1 at 0"
    more: dict[str, Any] = {"comparison": EQUAL, "switch": "always", "action": "compare", "reason": why, "problem": why}
    held = told(generation(1, "serving"), generation(2, "ready"), **more)

    done, _ = run("rebuild", "balance", "--switch", "always", replies=[BUILDING, held, held])

    assert isinstance(done.exception, BalanceServiceError)
    assert str(done.exception) == f"the new generation does not serve by itself: {why}"
    assert f"  {why}" in done.stdout.splitlines()


def test_a_detached_rebuild_prints_the_generations_and_does_not_wait() -> None:
    done, received = run("rebuild", "balance", "--detach", replies=[BUILDING])

    assert "balance 2  building" in done.stdout
    assert [request.method for request in received] == ["POST", "GET"]


def test_a_rebuild_of_several_read_models_begins_them_all_before_it_follows_one() -> None:
    done, received = run("rebuild", "balance", "activity", replies=[BUILDING, BUILDING, SWITCHED])

    assert done.exit_code == 0
    assert [request.json["model"] for request in received[:2]] == ["balance", "activity"]
    assert [request.method for request in received[2:]] == ["GET"] * len(received[2:])


@pytest.mark.parametrize("after", [SWITCHED, READY, ONE], ids=["serves", "waits for an operator", "was dropped"])
def test_a_rebuild_is_followed_until_nothing_is_built(after: Scripted) -> None:
    done, received = run("rebuild", "balance", replies=[BUILDING, BUILDING, BUILDING, after])

    # The states of the one that waits differ.
    assert done.exit_code == (1 if after is READY else 0)
    assert [request.method for request in received] == ["POST", *["GET"] * 4]
    shown, _ = run("generations", "balance", replies=[after])
    assert done.stdout == shown.stdout


def test_the_reason_why_a_rebuild_waits_is_shown_while_it_is_followed() -> None:
    waiting = told(generation(1, "serving"), generation(2, "building"), problem="too few open files are left")

    done, _ = run("rebuild", "balance", replies=[BUILDING, waiting, SWITCHED])

    assert "too few open files are left" in done.stderr.replace("\n", " ")


def test_a_rebuild_that_cannot_go_on_ends_with_the_reason_and_the_ways_out() -> None:
    why = "balance.g2_0 is HALTED at a:1: the first 3 offsets of balance-0 are gone"
    stuck = told(generation(1, "serving"), {**generation(2, "building"), "halted": why}, problem=why)

    done, received = run("rebuild", "balance", replies=[BUILDING, BUILDING, stuck])
    shown, _ = run("generations", "balance", replies=[stuck])

    assert isinstance(done.exception, BalanceServiceError)
    said = str(done.exception)
    assert said.startswith(f"generation 2 of balance cannot be built: {why}; remove the reason and restart")
    assert "`balance-service drop balance --generation 2 --reason R`" in said
    assert len(received) == 3
    assert shown.stdout.splitlines()[-1] == f"  {why}"
    assert shown.stdout.count(why) == 1


def test_an_instance_that_ends_does_not_end_the_rebuild_that_is_followed() -> None:
    done, _ = run("rebuild", "balance", replies=[BUILDING, BUILDING, problem(503, "it stops")])

    assert str(done.exception) == "it stops"
    assert "The rebuild of balance goes on; `balance-service generations balance` shows it" in done.stderr


def test_ctrl_c_leaves_the_rebuild_alone_and_says_how_to_follow_and_cancel_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("balance_service.cli.generations.time", SimpleNamespace(sleep=interrupt))

    done, received = run("rebuild", "balance", replies=[BUILDING])

    assert done.exit_code == 0
    assert "The rebuild of balance goes on: `balance-service generations balance` shows it" in done.stdout
    assert "`balance-service drop balance --generation N --reason R` cancels it" in done.stdout
    assert [request.method for request in received] == ["POST", "GET"]


@pytest.mark.parametrize(
    "command",
    [
        ["rebuild"],
        ["rebuild", "balance", "--switch", "when_equal"],
        ["rebuild", "balance", "--keep-old", "-1"],
        ["rebuild", "balance", "--max-rate", "0"],
        ["switch", "balance"],
        ["switch", "balance", "--to", "0", "--reason", "r"],
        ["switch", "--reason", "r"],
        ["drop", "balance", "--reason", "r"],
        ["drop", "balance", "--generation", "2"],
    ],
    ids=" ".join,
)
def test_a_command_that_lacks_something_or_is_out_of_range_sends_nothing(command: list[str]) -> None:
    done, received = run(*command, replies=[BUILDING])

    assert (done.exit_code, received) == (2, [])


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the rebuilt read models."""
    names: list[str] = []

    def rebuild(_settings: object, read_model: ReadModel, _progress: Callable[[int, int], None]) -> Rebuilt:
        if not read_model.has_states():
            raise ConfigurationError("it keeps no states")
        names.append(read_model.name)
        return Rebuilt(Committed(3, 2, 1, 0), 1.0)

    monkeypatch.setattr(offline_rebuild, "rebuild", rebuild)
    return names


def offline(*models: str, hosted: str = "balance,purchases,symbols") -> Any:
    return CliRunner(env={"BALANCE_MODELS": hosted}).invoke(cli, ["rebuild", "--offline", *models])


def test_offline_all_models_with_states_are_rebuilt_and_the_others_named(rebuilt: list[str]) -> None:
    done = offline()

    assert (done.exit_code, rebuilt) == (0, ["balance", "symbols"])
    assert "purchases keeps no states: there is nothing to rebuild" in done.stdout
    assert "balance rebuilt: 3 events applied, 2 records of other types ignored, 1 duplicates skipped" in done.stdout


def test_offline_a_named_model_without_states_is_rejected(rebuilt: list[str]) -> None:
    done = offline("purchases")

    assert isinstance(done.exception, ConfigurationError)
    assert rebuilt == []


def test_offline_a_model_of_another_package_is_named_by_its_name_or_as_in_the_setting(rebuilt: list[str]) -> None:
    reference = "tests.support.models:Summary"

    by_name, by_reference = offline("test-summary", hosted=f"balance,{reference}"), offline(reference, hosted="balance")

    assert (by_name.exit_code, by_reference.exit_code) == (0, 0), (by_name.output, by_reference.output)
    assert rebuilt == ["test-summary", "test-summary"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((), "give --generation N and --reason R, or --all for a model that no instance hosts"),
        (("--generation", "2"), "give --generation N and --reason R"),
        (("--all", "--generation", "2"), "--all asks the brokers: give no --generation, --url or --json with it"),
        (("--all", "--url", "http://127.0.0.1:1"), "--all asks the brokers"),
    ],
)
def test_drop_says_what_it_needs(given: tuple[str, ...], why: str) -> None:
    refused = CliRunner().invoke(cli, ["drop", "balance", *given])

    assert refused.exit_code == 2
    assert why in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["balance", "--master", "local[2]"], "--master and --files belong together"),
        (["balance", "--files", "/x"], "--master and --files belong together"),
        (["balance", "--keep-files"], "--master and --files belong together"),
        (["balance", "--spark-conf", "a=b"], "--master and --files belong together"),
        (["balance", "activity", "--master", "local[2]", "--files", "/x"], "--master rebuilds one MODEL"),
        (["balance", "--offline", "--master", "local[2]", "--files", "/x"], "--master rebuilds one MODEL"),
        (["balance", "--master", "local[2]", "--files", "/x", "--spark-conf", "a"], "--spark-conf a: give it as NAME="),
    ],
)
def test_the_options_of_a_batch_job_belong_together(options: list[str], said: str) -> None:
    done, received = run("rebuild", *options, replies=[])

    assert done.exit_code == 2
    assert said in done.output
    assert received == []


def test_a_generation_that_is_loaded_shows_its_share(capsys: pytest.CaptureFixture[str]) -> None:
    loading = told(generation(1, "serving"), {**generation(2, "building", None), "loaded": 0.25}, switch="when_equal")
    done, _ = run("rebuild", "balance", replies=[ONE, loading, SWITCHED, SWITCHED])

    assert done.exit_code == 0
    assert "loading balance" in done.stderr
