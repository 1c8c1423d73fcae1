"""The command `POST /api/balance.addFunds`: its validation, and the producer that appends `FundsAdded`."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import uuid
from datetime import UTC, datetime
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from aiohttp import web
from confluent_kafka import KafkaError, KafkaException
from opentelemetry.trace import SpanKind
from pydantic import Field, PlainValidator, WithJsonSchema
from typing_extensions import TypeAliasType

from balance_service import api
from balance_service.avro.codec import AvroCodec
from balance_service.avro.schemas import load_schema, subject_of
from balance_service.errors import InvalidInputError, RetriableError
from balance_service.http.access.clients import Scope
from balance_service.http.answer import Problem, unavailable
from balance_service.http.commands import Command
from balance_service.http.requests import POSITION_PATTERN, JsonBody, JsonNumber, Key, Parameters
from balance_service.http.route import Header, RequestBody, Response, Route, Tag, problem, retry_later
from balance_service.kafka.clients import ConnectionErrors, not_authorized, producer_config
from balance_service.kafka.messages import IDEMPOTENCY_HEADER
from balance_service.kafka.producers import RecoveringProducer
from balance_service.model.keys import checked_key
from balance_service.observability.tracing import UNTRACED, W3C, open_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from confluent_kafka import Message
    from opentelemetry.trace import Tracer

    from balance_service.avro.registry import SchemaRegistry
    from balance_service.http.commands import CommandContext
    from balance_service.kafka.clients import ClientConfig

_JSON_NUMBER = re.compile(r"[0-9]{1,32}(?:\.[0-9]{1,32})?(?:[eE][+-]?[0-9]{1,3})?")
# Checked before a Decimal is made: Decimal accepts "Infinity", "1_000" and exponents of any size.
_AMOUNT = re.compile(r"0*([0-9]{1,16})(?:\.([0-9]{1,2})0*)?")
_CENTS = Decimal("0.01")
_EXACT = Context(prec=40, traps=[Inexact, InvalidOperation])
AMOUNT_RULE = "amount must be a number or a decimal string, above 0, of at most 16 digits before the point and 2 after"
_POLL_SECONDS = 0.1
# The producer may retry, and reports the last error. These errors would have occurred at the first attempt too.
_CERTAINLY_NOT_WRITTEN = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
}

_WITHOUT_POSITION = (
    "the event was written, at a position that is not known; with the same Idempotency-Key, another attempt counts "
    "once, and has a position; without a key, do not send it again: it would count twice"
)
Delivered = tuple[int, int]
"""Partition and offset of a record."""


def amount_of(digits: str) -> Decimal:
    """Parses an exact amount of money above 0. Raises InvalidInputError."""
    if not _AMOUNT.fullmatch(digits) or Decimal(digits) <= 0:
        raise InvalidInputError(AMOUNT_RULE)
    return Decimal(digits).quantize(_CENTS, context=_EXACT)


def idempotency_key_of(text: str) -> bytes:
    """Parses the key that identifies a repeated command. Raises InvalidInputError."""
    if not re.fullmatch(api.IDEMPOTENCY_KEY_PATTERN, text):
        raise InvalidInputError("Idempotency-Key must have 1 to 128 visible ASCII characters")
    return text.encode()


def _customer_id(value: Any) -> str:
    if isinstance(value, JsonNumber) or not isinstance(value, str):
        raise InvalidInputError("customerId is missing" if value is None else "customerId is not a string")
    return checked_key(value, "customerId")


def _amount(value: Any) -> Decimal:
    if not isinstance(value, str):
        raise InvalidInputError("amount is missing" if value is None else AMOUNT_RULE)
    # A number may have an exponent, a string may not.
    if isinstance(value, JsonNumber) and _JSON_NUMBER.fullmatch(value):
        return amount_of(format(Decimal(value), "f"))
    return amount_of(value)


Amount = TypeAliasType(
    "Amount",
    Annotated[
        Any,
        WithJsonSchema(
            {
                "description": f"Money, exactly: {AMOUNT_RULE.removeprefix('amount must be ')} (leading and trailing "
                "zeros do not count). A number keeps its digits: the service never converts it to a binary float.",
                "oneOf": [
                    {
                        "title": "Number",
                        "type": "number",
                        "exclusiveMinimum": 0,
                        "exclusiveMaximum": 10**16,
                        "multipleOf": 0.01,
                    },
                    {
                        "title": "Decimal string",
                        "type": "string",
                        "description": "No sign, no exponent.",
                        "pattern": r"^(?=.*[1-9])0*[0-9]{1,16}(\.[0-9]{1,2}0*)?$",
                    },
                ],
                "examples": [12.34, "12.34"],
            }
        ),
    ],
)


class AddFunds(JsonBody):
    """A customer and an amount to add."""

    example: ClassVar[str] = '{"customerId": "c1", "amount": 12.34}'

    customer_id: Annotated[str, PlainValidator(_customer_id, json_schema_input_type=Key)] = Field(alias="customerId")
    amount: Annotated[Decimal, PlainValidator(_amount, json_schema_input_type=Amount)]


class AddFundsParameters(Parameters):
    in_header: ClassVar[frozenset[str]] = frozenset({api.IDEMPOTENCY_KEY})

    idempotency_key: (
        Annotated[
            bytes,
            PlainValidator(
                idempotency_key_of,
                json_schema_input_type=Annotated[str, Field(pattern=f"^{api.IDEMPOTENCY_KEY_PATTERN}$")],
            ),
        ]
        | None
    ) = Field(
        None,
        alias=api.IDEMPOTENCY_KEY,
        description="Identifies this addition. Of several additions to one customer with the same key within "
        "`BALANCE_IDEMPOTENCY_WINDOW` (24 h by default), the service applies the first; one with another amount "
        "becomes a dead letter. Every retry is answered 202, with the position of the retry. Given at most once.",
        examples=["9b2f0c1e-order-1041"],
    )


class FundsAddedSerializer:
    """Serializes `FundsAdded`; registers its schema under the subject of topic and record (TopicRecordName)."""

    def __init__(self, registry: SchemaRegistry, topic: str) -> None:
        """Raises RetriableError if the registry does not answer."""
        schema = load_schema("FundsAdded")
        self._codec = AvroCodec(registry, subject_of(topic, schema), schema)

    def __call__(self, customer_id: str, amount: Decimal) -> bytes:
        """Returns the frame of a new event. The amount has at most 16 digits before the point and 2 after."""
        event = {"id": str(uuid.uuid4()), "occurredOn": datetime.now(UTC), "customerId": customer_id, "amount": amount}
        return self._codec.encode(event)


class FundsAddedPublisher:
    """Appends `FundsAdded` to the source topic. One thread serves delivery reports; any thread may publish."""

    def __init__(
        self,
        config: ClientConfig,
        registry: SchemaRegistry,
        topic: str,
        timeout_seconds: float,
        tracer: Tracer = UNTRACED,
    ) -> None:
        """Raises RetriableError if the registry does not answer, ConfigurationError for an invalid Kafka property."""
        self._topic = topic
        self._tracer = tracer
        self._serialize = FundsAddedSerializer(registry, topic)
        self._connection = ConnectionErrors()
        config = self._connection.watched(config)
        # 0 means no timeout.
        timeout_ms = max(1, int(timeout_seconds * 1000))
        self._producer = RecoveringProducer({**config, "message.timeout.ms": timeout_ms, "linger.ms": 0})
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="publisher", daemon=True)
        self._thread.start()

    async def publish(self, customer_id: str, amount: Decimal, idempotency_key: bytes | None = None) -> Delivered:
        """Appends one event, and waits until all in-sync replicas have it.

        Args:
            idempotency_key: of a customer's events with the same key, only the first is applied.

        Raises:
            RetriableError: the event was not acknowledged; the message says whether it may have been written.
        """
        attributes = {
            "messaging.system": "kafka",
            "messaging.operation.type": "send",
            "messaging.operation.name": "send",
            "messaging.destination.name": self._topic,
        }
        with open_span(self._tracer, f"send {self._topic}", SpanKind.PRODUCER, attributes) as span:
            partition, offset = await self._publish(customer_id, amount, idempotency_key)
            span.set_attribute("messaging.destination.partition.id", str(partition))
            span.set_attribute("messaging.kafka.offset", offset)
            return partition, offset

    async def _publish(self, customer_id: str, amount: Decimal, idempotency_key: bytes | None) -> Delivered:
        loop = asyncio.get_running_loop()
        delivered: asyncio.Future[Delivered | RetriableError] = loop.create_future()

        def settle(outcome: Delivered | RetriableError) -> None:
            if not delivered.done():
                delivered.set_result(outcome)

        headers: dict[str, str | bytes | None] = {}
        W3C.inject(headers)
        if idempotency_key is not None:
            headers[IDEMPOTENCY_HEADER] = idempotency_key
        self._produce(customer_id, amount, headers, lambda outcome: loop.call_soon_threadsafe(settle, outcome))
        outcome = await delivered
        if isinstance(outcome, RetriableError):
            raise outcome
        self._connection.accepted()
        return outcome

    def publish_and_wait(self, customer_id: str, amount: Decimal, idempotency_key: bytes | None = None) -> Delivered:
        """As `publish`, for a caller without an event loop."""
        return asyncio.run(self.publish(customer_id, amount, idempotency_key))

    def close(self) -> None:
        """Waits up to two seconds for events that are being sent."""
        self._producer.flush(2.0)
        self._stopping.set()
        self._thread.join(1.0)

    def _produce(
        self,
        customer_id: str,
        amount: Decimal,
        headers: dict[str, str | bytes | None],
        report: Callable[[Delivered | RetriableError], object],
    ) -> None:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            partition, offset = message.partition(), message.offset()
            if error is not None:
                report(self.failure_of(error))
            elif partition is None or offset is None:
                # The broker had the event from an attempt whose answer was lost, and no longer knows where it is.
                report(RetriableError(_WITHOUT_POSITION))
            else:
                report((partition, offset))

        try:
            frame = self._serialize(customer_id, amount)
            self._producer.produce(self._topic, frame, customer_id.encode(), on_delivery=on_delivery, headers=headers)
        except BufferError as error:
            raise RetriableError("the producer's queue is full; the event was certainly not written") from error
        except KafkaException as error:
            raise RetriableError(f"the event was certainly not written: {error.args[0].str()}") from error

    def _serve(self) -> None:
        while not self._stopping.is_set():
            self._producer.poll(_POLL_SECONDS)

    def failure_of(self, error: KafkaError) -> RetriableError:
        """Returns the error of an event that was not acknowledged: it says whether the event may have been written."""
        certainty = "was certainly not written" if error.code() in _CERTAINLY_NOT_WRITTEN else "may have been written"
        forbidden = not_authorized(error, f"writing to topic '{self._topic}'", f"Write on topic '{self._topic}'")
        reasons = filter(None, (str(forbidden or error.str()), self._connection.refusal))
        return RetriableError(f"the event {certainty}: {'; '.join(reasons)}")


class AddFundsHandler:
    """Handles the command over HTTP."""

    def __init__(self, context: CommandContext) -> None:
        """Raises RetriableError if the registry does not answer, ConfigurationError for an invalid Kafka property."""
        settings = context.settings
        self._metrics = context.metrics
        self._publisher = FundsAddedPublisher(
            producer_config(settings, settings.partitioner),
            context.registry,
            settings.topic,
            settings.read_timeout_seconds,
            context.tracer,
        )

    async def answer(self, request: web.Request) -> web.Response:
        """Appends `FundsAdded`, and answers with the position from which it is visible."""
        began, status = time.perf_counter(), 500
        try:
            key = AddFundsParameters.of(request).idempotency_key
            command = AddFunds.of_json(await request.read())
            try:
                partition, offset = await self._publisher.publish(command.customer_id, command.amount, key)
            except RetriableError as error:
                raise unavailable(str(error)) from error
            status = 202
        except InvalidInputError:
            status = 400
            raise
        except Problem as refusal:
            status = refusal.status
            raise
        finally:
            self._metrics.command_seconds.labels(str(status)).observe(time.perf_counter() - began)
        return web.Response(status=202, headers={api.POSITION: f"{partition}:{offset + 1}"})

    def close(self) -> None:
        self._publisher.close()


_NOT_WRITTEN = "the event was certainly not written"
_ROUTE = Route(
    name="addFunds",
    method="POST",
    path=api.ADD_FUNDS,
    handle=lambda handlers, request: handlers.of(AddFundsHandler, _NOT_WRITTEN).answer(request),
    tag=Tag("balance", "Commands."),
    scopes=frozenset({Scope.ADD}),
    summary="Add funds to a customer",
    description="Appends one `FundsAdded` event, and answers when all in-sync replicas have it. A repeated request "
    "adds again, unless both have the same `Idempotency-Key`: then only the first counts. After a 503 without a key, "
    "`detail` says whether the event may have been written, or was.",
    parameters=AddFundsParameters,
    body=RequestBody(
        description="At most 16 KiB of JSON.",
        type=AddFunds,
        examples={
            "number": ("Amount as a number", {"customerId": "c1", "amount": 12.34}),
            "string": (
                "Amount as a string, for languages whose numbers lose digits",
                {"customerId": "c1", "amount": "9007199254740993.01"},
            ),
        },
    ),
    responses=(
        Response(
            status=202,
            description="The event is in the topic. The body is empty.",
            headers=(
                Header(
                    name=api.POSITION,
                    description="`partition:offset` from which the event is visible; pass it to `getBalance` as "
                    "`minPosition`.",
                    type=Annotated[str, Field(pattern=f"^{POSITION_PATTERN}$")],
                    example="1:42",
                ),
            ),
        ),
        problem(
            400,
            "The body is not such a JSON object, or `Idempotency-Key` is malformed or repeated. Nothing was written.",
            body=("Not JSON", f"the body is not JSON; send {AddFunds.example}"),
            amount=("An amount of zero", AMOUNT_RULE),
        ),
        problem(
            413,
            "The body has more than 16 KiB. Nothing was written.",
            large=("A body of 17,000 bytes", "Maximum request body size 16384 exceeded."),
        ),
        retry_later(
            "Not acknowledged. `detail` says whether the event was certainly not written (send it again) or may have "
            "been written (compare the balance first).",
            not_written=(
                "Safe to send again",
                f"this instance is starting; {_NOT_WRITTEN}",
            ),
            unknown=(
                "Compare the balance first",
                "the event may have been written: Local: Message timed out",
            ),
        ),
    ),
)

ADD_FUNDS = Command(_ROUTE, AddFundsHandler)
