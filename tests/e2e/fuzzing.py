"""Valid and malformed records and requests for the fuzz tests; a seed reproduces them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import struct
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from balance_service.avro.schemas import load_schema
from balance_service.kafka.messages import IDEMPOTENCY_HEADER
from tests.support.api import ADD_FUNDS, GET_BALANCE

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from tests.support.kafka import Writer

CUSTOMERS = [f"fuzz-{n}" for n in range(40)] + ["zoë", "客户", "😀", "x" * 256]


def noise(r: random.Random, most: int) -> bytes:
    return r.randbytes(r.randrange(most + 1))


def text_of(r: random.Random, most: int) -> str:
    """Returns a text such as a careless program might send."""
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
    """Returns the data with some bits flipped, truncated, or with bytes inserted or removed."""
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


_MAX_UNKNOWN_IDS = 200


def _schemas() -> dict[str, dict[str, Any]]:
    """Returns schemas for FundsAdded events, by their peculiarity."""
    shipped = load_schema("FundsAdded")
    amount = {"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 2}
    first = shipped["fields"][:3]
    more = [
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "notes", "type": {"type": "map", "values": "string"}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 4}},
        {"name": "ratio", "type": "double"},
    ]
    return {
        "shipped": shipped,
        "scale 4": {**shipped, "fields": [*first, {"name": "amount", "type": {**amount, "scale": 4}}]},
        "precision 38": {**shipped, "fields": [*first, {"name": "amount", "type": {**amount, "precision": 38}}]},
        "nullable": {**shipped, "fields": [*first, {"name": "amount", "type": ["null", amount]}]},
        "more fields": {**shipped, "fields": [*more, *shipped["fields"]]},
    }


_LENGTHS = [
    -(2**63),
    -(2**31),
    -1,
    2**20,
    2**28,
    2**29,
    2**30,
    2**31 - 9,
    2**31 - 8,
    2**31 - 1,
    2**31,
    2**40,
    2**63 - 1,
]


def _varint(number: int) -> bytes:
    """Encodes an Avro long."""
    zigzag = ((number << 1) ^ (number >> 63)) & (2**64 - 1)
    out = bytearray()
    while zigzag >= 0x80:
        out.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    out.append(zigzag)
    return bytes(out)


class Records:
    """Generates records: valid, almost valid, and random bytes."""

    def __init__(self, seed: int, writer: Writer) -> None:
        self._r = random.Random(seed)
        events: list[dict[str, Any]] = [
            {"tags": ["a", "b"], "notes": {"a": "b"}, "kind": "A", "hash": b"hash", "ratio": 1.5},
            {"tags": [], "notes": {}, "kind": "B", "hash": b"\x00" * 4, "ratio": 0.0},
        ]
        amounts = ["0.01", "1.00", "-12.34", "0.00", "9999999999999999.99"]
        self._frames = [
            (customer, writer.frame(customer, amount, schema, **(extra if name == "more fields" else {})))
            for name, schema in _schemas().items()
            for extra in events
            for customer in CUSTOMERS
            for amount in amounts
        ]
        self._known = sorted({frame[:5] for _, frame in self._frames})
        self._header = next(f[:5] for c, f in self._frames if c == CUSTOMERS[0])
        other = {"type": "record", "name": "SomethingElse", "fields": [{"name": "text", "type": "string"}]}
        in_floats = {
            "type": "record",
            "name": "FundsAdded",
            "namespace": "parts.code.balance.events",
            "fields": [{"name": "customerId", "type": "string"}, {"name": "amount", "type": "double"}],
        }
        self._others = [
            struct.pack(">bI", 0, writer.register(f"{writer.topic}-{name}", schema))
            for name, schema in {"else": other, "floats": in_floats}.items()
        ]
        self._unknown_left = _MAX_UNKNOWN_IDS

    def next(self) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
        """Returns key, value and headers of a record."""
        r = self._r
        customer, frame = r.choice(self._frames)
        key: bytes | None = customer.encode()
        kind = r.random()
        value: bytes | None = frame
        if kind < 0.2:
            value = noise(r, r.choice([4, 64, 64, 2000]))
        elif kind < 0.35:
            value = r.choice([*self._known, *self._others]) + noise(r, r.choice([4, 64, 64, 2000]))
        elif kind < 0.6:
            value = mutated(r, frame)
        elif kind < 0.7:
            value = self._with_a_length(frame)
        elif kind < 0.75:
            value = frame + noise(r, 20)
        elif kind < 0.8:
            key, value = self._with_a_strange_customer()
        elif kind < 0.81:
            value = None
        other_key = r.random()
        if other_key < 0.02:
            key = None
        elif other_key < 0.05:
            key = noise(r, 20)
        elif other_key < 0.07:
            key = b"\xff" + noise(r, 10)
        elif other_key < 0.1:
            key = r.choice(CUSTOMERS).encode()
        return key, self._with_few_unknown_ids(value), self._headers()

    def _headers(self) -> list[tuple[str, bytes | None]]:
        """Returns no headers for most records; for some, one or more idempotency keys, valid or not."""
        r = self._r
        names = [IDEMPOTENCY_HEADER, IDEMPOTENCY_HEADER, "other", "", "\u0000"]
        values = [b"a", b"b", b"", None, b"\xff\xfe", b"x" * 10_000, noise(r, 3)]
        return [
            (r.choice(names), r.choice(values)) for _ in range(r.choice([1, 1, 1, 2, 5]) if r.random() < 0.1 else 0)
        ]

    def _with_a_length(self, frame: bytes) -> bytes:
        """Replaces bytes of a frame by a huge, negative or overlong number, preferably a length."""
        r = self._r
        at = r.choice([5, 5, r.randrange(5, len(frame) + 1)])
        number = _varint(r.choice(_LENGTHS)) if r.random() < 0.9 else b"\x80" * r.choice([1, 9, 10, 50]) + b"\x01"
        return frame[:at] + number + frame[at + r.randrange(3) :]

    def _with_a_strange_customer(self) -> tuple[bytes, bytes]:
        """Returns a well-formed event whose customer is arbitrary bytes, and that customer as its key."""
        r = self._r
        customer = r.choice(
            [
                b"",
                b"x" * r.choice([256, 257]),
                text_of(r, 10).encode(),
                noise(r, 10),
                b"\xed\xa0\x80",
                b"\xc0\x80",
                b"a\x00b",
                b"\xff" + noise(r, 4),
                b"\xf4\x90\x80\x80",
                "\ufffd".encode(),
            ]
        )
        event_id, when = b"e1", r.choice([0, 1, -1, 2**40, -(2**50), 9223372036854775, 9223372036854776, 2**63 - 1])
        amount = r.choice(
            [b"\x01", b"", b"\x00" * 50 + b"\x01", b"\x7f" * 8, b"\xff" * 9, r.randbytes(r.randrange(1, 20))]
        )
        fields = (event_id, customer, amount)
        body = _varint(len(event_id)) + event_id + _varint(when)
        for field in fields[1:]:
            body += _varint(len(field)) + field
        return customer, self._header + body

    def _with_few_unknown_ids(self, value: bytes | None) -> bytes | None:
        """Limits unknown schema ids: each costs a request to the registry."""
        if value is None or len(value) < 5 or value[0] != 0 or value[:5] in self._known or value[:5] in self._others:
            return value
        if self._unknown_left:
            self._unknown_left -= 1
            return value
        return b"\x01" + value[1:]


_SILENCE_SECONDS = 0.25
# All statuses of the HTTP contract; 503 is the only 5xx.
STATUSES = frozenset({100, 200, 202, 400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 421, 422, 426, 431, 503})
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")


_METHODS = [
    b"GET",
    b"POST",
    b"HEAD",
    b"PUT",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"PATCH",
    b"BREW",
    b"get",
    b"",
]
_PATHS = [
    GET_BALANCE.encode(),
    ADD_FUNDS.encode(),
    b"/health/live",
    b"/health/ready",
    b"/metrics",
    b"/api/status",
    b"/openapi.json",
    b"/",
    b"*",
    b"//",
    b"/../../etc/passwd",
    b"/%",
    b"/%zz",
    b"/%00",
    b"/%ff%fe",
    b"http://evil.example/api/status",
    b"evil.example:443",
    b"",
]
_VERSIONS = [b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1.9", b"HTTP/0.9", b"HTTP", b""]
_HEADERS: list[Callable[[random.Random], bytes]] = [
    lambda r: b"Balance-Forwarded: " + noise(r, 40),
    lambda r: b"Balance-Forwarded: peer:1;t=1;hmac=" + b"0" * 64,
    lambda r: b"Idempotency-Key: " + r.choice([b"a", b"b", b"x" * 128, b"x" * 129, b"a b", noise(r, 200)]),
    lambda r: (
        b"Content-Length: " + r.choice([b"0", b"1", b"-1", b"99999999999999999999", b"0x10", b"1 1", b"", b"5, 5"])
    ),
    lambda r: (
        b"Transfer-Encoding: " + r.choice([b"chunked", b"gzip", b"chunked, chunked", b"\x0bchunked", b"identity"])
    ),
    lambda r: b"Content-Encoding: " + r.choice([b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"nope"]),
    lambda r: b"Content-Type: " + r.choice([b"application/json", b"multipart/form-data", b"x/y; charset=utf-99"]),
    lambda r: b"Expect: " + r.choice([b"100-continue", b"200-ok"]),
    lambda r: b"Upgrade: " + r.choice([b"websocket", b"h2c"]) + b"\r\nConnection: Upgrade",
    lambda r: b"Connection: " + r.choice([b"close", b"keep-alive", b"upgrade", b"Host", b"\x00"]),
    lambda r: b"Range: bytes=" + r.choice([b"0-", b"-1", b"9-1", b"0-0,0-0,0-0"]),
    lambda r: b"If-Modified-Since: " + noise(r, 30),
    lambda r: b"Cookie: " + noise(r, 100),
    lambda r: b"Accept: text/html",
    lambda r: b"Sec-WebSocket-Key: " + noise(r, 24),
    lambda r: b"Host: " + noise(r, 20),
    lambda r: b" folded: " + noise(r, 10),
    lambda r: noise(r, 60),
    lambda r: b"X-Long: " + b"x" * r.choice([7_000, 9_000, 70_000]),
    lambda r: b"\r\n".join(b"X-%d: y" % n for n in range(r.choice([50, 100, 1000]))),
]


def _query(r: random.Random) -> bytes:
    if r.random() < 0.4:
        return b"?customerId=" + quote(r.choice(CUSTOMERS)).encode()
    names = [b"customerId", b"minPosition", b"maxLag", b"customerid", b"x", b""]
    values: list[Callable[[], bytes]] = [
        lambda: r.choice(CUSTOMERS).encode(),
        lambda: quote(noise(r, 30)).encode(),
        lambda: quote(text_of(r, 10)).encode(),
        lambda: noise(r, 5).replace(b" ", b"%20"),
        lambda: b"%d:%d" % (r.randrange(-1, 4), r.choice([0, 1, 10**6, 2**63, 10**30])),
        lambda: b"%ff%fe%c3%28",
        lambda: b"x" * r.choice([256, 257, 5_000, 100_000]),
        lambda: b"",
    ]
    pairs = [r.choice(names) + b"=" + r.choice(values)() for _ in range(r.choice([0, 1, 1, 1, 2, 3, 20]))]
    return b"?" + b"&".join(pairs) if r.random() < 0.9 else noise(r, 20)


def _body(r: random.Random) -> bytes:
    bodies: list[Callable[[], bytes]] = [
        lambda: json.dumps({"customerId": r.choice(CUSTOMERS), "amount": r.choice(["0.01", 1, "12.34"])}).encode(),
        lambda: json.dumps(
            {text_of(r, 8): text_of(r, 8), "customerId": text_of(r, 20), "amount": text_of(r, 5)}
        ).encode(),
        lambda: b'{"customerId": "c", "amount": ' + noise(r, 20) + b"}",
        lambda: b'{"customerId": "c", "amount": ' + r.choice([b"1e999999999", b"-1", b"NaN", b"9" * 4000]) + b"}",
        lambda: b"[" * r.choice([10, 1_000, 16_000]),
        lambda: b'{"customerId": "\\ud800", "amount": 1}',
        lambda: b"\x1f\x8b\x08\x00" + noise(r, 50),
        lambda: noise(r, 100),
        lambda: b"x" * r.choice([16_384, 16_385, 100_000]),
        lambda: b"",
    ]
    return r.choice(bodies)()


def _chunked(r: random.Random, body: bytes) -> bytes:
    sizes = [
        b"%x" % len(body),
        b"%x" % (len(body) + 5),
        b"ffffffffffffffff",
        b"-1",
        b"",
        b"zz",
        b"5;x=" + noise(r, 10),
    ]
    return r.choice(sizes) + b"\r\n" + body + r.choice([b"\r\n0\r\n\r\n", b"\r\n0\r\nT: x\r\n\r\n", b"0\r\n", b""])


def _request(r: random.Random) -> bytes:
    """Returns a request, valid or malformed."""
    if r.random() < 0.05:
        return noise(r, 300) + b"\r\n\r\n"
    is_command = r.random() < 0.4
    method = r.choice(_METHODS) if r.random() < 0.2 else (b"POST" if is_command else b"GET")
    path = r.choice(_PATHS) if r.random() < 0.2 else (ADD_FUNDS if is_command else GET_BALANCE).encode()
    body = _body(r) if is_command or r.random() < 0.1 else b""
    headers = [b"Host: localhost"] if r.random() < 0.97 else []
    if body and r.random() < 0.9:
        headers.append(b"Content-Type: application/json")
    if body and r.random() < 0.2:
        headers.append(b"Transfer-Encoding: chunked")
        body = _chunked(r, body)
    elif body:
        headers.append(b"Content-Length: %d" % (len(body) if r.random() < 0.9 else r.randrange(2 * len(body) + 2)))
    if r.random() < 0.4:
        headers += [r.choice(_HEADERS)(r) for _ in range(r.randrange(1, 4))]
    if r.random() < 0.8:
        headers.append(b"Connection: close")
    version = r.choice(_VERSIONS) if r.random() < 0.1 else b"HTTP/1.1"
    end = r.choice([b"\r\n", b"\n"]) if r.random() < 0.05 else b"\r\n"
    request = end.join([b"%s %s%s %s" % (method, path, _query(r), version), *headers, b"", b""]) + body
    if r.random() < 0.1:
        request = mutated(r, request)
    return request


async def _exchange(port: int, data: bytes) -> list[int]:
    """Sends bytes on a connection; returns all statuses received until it closes or is silent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            while True:
                async with asyncio.timeout(_SILENCE_SECONDS + (0.3 if not answer else 0)):
                    part = await reader.read(1 << 16)
                if not part:
                    break
                answer += part
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.transport.abort()
    return [int(status) for status in _STATUS_LINE.findall(answer)]


