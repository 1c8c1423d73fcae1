"""Parameters and bodies, checked before anything is done with them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from balance_service.http.problems import Problem
from balance_service.read_models.balance import MAX_CUSTOMER_ID_BYTES

if TYPE_CHECKING:
    from aiohttp import web

_MAX_PARAMETERS = 16
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MAX_LAG = re.compile(r"[0-9]{1,18}")
_IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,128}")
_MIN_POSITION = re.compile(r"([0-9]{1,10}):([0-9]{1,18})")
# Digits are checked before a number is made of them: Decimal takes "Infinity", "1_000" and exponents of any
# size.
_DECIMAL = re.compile(r"0*([0-9]{1,16})(?:\.([0-9]{1,2})0*)?")
_JSON_NUMBER = re.compile(r"[0-9]{1,32}(?:\.[0-9]{1,32})?(?:[eE][+-]?[0-9]{1,3})?")
_EXACT = Context(prec=40, traps=[Inexact, InvalidOperation])
_AMOUNT_RULE = "amount must be a number or a decimal string, above 0, of at most 16 digits before the point and 2 after"


@dataclass(frozen=True, slots=True)
class BalanceQuery:
    """A checked query: the customer's key, the position to wait for, and how many records behind is recent enough."""

    customer_id: str
    min_position: tuple[int, int] | None = None
    max_lag: int | None = None

    @property
    def key(self) -> bytes:
        """The customer's record key."""
        return self.customer_id.encode()

    @property
    def takes_standbys(self) -> bool:
        """Whether one that is not the owner may answer: only who says how recent is recent enough."""
        return self.min_position is not None or self.max_lag is not None

    def parameters(self) -> dict[str, str]:
        """The query as parameters again, for a peer."""
        parameters = {"customerId": self.customer_id}
        if self.min_position is not None:
            parameters["minPosition"] = f"{self.min_position[0]}:{self.min_position[1]}"
        if self.max_lag is not None:
            parameters["maxLag"] = str(self.max_lag)
        return parameters


@dataclass(frozen=True, slots=True)
class AddFunds:
    """A checked command."""

    customer_id: str
    amount: Decimal


def balance_query(request: web.Request) -> BalanceQuery:
    """The query in a request's parameters. Raises Problem 400."""
    try:
        pairs = parse_qsl(
            request.rel_url.raw_query_string,
            keep_blank_values=True,
            errors="strict",
            max_num_fields=_MAX_PARAMETERS,
        )
    except UnicodeDecodeError:
        raise Problem(400, "the query is not UTF-8") from None
    except ValueError:
        raise Problem(400, f"the query has more than {_MAX_PARAMETERS} parameters") from None
    customer_id = _only(pairs, "customerId")
    if customer_id is None:
        raise Problem(400, "customerId is missing")
    min_position, max_lag = _only(pairs, "minPosition"), _only(pairs, "maxLag")
    return BalanceQuery(
        checked_customer_id(customer_id),
        None if min_position is None else _position(min_position),
        None if max_lag is None else _lag(max_lag),
    )


def idempotency_key(request: web.Request) -> bytes | None:
    """The header `Idempotency-Key` of a request, if it has one. Raises Problem 400."""
    values = request.headers.getall("Idempotency-Key", [])
    if not values:
        return None
    if len(values) > 1:
        raise Problem(400, "Idempotency-Key is given more than once")
    return checked_idempotency_key(values[0])


def checked_idempotency_key(value: str) -> bytes:
    """The key, if it can be one. Raises Problem 400."""
    if not _IDEMPOTENCY_KEY.fullmatch(value):
        raise Problem(400, "Idempotency-Key must have 1 to 128 visible ASCII characters")
    return value.encode()


def add_funds(body: bytes) -> AddFunds:
    """The command in a request's body. Raises Problem 400."""
    try:
        parsed = json.loads(
            body,
            parse_float=_Number,
            parse_int=_Number,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except (ValueError, RecursionError):
        raise Problem(400, 'the body is not JSON; send {"customerId": "c1", "amount": 12.34}') from None
    if not isinstance(parsed, dict):
        raise Problem(400, 'the body is not a JSON object; send {"customerId": "c1", "amount": 12.34}')
    customer_id = parsed.get("customerId")
    if isinstance(customer_id, _Number) or not isinstance(customer_id, str):
        raise Problem(400, "customerId is missing" if customer_id is None else "customerId is not a string")
    return AddFunds(checked_customer_id(customer_id), amount_of(parsed.get("amount")))


def checked_customer_id(customer_id: str) -> str:
    """The id, if it can be a record's key. Raises Problem 400."""
    try:
        size = len(customer_id.encode())
    except UnicodeEncodeError:
        raise Problem(400, "customerId is not UTF-8") from None
    if not 1 <= size <= MAX_CUSTOMER_ID_BYTES:
        raise Problem(400, f"customerId must have 1 to {MAX_CUSTOMER_ID_BYTES} bytes of UTF-8")
    if _CONTROL_CHARACTER.search(customer_id):
        raise Problem(400, "customerId must not contain control characters")
    return customer_id


def amount_of(value: Any) -> Decimal:
    """An exact amount of money from JSON's number (as its digits) or string. Raises Problem 400."""
    if not isinstance(value, str):
        raise Problem(400, "amount is missing" if value is None else _AMOUNT_RULE)
    digits = value
    if isinstance(value, _Number) and _JSON_NUMBER.fullmatch(value):
        digits = format(Decimal(value), "f")
    if not _DECIMAL.fullmatch(digits) or Decimal(digits) <= 0:
        raise Problem(400, _AMOUNT_RULE)
    return Decimal(digits).quantize(Decimal("0.01"), context=_EXACT)


class _Number(str):
    """A JSON number's own digits: it never passes through a binary float."""

    __slots__ = ()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON leaves it open which of two values counts; where they are money, neither does.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise Problem(400, "the body has a name more than once in an object")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _only(pairs: list[tuple[str, str]], name: str) -> str | None:
    values = [value for key, value in pairs if key == name]
    if len(values) > 1:
        raise Problem(400, f"{name} is given more than once")
    return values[0] if values else None


def _position(text: str) -> tuple[int, int]:
    match = _MIN_POSITION.fullmatch(text)
    if match is None:
        raise Problem(400, "minPosition must be partition:offset, such as 0:42")
    return int(match[1]), int(match[2])


def _lag(text: str) -> int:
    if not _MAX_LAG.fullmatch(text):
        raise Problem(400, "maxLag must be a number of records, such as 100")
    return int(text)
