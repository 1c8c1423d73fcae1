"""The command that adds funds to a customer, and the checks on it, which HTTP and the command line share."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact, InvalidOperation

from balance_service.errors import InvalidInputError

# Digits are checked before a number is made of them: Decimal takes "Infinity", "1_000" and exponents of any size.
_AMOUNT = re.compile(r"0*([0-9]{1,16})(?:\.([0-9]{1,2})0*)?")
_CENTS = Decimal("0.01")
_EXACT = Context(prec=40, traps=[Inexact, InvalidOperation])
AMOUNT_RULE = "amount must be a number or a decimal string, above 0, of at most 16 digits before the point and 2 after"
IDEMPOTENCY_KEY = r"[!-~]{1,128}"


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


def idempotency_key_of(text: str) -> bytes:
    """The key by which a repeated command is recognised.

    Raises:
        InvalidInputError: the text cannot be one.
    """
    if not re.fullmatch(IDEMPOTENCY_KEY, text):
        raise InvalidInputError("Idempotency-Key must have 1 to 128 visible ASCII characters")
    return text.encode()