async def ask_raw(port: int, count: int, seed: int, statuses: Counter[str], wrong: list[str]) -> None:
    r = random.Random(seed)
    left = count
    while left > 0:
        pipelined = min(left, r.choice([1, 1, 1, 1, 2, 5]))
        left -= pipelined
        data = b"".join(_request(r) for _ in range(pipelined))
        found = await _exchange(port, data)
        statuses.update(str(status) for status in found or [0])
        if not set(found) <= STATUSES:
            wrong.append(f"{found} to {data[:2000]!r}")


async def ask_structured(url: str, count: int, seed: int, statuses: Counter[str], wrong: list[str]) -> None:
    r = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=10, verify=False) as http:
        for _ in range(count):
            if r.random() < 0.5:
                parameters = {"customerId": text_of(r, 30) if r.random() < 0.5 else r.choice(CUSTOMERS)}
                for name in ("minPosition", "maxLag"):
                    if r.random() < 0.1:
                        parameters[name] = r.choice([text_of(r, 6), "0:1", "1:1", "7:7", "0", "5", "-1", "9" * 40])
                answer = await http.get(GET_BALANCE, params=parameters)
            else:
                amount: Any = r.choice(
                    [text_of(r, 6), r.random(), r.randrange(-5, 10**18), "0.01", 0.01, None, True, [], "1" * 99]
                )
                command: dict[str, Any] = {
                    "customerId": r.choice([text_of(r, 20), *CUSTOMERS[:20], None, 5, {}]),
                    "amount": amount,
                }
                answer = await http.post(ADD_FUNDS, json=command)
            statuses[str(answer.status_code)] += 1
            is_problem = answer.headers.get("Content-Type", "").startswith("application/problem+json")
            if answer.status_code not in STATUSES or is_problem != (answer.status_code >= 400):
                wrong.append(f"{answer.status_code} {answer.headers} {answer.text} to {answer.request.url}")
