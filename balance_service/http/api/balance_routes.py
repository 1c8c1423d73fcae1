"""The routes of the balance: one query, one command."""

from __future__ import annotations

from balance_service.commands.add_funds import AMOUNT_RULE
from balance_service.http import commands, queries
from balance_service.http.access.clients import Scope
from balance_service.http.api.answers import PROVENANCE, ok, problem, unavailable
from balance_service.http.api.declarations import Answer, Body, Content, Header
from balance_service.http.api.route import Route, Tag
from balance_service.http.api.schemas import ADD_FUNDS, BALANCE, POSITION
from balance_service.http.parameters import CUSTOMER_ID, IDEMPOTENCY_KEY, MAX_LAG, MIN_POSITION

_BALANCE = Tag("balance", "Commands and queries.")

_GET_BALANCE = Route(
    name="getBalance",
    method="GET",
    path=queries.PATH,
    answer=lambda handlers, request: handlers.get_balance(request),
    tag=_BALANCE,
    scopes=frozenset({Scope.READ}),
    is_forwarded=True,
    summary="A customer's balance",
    description="Answered from the state store of the instance that owns the customer's partition; the headers name "
    "it. Without `minPosition` the answer is the owner's newest, which may lack the last events; `Balance-Lag` says "
    "how many. With `maxLag` or `minPosition` a standby may answer too, and says so in `Balance-Role`. Reads are "
    "monotonic per instance: it never answers from an earlier position than before, unless the answering server, "
    "its role or its epoch has changed.",
    parameters=(CUSTOMER_ID, MIN_POSITION, MAX_LAG),
    answers=(
        ok("The balance, with exactly its digits.", BALANCE, {"amount": 12.34}, PROVENANCE),
        problem(
            400,
            "`customerId` is missing, empty, repeated, too long or malformed; `minPosition` is malformed, repeated or "
            "of another partition; or `maxLag` is malformed or repeated.",
            {
                "missing": ("No customer named", "customerId is missing"),
                "partition": (
                    "A position of another partition",
                    "minPosition is of partition 0, the customer's is 1",
                ),
            },
        ),
        problem(
            403,
            "Only between instances: the header `Balance-Forwarded` lacks the proof that `BALANCE_PEER_SECRET` asks "
            "for.",
            {
                "unproven": (
                    "A mark without proof",
                    "a forwarded query needs a proof; give all instances the same BALANCE_PEER_SECRET",
                )
            },
        ),
        problem(
            404,
            "No event has named this customer, as far as the answering instance has read: `Balance-Position` says how "
            "far.",
            {"unknown": ("A customer without events", "no such customer")},
            PROVENANCE,
        ),
        problem(
            421,
            "Only between instances: a query that a peer has forwarded (marked by the header `Balance-Forwarded`) "
            "reached an instance that does not own the partition.",
            {"misdirected": ("Ownership has moved", "localhost:5052 does not own partition 1")},
        ),
        unavailable(
            "No instance can answer now: the owner is starting, restoring, changing or out of reach, `minPosition` was "
            "not reached in time, or none is as near as `maxLag` wants. This says nothing about whether the customer "
            "exists.",
            {
                "behind": ("minPosition not reached in time", "position 1:42 was not reached in time"),
                "ownerless": ("The partition is changing hands", "nobody is known to own partition 1 now"),
            },
        ),
    ),
)

_ADD_FUNDS = Route(
    name="addFunds",
    method="POST",
    path=commands.PATH,
    answer=lambda handlers, request: handlers.add_funds(request),
    tag=_BALANCE,
    scopes=frozenset({Scope.ADD}),
    summary="Add funds to a customer",
    description="Appends one `FundsAdded` event, and answers when all in-sync replicas have it. Sent twice, it adds "
    "twice, unless both name the same `Idempotency-Key`: then only the first counts. After a 503 without a key, read "
    "in its `detail` whether the event may have been written.",
    parameters=(IDEMPOTENCY_KEY,),
    body=Body(
        description="At most 16 KiB of JSON.",
        content=Content(
            schema=ADD_FUNDS,
            examples={
                "number": ("Amount as a number", {"customerId": "c1", "amount": 12.34}),
                "string": (
                    "Amount as a string, for languages whose numbers lose digits",
                    {"customerId": "c1", "amount": "9007199254740993.01"},
                ),
            },
        ),
    ),
    answers=(
        Answer(
            status=202,
            description="The event is in the topic. The body is empty.",
            headers=(
                Header(
                    name="Balance-Position",
                    component="Balance-Position-Written",
                    description="`partition:offset` from which the event is visible; pass it to `getBalance` as "
                    "`minPosition`.",
                    schema=POSITION,
                    example="1:42",
                ),
            ),
        ),
        problem(
            400,
            "The body is not such a JSON object, or `Idempotency-Key` is malformed or repeated. Nothing was written.",
            {
                "body": ("Not JSON", 'the body is not JSON; send {"customerId": "c1", "amount": 12.34}'),
                "amount": ("An amount of zero", AMOUNT_RULE),
            },
        ),
        problem(
            413,
            "The body has more than 16 KiB. Nothing was written.",
            {"large": ("A body of 17,000 bytes", "Maximum request body size 16384 exceeded.")},
        ),
        unavailable(
            "Not acknowledged. `detail` says whether the event was certainly not written (send it again) or may have "
            "been written (compare the balance first).",
            {
                "not_written": (
                    "Safe to send again",
                    "this instance is starting; the event was certainly not written",
                ),
                "unknown": (
                    "Compare the balance first",
                    "the event may have been written: Local: Message timed out",
                ),
            },
        ),
    ),
)

BALANCE_ROUTES = (_GET_BALANCE, _ADD_FUNDS)
