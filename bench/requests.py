"""A closed-loop load generator for machines without `wrk`: each connection sends the next request after each answer.

Runs as a process: `python -m bench.requests URL FILE CONNECTIONS SECONDS [HEADER…]`; the file has one customer id per
line. Prints the same JSON as reads.lua. Uses asyncio streams, because HTTP clients need more CPU than servers.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from bench.sides import PATH

_OK = b"HTTP/1.1 200"


async def ask_all(
    url: str, customers: list[str], connections: int, seconds: float, headers: list[str]
) -> dict[str, float]:
    """Send requests over a number of connections for a time."""
    address = urlsplit(url)
    head = "\r\n".join([f"Host: {address.netloc}", *headers])
    requests = [f"GET {PATH}?customerId={c} HTTP/1.1\r\n{head}\r\n\r\n".encode("ascii") for c in customers]
    taken: list[float] = []
    failed = 0
    began = time.monotonic()

    async def ask() -> None:
        nonlocal failed
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while (sent := time.monotonic()) < began + seconds:
            writer.write(random.choice(requests))  # noqa: S311  (no secret)
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            await reader.readexactly(int(lengths[0].partition(b":")[2]))
            taken.append(time.monotonic() - sent)
            failed += not head.startswith(_OK)
        writer.close()

    await asyncio.gather(*(ask() for _ in range(connections)))
    lasted = time.monotonic() - began
    p50, p99 = (float(v) * 1000 for v in np.percentile(taken, (50, 99)))
    return {"requests": len(taken), "seconds": lasted, "p50_ms": p50, "p99_ms": p99, "failed": failed}


if __name__ == "__main__":
    measured = asyncio.run(
        ask_all(sys.argv[1], Path(sys.argv[2]).read_text().split(), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
    )
    sys.stdout.write(json.dumps(measured) + "\n")
