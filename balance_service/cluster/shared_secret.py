"""The secret that all instances of an application share: what is signed with it comes from one of them.

Source: RFC 2104, HMAC; with SHA-256.
"""

from __future__ import annotations

import hmac

CLOCKS_AGREE_SECONDS = 30
"""What is signed holds a time, and is good for so long before and after it."""


class SharedSecret:
    """Signs and judges. A signature for one purpose serves no other."""

    def __init__(self, secret: str) -> None:
        self._keyed = hmac.new(secret.encode(), digestmod="sha256")

    def sign(self, purpose: bytes, *parts: bytes) -> str:
        """The signature of some parts in this order, as 64 hexadecimal digits."""
        # A copy saves the hashing of the key. With the lengths, no two lists of parts make one message.
        keyed = self._keyed.copy()
        keyed.update(b"".join([b"%d:%b" % (len(part), part) for part in (purpose, *parts)]))
        return keyed.hexdigest()

    def has_signed(self, signature: str, purpose: bytes, *parts: bytes) -> bool:
        """Whether a signature is that of these parts. It takes as long if it is not."""
        return hmac.compare_digest(self.sign(purpose, *parts).encode(), signature.encode("utf-8", "surrogatepass"))
