"""Nonsense that both fuzz tests are made of; drawn from a seeded generator, so that a seed replays it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

CUSTOMERS = [f"fuzz-{n}" for n in range(40)] + ["zoë", "客户", "😀", "x" * 256]


def noise(r: random.Random, most: int) -> bytes:
    return r.randbytes(r.randrange(most + 1))


def text_of(r: random.Random, most: int) -> str:
    """Text that a careless program might send."""
    alphabets = [
        "abcXYZ019-_",
        " +&=%#?/\\;,.\"'<>{}[]|^`",
        "äöüßé",
        "客户名",
        "😀👩\u200d👧",
        "\x00\x07\x1b\x7f\x85\u2028\ufeff",
    ]
    return "".join(r.choice(r.choice(alphabets)) for _ in range(r.randrange(most + 1)))


def mutated(r: random.Random, data: bytes) -> bytes:
    """The same with a few bits flipped, or cut, or with something in between."""
    mutable = bytearray(data)
    for _ in range(r.randrange(1, 4)):
        at = r.randrange(len(mutable)) if mutable else 0
        match r.randrange(4):
            case 0 if mutable:
                mutable[at] ^= 1 << r.randrange(8)
            case 1:
                del mutable[at:]
            case 2:
                mutable[at:at] = noise(r, 8)
            case _:
                del mutable[at : at + r.randrange(1, 5)]
    return bytes(mutable)
