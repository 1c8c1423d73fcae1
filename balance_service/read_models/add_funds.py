"""The command that adds funds to a customer: `POST /api/balance.addFunds`, and its checks."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any

from aiohttp import web

from balance_service.errors import InvalidInputError, RetriableError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem
from balance_service.http.answer import unavailable as unavailable_now
from balance_service.http.api.answers import problem, unavailable
from balance_service.http.api.declarations import Answer, Body, Component, Content, Header
from balance_service.http.api.route import Route, Tag
from balance_service.http.api.schemas import KEY, POSITION, text
from balance_service.http.bodies import JsonNumber, json_object
from balance_service.http.commands import Command
from balance_service.http.given import Given
from balance_service.http.parameters import IDEMPOTENCY_KEY
from balance_service.kafka.clients import producer_config
from balance_service.model.keys import checked_key
from balance_service.read_models.funds_publisher import FundsAddedPublisher

if TYPE_CHECKING:
    from balance_service.http.commands import Writing

PATH = "/api/balance.addFunds"
_EXAMPLE = '{"customerId": "c1", "amount": 12.34}'
_JSON_NUMBER = re.compile(r"[0-9]{1,32}(?:\.[0-9]{1,32})?(?:[eE][+-]?[0-9]{1,3})?")
# Digits are checked before a number is made of them: Decimal takes "Infinity", "1_000" and exponents of any size.
_AMOUNT = re.compile(r"0*([0-9]{1,16})(?:\.([0-9]{1,2})0*)?")
_CENTS = Decimal("0.01")
_EXACT = Context(prec=40, traps=[Inexact, InvalidOperation])
AMOUNT_RULE = "amount must be a number or a decimal string, above 0, of at most 16 digits before the point and 2 after"


@dataclass(frozen=True, slots=True)
class AddFunds:
    """A checked command."""

    customer_id: str
    amount: Decimal


def amount_of(digits: str) -> Decimal:
    """An exact amount of money, above 0.

    Raises:
        InvalidInputError: the text is not one.
    """
    if not _AMOUNT.fullmatch(digits) or Decimal(digits) <= 0:
        raise InvalidInputError(AMOUNT_RULE)
    return Decimal(digits).quantize(_CENTS, context=_EXACT)


def add_funds(body: bytes) -> AddFunds:
    """The command in a request's body. Raises InvalidInputError."""
    parsed = json_object(body, _EXAMPLE)
    customer_id = parsed.get("customerId")
    if isinstance(customer_id, JsonNumber) or not isinstance(customer_id, str):
        raise InvalidInputError("customerId is missing" if customer_id is None else "customerId is not a string")
    return AddFunds(checked_key(customer_id, "customerId"), _amount(parsed.get("amount")))


def _amount(value: Any) -> Decimal:
    if not isinstance(value, str):
        raise InvalidInputError("amount is missing" if value is None else AMOUNT_RULE)
    # A number may have an exponent, a string may not.
    if isinstance(value, JsonNumber) and _JSON_NUMBER.fullmatch(value):
        return amount_of(format(Decimal(value), "f"))
    return amount_of(value)


class AddingFunds:
    """Takes the command over HTTP."""

    def __init__(self, writing: Writing) -> None:
        """Raises RetriableError while the registry cannot be reached, ConfigurationError for a wrong property."""
        settings = writing.settings
        self._metrics = writing.metrics
        self._publisher = FundsAddedPublisher(
            producer_config(settings),
            writing.registry,
            settings.topic,
            settings.read_timeout_seconds,
            writing.tracer,
        )

    async def answer(self, request: web.Request) -> web.Response:
        """Append `FundsAdded`, and answer with the position at which it will be visible."""
        began, status = time.perf_counter(), 500
        try:
            key = Given(request).optional(IDEMPOTENCY_KEY)
            command = add_funds(await request.read())
            try:
                partition, offset = await self._publisher.publish(command.customer_id, command.amount, key)
            except RetriableError as error:
                raise unavailable_now(str(error)) from error
            status = 202
        except InvalidInputError:
            status = 400
            raise
        except Problem as problem:
            status = problem.status
            raise
        finally:
            self._metrics.command_seconds.labels(str(status)).observe(time.perf_counter() - began)
        return web.Response(status=202, headers={"Balance-Position": f"{partition}:{offset + 1}"})

    def close(self) -> None:
        """Wait, within a bound, for what is under way."""
        self._publisher.close()


_AMOUNT_SCHEMA = Component(
    "schemas",
    "Amount",
    {
        "description": f"Money, exactly: {AMOUNT_RULE.removeprefix('amount must be ')} (zeros at either end do not "
        "count). A number keeps its digits: it never passes through a binary float here.",
        "oneOf": [
            {
                "title": "Number",
                "type": "number",
                "exclusiveMinimum": 0,
                "exclusiveMaximum": 10**16,
                "multipleOf": 0.01,
            },
            text(
                "No sign, no exponent.",
                title="Decimal string",
                pattern=r"^(?=.*[1-9])0*[0-9]{1,16}(\.[0-9]{1,2}0*)?$",
            ),
        ],
        "examples": [12.34, "12.34"],
    },
)
_BODY = Component(
    "schemas",
    "AddFunds",
    {
        "type": "object",
        "required": ["customerId", "amount"],
        "properties": {"customerId": KEY, "amount": _AMOUNT_SCHEMA},
    },
)
_ROUTE = Route(
    name="addFunds",
    method="POST",
    path=PATH,
    answer=lambda handlers, request: handlers.command("addFunds", request),
    tag=Tag("balance", "Commands."),
    scopes=frozenset({Scope.ADD}),
    summary="Add funds to a customer",
    description="Appends one `FundsAdded` event, and answers when all in-sync replicas have it. Sent twice, it adds "
    "twice, unless both name the same `Idempotency-Key`: then only the first counts. After a 503 without a key, read "
    "in its `detail` whether the event may have been written.",
    parameters=(IDEMPOTENCY_KEY,),
    body=Body(
        description="At most 16 KiB of JSON.",
        content=Content(
            schema=_BODY,
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

ADD_FUNDS = Command(_ROUTE, AddingFunds)
