"""The routes below `/api/models`, and what they answer with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from balance_service import api
from balance_service.http.access.clients import Scope
from balance_service.http.model_queries import (
    ChangesParameters,
    CompositeKeyParameters,
    CountParameters,
    EntriesParameters,
    ModelKeyParameters,
    ModelParameters,
    ModelQueries,
    TopParameters,
)
from balance_service.http.route import (
    GENERATION,
    MISDIRECTED,
    PROVENANCE,
    Count,
    Header,
    Response,
    Route,
    Tag,
    closed,
    ok,
    problem,
    retry_later,
)
from balance_service.http.streams.link import PATH as PEER_PATH
from balance_service.http.streams.link import PeerStreams
from balance_service.model.flow import EdgeKind, NodeKind  # noqa: TC001  # pydantic reads the annotations

if TYPE_CHECKING:
    from balance_service.http.route import Handle


@closed
class ModelDescription(TypedDict):
    name: str
    source: str
    """The topic that it folds, or the first of several."""
    sources: NotRequired[list[str]]
    """The topics that it folds, if it declares `sources`."""
    key: str | list[str]
    """The column of the keys; the columns of composite keys; empty if the read model keeps no states."""
    fields: dict[str, str]
    """The fields of its answers, with their types."""


@closed
class Models(TypedDict):
    models: list[ModelDescription]


@closed
class FlowNode(TypedDict):
    id: str
    kind: NodeKind
    """A topic, a stage of the read model's work, or the states that the last stage keeps."""
    name: str


@closed
class FlowEdge(TypedDict):
    source: str
    """The id of a node."""
    target: str
    """The id of the node that it leads to."""
    kind: EdgeKind
    """Records that a stage reads or writes, rows that it joins, or states that it keeps."""
    label: str
    """The records and their conditions, or the field that rows are found by; may be empty."""


@closed
class ModelFlow(TypedDict):
    """How events flow, in the order of the stages."""

    nodes: list[FlowNode]
    edges: list[FlowEdge]
    plans: NotRequired[list[str]]
    """Of a model with a `transform`: what it does, for each source, as `balance-service explain` prints it."""


@closed
class Entry(TypedDict):
    key: str | dict[str, str | int]
    """Its columns, if the key is composite."""
    value: Any
    """The read model's answer for the key; `/api/models` lists its fields."""


@closed
class EntriesPage(TypedDict):
    entries: list[Entry]
    next: str | None


@closed
class TopEntries(TypedDict):
    entries: list[Entry]
    next: NotRequired[str]
    """The last entry's key, if the answer was cut off because it exceeds 1 MiB."""


@closed
class KeyCount(TypedDict):
    count: Count
    """Keys that have a state."""


MODELS = Tag("models", "Queries for any read model.")


def _by_partition(name: str, description: str, item: str, example: str) -> Header:
    return Header(
        name=name,
        description=f"For each partition, {description}: `partition:value`, separated by commas.",
        type=Annotated[str, Field(pattern=f"^[0-9]+:{item}(?:,[0-9]+:{item})*$")],
        example=example,
        is_required=False,
    )


SCAN_PROVENANCE = (
    replace(PROVENANCE[0], description="`host:port` of the instance that collected the answer."),
    _by_partition(
        "Balance-Position", "the offset below which the answer includes exactly its events", "[0-9]+", "0:12"
    ),
    _by_partition("Balance-Epoch", "the fencing number of the task that answered", "[0-9]+", "0:3"),
    _by_partition("Balance-Role", "the role of that task", "(?:active|standby)", "0:active"),
    _by_partition("Balance-Lag", "the records that the answer does not include yet, if known", "[0-9]+", "0:0"),
    replace(GENERATION, is_required=False),
    Header(
        name="Balance-Missing",
        description="The partitions that the answer lacks, if the query allows that.",
        type=Annotated[str, Field(pattern="^[0-9]+(?:,[0-9]+)*$")],
        example="1",
        is_required=False,
    ),
)
_FLOW = {
    "nodes": [
        {"id": "n0", "kind": "topic", "name": "balance"},
        {"id": "n1", "kind": "stage", "name": "balance"},
        {"id": "n2", "kind": "states", "name": "Balance"},
    ],
    "edges": [
        {"source": "n0", "target": "n1", "kind": "records", "label": ""},
        {"source": "n1", "target": "n2", "kind": "states", "label": ""},
    ],
}
_EXAMPLE = {"entries": [{"key": "c1", "value": {"amount": 12.34}}], "next": None}


