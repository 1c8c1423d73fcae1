"""Requests for the generations of read models, through the application: bodies, transitions and their answers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer
from pydantic import TypeAdapter

from balance_service.cluster.directory import ServerTable
from balance_service.engine.decisions import MAX_REASON_CHARACTERS
from balance_service.errors import InvalidInputError, RetriableError
from balance_service.hosting.online_rebuilds import Rebuilds
from balance_service.http.answer import Answer as Answered
from balance_service.http.app import make_app
from balance_service.http.files import PeerFiles
from balance_service.http.generations import (
    GENERATION_ROUTES,
    DropBody,
    GenerationRequests,
    ModelGenerations,
    RebuildBody,
    SwitchBody,
)
from balance_service.http.operations import Operations
from balance_service.http.peers.trust import Peer
from balance_service.http.route import Handlers
from balance_service.http.streams.event_stream import Streams
from balance_service.model.generations import Building, Comparison, Generations, Load, Switch
from balance_service.model.versions import Versions
from balance_service.process.runtime import elapsed
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from tests.support.fakes import DECLARED, IdleInstance
from tests.support.shipped import ROUTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from balance_service.http.requests import JsonBody
    from balance_service.model.generations import Declaration

BODIES: dict[str, type[JsonBody]] = {"rebuild": RebuildBody, "switch": SwitchBody, "drop": DropBody}
LEAST: dict[str, dict[str, Any]] = {
    "rebuild": {"model": "balance"},
    "switch": {"model": "balance", "reason": "r"},
    "drop": {"model": "balance", "generation": 2, "reason": "r"},
}
TEN_YEARS = 10 * 365 * 86_400


class Log:
    """The generations of `balance`, in memory."""

    def __init__(self) -> None:
        self.now = Generations("balance").begun(DECLARED)
        self.fails_with: RetriableError | None = None
        self.is_lossy = False
        self.lost = ""
        self.checks = self.writes = 0

    def buildable(self, _model: str) -> Declaration:
        if self.is_lossy:
            raise InvalidInputError("the source topic 'balance' is compacted")
        return DECLARED

    def loadable(self, _model: str, load: Load, declaration: Declaration) -> Declaration:
        if load.digest == "0" * 64:
            raise InvalidInputError("the files do not fit")
        return declaration

    def check_files(self, _model: str, files: str) -> str:
        return "" if files == "/shared" else f"{files} is not there"

    def check_switch(self, now: Generations, to: int, *, anyway: bool) -> str:
        assert to in now.live
        self.checks += 1
        if self.lost and not anyway:
            raise InvalidInputError(self.lost)
        return self.lost

    def of(self, _model: str) -> Generations:
        return self.now

    def newest(self, _model: str) -> Generations:
        if self.fails_with is not None:
            raise self.fails_with
        return self.now

    def write(self, _model: str, change: Callable[[Generations], Generations]) -> Generations:
        self.writes += 1
        self.now = change(self.now)
        return self.now


def rebuilds(log: Log) -> Rebuilds:
    versions = Versions([Balance()], load_settings(), log.of)
    hosted = SimpleNamespace(stage=versions.stage("balance", 1), source=SimpleNamespace(partitions=0))
    engine: Any = SimpleNamespace(
        generations=log,
        models={"balance": SimpleNamespace(hosted=hosted)},
        versions=versions,
        read_otherwise=lambda _stage: [],
    )
    return Rebuilds(engine, ServerTable(elapsed), Switch.NEVER)


class Answer(NamedTuple):
    status: int
    json: Any

    @property
    def detail(self) -> str:
        return str(self.json["detail"])


def asked(log: Log | None, *requests: tuple[str, str, Any]) -> list[Answer]:
    """The answers to requests (method, path after `/api/models`, body); without a log, of a starting instance."""

    async def run() -> list[Answer]:
        handlers, found = Handlers(Operations(IdleInstance(), Streams(10))), []
        if log is not None:
            here, asked_log = rebuilds(log), cast("Any", log)
            handlers.add(GenerationRequests(here, log, asked_log))
        async with TestServer(make_app(handlers, ROUTES)) as server, ClientSession() as client:
            for method, path, body in requests:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                sent: dict[str, Any] = {"data": data, "headers": {"Content-Type": "application/json"}}
                url = server.make_url(f"/api/models{path}")
                async with client.request(method, url, **(sent if method == "POST" else {})) as answer:
                    found.append(Answer(answer.status, await answer.json(content_type=None)))
        return found

    return asyncio.run(run())


def parsed(name: str, **fields: Any) -> Any:
    """The body of a request with these fields instead of those of the least one; None removes a field."""
    given = {field: value for field, value in {**LEAST[name], **fields}.items() if value is not None}
    return BODIES[name].of_json(json.dumps(given).encode())


def refusal(name: str, **fields: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        parsed(name, **fields)
    return str(caught.value)


def test_a_rebuild_keeps_the_old_generation_for_a_day_unless_it_says_otherwise() -> None:
    least, full = parsed("rebuild"), parsed("rebuild", switch="never", keepOld=0, maxRate=5, reason="x")

    assert (least.switch, least.keepOld, least.maxRate, least.reason) == (None, 86_400, None, "rebuild")
    assert (full.switch, full.keepOld, full.maxRate, full.reason) == ("never", 0, 5, "x")


@pytest.mark.parametrize("name", BODIES)
def test_the_example_in_an_error_is_a_valid_body(name: str) -> None:
    BODIES[name].of_json(BODIES[name].example.encode())


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("rebuild", "model"),
        ("switch", "model"),
        ("switch", "reason"),
        ("drop", "model"),
        ("drop", "reason"),
        ("drop", "generation"),
    ],
)
def test_a_body_names_what_is_missing(name: str, field: str) -> None:
    assert refusal(name, **{field: None}) == f"{field} is missing"


@pytest.mark.parametrize(
    ("name", "field"), [("rebuild", "to"), ("rebuild", "keep_old"), ("switch", "generation"), ("drop", "to")]
)
def test_an_unknown_field_is_refused(name: str, field: str) -> None:
    assert f"the body has '{field}', which is not known here; it may have model" in refusal(name, **{field: 1})


@pytest.mark.parametrize("value", ["", "when-equal", "WHEN_EQUAL", True, 1, ["always"], {}])
def test_a_rebuild_switches_only_in_a_known_way(value: Any) -> None:
    assert "switch" in refusal("rebuild", switch=value)


NUMBERS = [
    ("rebuild", "keepOld", 0, TEN_YEARS),
    ("rebuild", "maxRate", 1, 10**9),
    ("switch", "to", 1, 10**9),
    ("drop", "generation", 1, 10**9),
]


@pytest.mark.parametrize(("name", "field", "least", "most"), NUMBERS)
def test_a_number_may_have_the_ends_of_its_range(name: str, field: str, least: int, most: int) -> None:
    assert [getattr(parsed(name, **{field: value}), field) for value in (least, most)] == [least, most]


@pytest.mark.parametrize(("name", "field", "least", "most"), NUMBERS)
def test_a_number_out_of_its_range_or_of_another_type_is_refused(name: str, field: str, least: int, most: int) -> None:
    values: list[Any] = [least - 1, most + 1, -1, 1.5, "1", "", True, False, [1], {}]
    for value in values:
        why = refusal(name, **{field: value})
        assert why == f"{field} must be a whole number from {least} to {most}", value


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, field, *_ in NUMBERS])
def test_a_number_of_any_length_is_refused(name: str, field: str) -> None:
    fields = {key: value for key, value in LEAST[name].items() if key != field}
    body = f'{json.dumps(fields)[:-1]}, "{field}": {"9" * 5_000}}}'.encode()

    with pytest.raises(InvalidInputError, match=f"^{field} must be a whole number from"):
        BODIES[name].of_json(body)


@pytest.mark.parametrize(("name", "field"), [("rebuild", "maxRate"), ("switch", "to")])
def test_a_number_that_may_be_left_out_may_be_null(name: str, field: str) -> None:
    body = BODIES[name].of_json(json.dumps({**LEAST[name], field: None}).encode())

    assert getattr(body, field) is None


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(
    "value",
    [True, ["balance"], {}, 1.5],
)
def test_the_name_of_a_read_model_is_a_text(name: str, value: Any) -> None:
    assert refusal(name, model=value).startswith("model ")


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("reason", ["", " ", " x", "x\n", "\0", "\ud800", 1, ["x"], "x" * (MAX_REASON_CHARACTERS + 1)])
def test_a_reason_must_be_readable(name: str, reason: Any) -> None:
    assert refusal(name, reason=reason).startswith("reason must be a text of 1 to 200 characters")


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("body", [b"", b"x", b"[]", b'"balance"', b"\xff", b'{"model": "a", "model": "b"}', b"null"])
def test_a_body_that_is_no_json_object_is_answered_400_and_changes_nothing(name: str, body: bytes) -> None:
    log = Log()

    ((status, _),) = asked(log, ("POST", f".{name}", body))

    assert (status, log.now.number) == (400, 1)


def test_the_generations_are_shown_from_the_rebuild_to_the_drop() -> None:
    log = Log()
    shown = TypeAdapter(ModelGenerations)

    first, begun = asked(
        log,
        ("GET", "/balance/generations", None),
        ("POST", ".rebuild", {"model": "balance", "switch": "never", "keepOld": 60, "maxRate": 7, "reason": "lost"}),
    )
    building = log.now.building
    log.now = log.now.compared(2, Comparison(3, 1))
    ready, switched = asked(
        log,
        ("GET", "/balance/generations", None),
        ("POST", ".switch", {"model": "balance", "to": 2, "reason": "it is right"}),
    )
    log.now = log.now.settled()
    (dropped,) = asked(log, ("POST", ".drop", {"model": "balance", "generation": 1, "reason": "not needed"}))

    answers = [first, begun, ready, switched, dropped]
    assert [answer.status for answer in answers] == [200, 202, 200, 202, 202]
    for answer in answers:
        shown.validate_python(answer.json)
    assert building == Building(2, Switch.NEVER, 60, 7)
    assert [[(one["generation"], one["status"]) for one in answer.json["generations"]] for answer in answers] == [
        [(1, "serving")],
        [(1, "serving"), (2, "building")],
        [(1, "serving"), (2, "ready")],
        [(1, "kept"), (2, "serving")],
        [(2, "serving")],
    ]
    assert [(answer.json["action"], answer.json["reason"]) for answer in answers] == [
        ("begin", "it is hosted for the first time"),
        ("rebuild", "lost"),
        ("compare", ""),
        ("switch", "it is right"),
        ("drop", "not needed"),
    ]
    assert [answer.json["switch"] for answer in answers] == [None, "never", "never", None, None]
    assert ready.json["comparison"] == {"equal": 3, "different": 1, "onlyServing": 0, "onlyBuilding": 0}
    assert [answer.json["keptUntil"] is None for answer in answers] == [True, True, True, False, True]
    assert switched.json["keptUntil"].endswith("Z")
    # Without tokens, the address that asked.
    assert [answer.json["by"] for answer in answers] == ["", "127.0.0.1", "", "127.0.0.1", "127.0.0.1"]


def test_a_transition_that_is_not_possible_is_answered_409_with_the_reason_and_changes_nothing() -> None:
    log = Log()
    (_,) = asked(log, ("POST", ".rebuild", LEAST["rebuild"]))
    before = log.now

    again, unknown, serving = asked(
        log,
        ("POST", ".rebuild", LEAST["rebuild"]),
        ("POST", ".switch", {**LEAST["switch"], "to": 3}),
        ("POST", ".drop", {**LEAST["drop"], "generation": 1}),
    )

    assert [answer.status for answer in (again, unknown, serving)] == [409, 409, 409]
    assert again.detail == "generation 2 of 'balance' is being built: wait for it, or drop it first"
    assert unknown.detail == "'balance' has no generation 3 now"
    assert serving.detail == "generation 1 of 'balance' serves: switch to another one first"
    assert log.now is before


@pytest.mark.shows("lossy-topics")
def test_a_rebuild_from_a_lossy_topic_is_answered_409_with_the_reason() -> None:
    log = Log()
    log.is_lossy = True

    (refused,) = asked(log, ("POST", ".rebuild", LEAST["rebuild"]))

    assert (refused.status, refused.detail) == (409, "the source topic 'balance' is compacted")
    assert log.now.building is None


def test_a_switch_that_loses_something_is_answered_409_and_anyway_keeps_what_is_lost_with_the_reason() -> None:
    log = Log()
    log.now = log.now.rebuilt(DECLARED, Switch.NEVER, 60, None, "", "").compared(2, Comparison(3))
    log.lost = "generation 2 begins at offset 500"

    refused, off = (
        asked(log, ("POST", ".switch", {**LEAST["switch"], **anyway}))[0] for anyway in ({}, {"anyway": False})
    )
    assert [(one.status, one.detail) for one in (refused, off)] == [(409, log.lost)] * 2
    assert log.now.serving == 1
    (done,) = asked(log, ("POST", ".switch", {**LEAST["switch"], "anyway": True}))

    assert (done.status, log.now.serving, log.now.reason) == (202, 2, f"r (anyway: {log.lost})")


def test_the_checks_of_a_request_are_made_before_other_writers_are_fenced() -> None:
    log = Log()
    log.now = log.now.rebuilt(DECLARED, Switch.NEVER, 60, None, "", "").compared(2, Comparison(3))
    log.lost = "generation 2 begins at offset 500"

    (refused,) = asked(log, ("POST", ".switch", LEAST["switch"]))

    assert (refused.status, log.writes) == (409, 0)


def test_a_request_checks_each_state_of_the_generations_once() -> None:
    log = Log()
    log.now = log.now.rebuilt(DECLARED, Switch.NEVER, 60, None, "", "").compared(2, Comparison(3))

    (done,) = asked(log, ("POST", ".switch", LEAST["switch"]))

    assert (done.status, log.checks) == (202, 1)


@pytest.mark.parametrize("value", ["true", "", 1, 0, None, [], {}])
def test_anyway_is_true_or_false(value: Any) -> None:
    body = json.dumps({**LEAST["switch"], "anyway": value}).encode()

    with pytest.raises(InvalidInputError, match="anyway must be true or false"):
        SwitchBody.of_json(body)


def test_a_read_model_that_keeps_no_states_here_is_answered_404() -> None:
    log = Log()
    requests = [
        *(("POST", f".{name}", {**body, "model": "another"}) for name, body in LEAST.items()),
        ("GET", "/another/generations", None),
        ("GET", "/another/differences", None),
    ]

    answers = asked(log, *requests)

    assert {(answer.status, answer.detail) for answer in answers} == {
        (404, "this instance does not host a read model 'another' that keeps states")
    }
    assert log.now.number == 1


def test_a_broker_that_does_not_respond_is_answered_503() -> None:
    log = Log()
    log.fails_with = RetriableError("the broker did not confirm in time")

    answers = asked(log, *(("POST", f".{name}", body) for name, body in LEAST.items()))

    assert {answer.status for answer in answers} == {503}
    assert {answer.detail for answer in answers} == {"the broker did not confirm in time"}


def test_a_starting_instance_answers_503() -> None:
    requests = [("POST", f".{name}", body) for name, body in LEAST.items()]

    answers = asked(None, *requests, ("GET", "/balance/generations", None), ("GET", "/balance/differences", None))

    assert {(answer.status, answer.detail) for answer in answers} == {(503, "this instance is starting")}


def test_without_a_rebuild_there_are_no_differences() -> None:
    ((status, found),) = asked(Log(), ("GET", "/balance/differences", None))

    assert (status, found) == (200, {"differences": []})


@pytest.mark.shows("no-500")
def test_an_instance_that_does_not_host_the_new_generation_yet_knows_no_differences() -> None:
    log = Log()

    _, answer = asked(log, ("POST", ".rebuild", LEAST["rebuild"]), ("GET", "/balance/differences", None))

    assert (answer.status, answer.json) == (200, {"differences": []})


def test_what_changes_generations_or_shows_states_needs_the_scope_of_operators() -> None:
    scopes = {route.name: {scope.name for scope in route.scopes} for route in GENERATION_ROUTES}

    assert scopes == {
        "generationsOfModel": {"READ"},
        "differencesOfModel": {"OPERATE"},
        "rebuildModel": {"OPERATE"},
        "switchModel": {"OPERATE"},
        "dropModel": {"OPERATE"},
    }


DIGEST = "a" * 64


@pytest.mark.shows("load")
def test_a_generation_begins_with_files_that_fit_and_the_topic_names_them() -> None:
    log = Log()
    given = {"model": "balance", "files": "/shared", "digest": DIGEST, "keepFiles": True}
    lone, wrong, begun = asked(
        log,
        ("POST", ".rebuild", {"model": "balance", "files": "/shared"}),
        ("POST", ".rebuild", {**given, "digest": "0" * 64}),
        ("POST", ".rebuild", given),
    )

    assert (lone.status, lone.detail) == (400, "files and digest belong together: give both, or none")
    assert (wrong.status, wrong.detail) == (409, "the files do not fit")
    assert begun.status == 202
    assert log.now.loads == (Load(2, "/shared", DIGEST, keeps_files=True),)
    assert [one["loaded"] for one in begun.json["generations"]] == [None, 0.0]


def test_all_instances_are_asked_whether_they_see_the_folder() -> None:
    class Lone:
        async def get(self, peer: Peer, path: str, parameters: dict[str, str], *_: object, **__: object) -> Any:
            if peer.address == "gone:1":
                raise RetriableError("it does not answer")
            body = b'{"problems": [{"applicationServer": "x", "problem": "no folder"}]}'
            assert (path, parameters) == ("/api/models/balance/files", {"files": "/mine"})
            return Answered(200, body, "application/json", {})

    peers = [Peer("gone:1", "i"), Peer("other:1", "i")]
    files = PeerFiles(lambda _model: peers, cast("Any", Lone()), "here:1")
    found = asyncio.run(files.ask("balance", "/mine", "me"))

    assert [(one.application_server, one.problem) for one in found] == [
        ("gone:1", "it does not answer"),
        ("other:1", "no folder"),
    ]
