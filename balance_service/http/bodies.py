"""Bodies of requests: JSON whose numbers keep their digits."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any

from balance_service.commands.add_funds import AMOUNT_RULE, AddFunds, amount_of
from balance_service.errors import InvalidInputError
from balance_service.model.keys import checked_key
from balance_service.state.letters.decisions import MOST_IDS, LetterId, reason_of

_JSON_NUMBER = re.compile(r"[0-9]{1,32}(?:\.[0-9]{1,32})?(?:[eE][+-]?[0-9]{1,3})?")
_DECISION_EXAMPLE = '{"ids": ["balance/1:42"], "reason": "a test event"}'
_EXAMPLE = '{"customerId": "c1", "amount": 12.34}'


def add_funds(body: bytes) -> AddFunds:
    """The command in a request's body. Raises InvalidInputError."""
    parsed = _parsed(body, _EXAMPLE)
    customer_id = parsed.get("customerId")
    if isinstance(customer_id, _Number) or not isinstance(customer_id, str):
        raise InvalidInputError("customerId is missing" if customer_id is None else "customerId is not a string")
    return AddFunds(checked_key(customer_id, "customerId"), _amount(parsed.get("amount")))


def decision(body: bytes) -> tuple[list[LetterId], str]:
    """Which dead letters a decision is about, each once, and its reason. Raises InvalidInputError."""
    parsed = _parsed(body, _DECISION_EXAMPLE)
    # What is discarded is gone, so nothing that was meant to narrow it may be passed over.
    if unknown := parsed.keys() - {"ids", "reason"}:
        raise InvalidInputError(f"the body has '{min(unknown)}', which is not known here; send {_DECISION_EXAMPLE}")
    ids, reason = parsed.get("ids"), parsed.get("reason")
    if not isinstance(ids, list) or not 1 <= len(ids) <= MOST_IDS or not all(type(one) is str for one in ids):
        raise InvalidInputError(f"ids must be a list of 1 to {MOST_IDS} ids of dead letters; send {_DECISION_EXAMPLE}")
    return [*dict.fromkeys(LetterId.parse(one) for one in ids)], reason_of(reason)


def _parsed(body: bytes, example: str) -> dict[str, Any]:
    try:
        parsed = json.loads(
            body,
            parse_float=_Number,
            parse_int=_Number,
            parse_constant=_no_constant,
            object_pairs_hook=_object,
        )
    except (ValueError, RecursionError):
        raise InvalidInputError(f"the body is not JSON; send {example}") from None
    if not isinstance(parsed, dict):
        raise InvalidInputError(f"the body is not a JSON object; send {example}")
    return parsed


class _Number(str):
    """A JSON number's own digits: it never passes through a binary float."""

    __slots__ = ()


def _amount(value: Any) -> Decimal:
    if not isinstance(value, str):
        raise InvalidInputError("amount is missing" if value is None else AMOUNT_RULE)
    # A number may have an exponent, a string may not.
    if isinstance(value, _Number) and _JSON_NUMBER.fullmatch(value):
        return amount_of(format(Decimal(value), "f"))
    return amount_of(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON leaves it open which of two values counts; where they are money, neither does.
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InvalidInputError("the body has a name more than once in an object")
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