def _scan(
    name: str,
    handle: Handle,
    *,
    summary: str,
    description: str,
    parameters: type[CountParameters],
    body: Any,
    example: object,
) -> Route:
    """A query for all keys of a read model."""
    return Route(
        name=f"{name}OfModel",
        path=f"{api.MODELS}/{{model}}/{name}",
        handle=handle,
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        summary=summary,
        description=f"{description} The instance queries every instance that owns a partition. Each partition is read "
        "at one position, which the headers name; the answer as a whole is not a snapshot.",
        parameters=parameters,
        responses=(
            ok("The answer.", body, example, SCAN_PROVENANCE),
            problem(400, "A parameter is missing, malformed or repeated."),
            problem(
                404,
                "There is no such read model.",
                model=(
                    "A misspelled name",
                    "there is no read model 'balances' here; /api/models lists all read models",
                ),
            ),
            MISDIRECTED,
            retry_later(
                "A partition cannot be read now, and the query does not set `partial`; or the client has too many "
                "scans in progress.",
                missing=("A partition is changing hands", "no instance could answer for partitions 1"),
                share=(
                    "Too many scans of one client",
                    "this client's share of scans is used up: 2 of its scans are in progress here and 32 wait; "
                    "retry when some are finished",
                ),
            ),
        ),
    )


