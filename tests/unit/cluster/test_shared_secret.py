"""The secret of all instances: an HMAC over parts that cannot be taken for other parts."""

from __future__ import annotations

import hashlib
import hmac

from hypothesis import given
from hypothesis import strategies as st

from balance_service.cluster.shared_secret import SharedSecret

SECRET = SharedSecret("a secret of all instances")
PARTS = st.lists(st.binary(max_size=12), max_size=4)


@given(st.text(min_size=1), PARTS)
def test_a_signature_is_the_hmac_of_all_parts_with_their_lengths(secret: str, parts: list[bytes]) -> None:
    message = b"".join(b"%d:" % len(part) + part for part in [b"purpose", *parts])

    assert (
        SharedSecret(secret).sign(b"purpose", *parts) == hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()
    )


@given(PARTS, PARTS)
def test_other_parts_have_another_signature(parts: list[bytes], others: list[bytes]) -> None:
    assert SECRET.has_signed(SECRET.sign(b"purpose", *parts), b"purpose", *others) == (parts == others)


def test_a_signature_serves_one_purpose() -> None:
    assert not SECRET.has_signed(SECRET.sign(b"one purpose", b"x"), b"another", b"x")


@given(st.text(st.characters(exclude_categories=[]), max_size=70))
def test_what_is_no_signature_has_signed_nothing(signature: str) -> None:
    assert not SECRET.has_signed(signature, b"purpose", b"x")