MODEL_ROUTES = (
    Route(
        name="listModels",
        path=api.MODELS,
        handle=lambda handlers, request: handlers.of(ModelQueries).list(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        summary="The read models",
        description="The read models that this instance and its peers host, each with the fields of its answers.",
        responses=(
            ok(
                "The read models.",
                Models,
                {
                    "models": [
                        {
                            "name": "balance",
                            "source": "balance",
                            "key": "customerId",
                            "fields": {"amount": "decimal(38,2)"},
                        }
                    ]
                },
            ),
            retry_later("The instance is starting."),
        ),
    ),
    Route(
        name="getFlowOfModel",
        path=f"{api.MODELS}/{{model}}/flow",
        handle=lambda handlers, request: handlers.of(ModelQueries).flow(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        summary="The flow of a read model's events",
        description="From its source topic over its stages to its states and outputs, of a read model that this "
        "instance hosts. `balance-service flow` draws the same.",
        parameters=ModelParameters,
        responses=(
            ok("Nodes and edges.", ModelFlow, _FLOW),
            problem(404, "This instance does not host that read model."),
            retry_later("The instance is starting."),
        ),
    ),
    Route(
        name="getKeyOfModel",
        path=f"{api.MODELS}/{{model}}/keys/{{key}}",
        handle=lambda handlers, request: handlers.of(ModelQueries).key_of_any(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        streams="asked",
        summary="The state of one key",
        description="Answers as `getBalance` does, for any read model. With `Accept: text/event-stream`, the answer is "
        "a stream of events: the key's state now, and after each change that the owner commits. A reader that is "
        "slower than the changes gets the newest state. `value` is null where the key has no state. The `id` names the "
        "generation, the position, and the changelog's topic id. After a switch, the stream goes on with the state of "
        "the generation that serves; one whose request names a generation ends with an event `end` when that is "
        "dropped. A comment names the owner, at first and when the partition has moved; a comment comes after 15 s "
        "without an event.",
        parameters=ModelKeyParameters,
        responses=(
            ok(
                "The key and its value.",
                Entry,
                {"key": "c1", "value": {"amount": 12.34}},
                PROVENANCE,
                events=": partition 0 epoch 3 at localhost:5051\n\n"
                "event: state\nid: 1/0:12@Xv7Qd0iOSDuBJ1kzTbGSXA\n"
                'data: {"key":"c1","value":{"amount":12.34},"generation":1}\n\n',
            ),
            problem(
                400,
                "The key, `minPosition`, `maxLag` or `maxAge` is malformed, or `minPosition` is of another partition.",
            ),
            problem(404, "There is no such read model, or the key has no state."),
            MISDIRECTED,
            retry_later("No instance can answer now."),
        ),
    ),
    Route(
        name="getCompositeKeyOfModel",
        path=f"{api.MODELS}/{{model}}/keys",
        handle=lambda handlers, request: handlers.of(ModelQueries).composite_key_of_any(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        streams="asked",
        summary="The state of one composite key",
        description="As `getKeyOfModel`: `?card=c1&day=20`.",
        parameters=CompositeKeyParameters,
        responses=(
            ok(
                "The key and its value.",
                Entry,
                {"key": {"card": "c1", "day": 20}, "value": {"amount": 12.34}},
                PROVENANCE,
                events=": partition 0 epoch 3 at localhost:5051\n\n"
                "event: state\nid: 1/0:12@Xv7Qd0iOSDuBJ1kzTbGSXA\n"
                'data: {"key":{"card":"c1","day":20},"value":{"amount":12.34},"generation":1}\n\n',
            ),
            problem(
                400,
                "A column is missing, malformed or unknown, or the key has one column; `minPosition`, `maxLag` or "
                "`maxAge` is malformed, or `minPosition` is of another partition.",
            ),
            problem(404, "There is no such read model, or the key has no state."),
            MISDIRECTED,
            retry_later("No instance can answer now."),
        ),
    ),
    Route(
        name="followModel",
        path=f"{api.MODELS}/{{model}}/changes",
        handle=lambda handlers, request: handlers.of(ModelQueries).changes(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        streams="always",
        summary="The states of a range of keys, and their changes",
        description="A stream of events. `snapshot-begin` precedes the states of all keys in the range, "
        "`snapshot-end` follows them, and then comes the state of each key that changes: `value` is null where a state "
        "was deleted. Keys are in no order. The `id` names the generation, the positions of all partitions that the "
        "client has reached, and the topic id of their changelog. With `Last-Event-ID`, the stream goes on from there "
        "if the changes since are still in memory; otherwise, and after a rebuild, a switch of generations or a move "
        "of a partition, or for a reader that is too slow, it begins again with a snapshot. A client then drops the "
        "keys that the new snapshot lacks.",
        parameters=ChangesParameters,
        responses=(
            Response(
                status=200,
                description="The stream. Comments, and a generation that the request names, are as with one key.",
                events='event: snapshot-begin\nid: \ndata: {"generation":1}\n\n'
                'event: state\ndata: {"key":"c1","value":{"amount":12.34},"generation":1}\n\n'
                'event: snapshot-end\nid: 1/0:12,1:40@Xv7Qd0iOSDuBJ1kzTbGSXA\ndata: {"generation":1}\n\n'
                "event: state\nid: 1/0:13,1:40@Xv7Qd0iOSDuBJ1kzTbGSXA\n"
                'data: {"key":"c1","value":{"amount":13.34},"generation":1}\n\n',
            ),
            problem(400, "A parameter is malformed or repeated."),
            problem(404, "There is no such read model."),
            retry_later("The instance is starting, or has as many streams open as `BALANCE_MAX_STREAMS` allows."),
        ),
    ),
    Route(
        name="followPeer",
        path=PEER_PATH,
        handle=lambda handlers, request: handlers.of(PeerStreams).answer(request),
        tag=MODELS,
        scopes=frozenset({Scope.READ}),
        is_forwarded=True,
        streams="always",
        summary="Only between instances: a connection for the changes of partitions",
        description="A WebSocket (RFC 6455), over which an instance follows partitions of this one for its clients.",
        responses=(
            Response(status=101, description="The connection."),
            problem(400, "The request asks for no WebSocket."),
            problem(403, "The request does not come from an instance."),
            retry_later("The instance is starting."),
        ),
    ),
    _scan(
        "entries",
        lambda handlers, request: handlers.of(ModelQueries).entries(request),
        summary="Keys and their values",
        description="In key order (text by its bytes, numbers as numbers, composite keys by column), both ends "
        "inclusive.",
        parameters=EntriesParameters,
        body=EntriesPage,
        example=_EXAMPLE,
    ),
    _scan(
        "count",
        lambda handlers, request: handlers.of(ModelQueries).count(request),
        summary="The number of keys",
        description="Each commit maintains the number, so the answer is exact and costs no scan.",
        parameters=CountParameters,
        body=KeyCount,
        example={"count": 3},
    ),
    _scan(
        "top",
        lambda handlers, request: handlers.of(ModelQueries).top(request),
        summary="The keys with the greatest values",
        description="The keys with the greatest value of a field; equal values in key order. Reads every key, so it "
        "takes long if there are many.",
        parameters=TopParameters,
        body=TopEntries,
        example={"entries": _EXAMPLE["entries"]},
    ),
)
