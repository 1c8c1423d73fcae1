"""Attacks before authentication: other clients, probes and peers are still served."""

from __future__ import annotations

import gzip
import hashlib
import json
import selectors
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
import pytest

from balance_service.devtools.local.processes import HOST
from tests.support.api import ADD_FUNDS, GET_BALANCE
from tests.support.service import PARTITIONS, add, application, ask_again, customers_of, new_instance, running
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

# Differs from the attackers' address.
_OTHER = "127.0.0.2"
_LONGEST_WAIT_SECONDS = 0.3
_SILENT = 4_300
_SILENT_SECONDS = 12.0
_UNREAD, _PIPELINED = 300, 60
_KERNEL_BYTES = 64 << 20
_GONE_SECONDS = 15.0
_PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application()


@pytest.fixture(scope="module")
def customers(pair: tuple[LocalInstance, LocalInstance]) -> list[str]:
    """A customer of each partition, whose balance both instances answer."""
    names = [customers_of(partition, 1)[0] for partition in range(PARTITIONS)]
    for name in names:
        position = add(pair[0].url, name, "1.00")
        for instance in pair:
            assert ask_again(instance.url, name, position).status_code == 200
    return names


@pytest.fixture(scope="module")
def secured(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalInstance]:
    """An instance that requires tokens."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.json"
    digest = hashlib.sha256(b"a-long-and-random-token").hexdigest()
    listed = [{"name": "reader", "sha256": digest, "scopes": ["balance:read"]}]
    tokens.write_text(json.dumps({"tokens": listed}))
    settings = application(BALANCE_TOKENS_FILE=str(tokens), BALANCE_PEER_SECRET="a secret of all instances")
    with running(new_instance(stack, settings)) as (instance,):
        yield instance


class Waits:
    """Requests liveness continuously and records the longest response time."""

    def __init__(self, url: str) -> None:
        self.longest = 0.0
        self.asked = 0
        self._url = url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stopping.wait(0.01):
                began = time.monotonic()
                assert http.get("/health/live").status_code == 200
                self.longest = max(self.longest, time.monotonic() - began)
                self.asked += 1


@pytest.mark.shows("floods")
@pytest.mark.parametrize("kind", ["without tokens", "with tokens"])
def test_compressed_bodies_do_not_delay_probes(
    kind: str, pair: tuple[LocalInstance, LocalInstance], request: pytest.FixtureRequest
) -> None:
    instance: LocalInstance = pair[0] if kind == "without tokens" else request.getfixturevalue("secured")
    port = httpx.URL(instance.url).port
    packed = gzip.compress(bytes(200 << 20))
    head = (
        f"POST {ADD_FUNDS} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    )
    with Waits(instance.url) as at_rest:
        time.sleep(3)

    def attack() -> None:
        sent, until = 0, time.monotonic() + 3
        while sent < 3 or time.monotonic() < until:
            sent += 1
            with socket.create_connection((HOST, port), 60) as client, suppress(ConnectionError):
                client.sendall(head.encode() + packed)
                while client.recv(1 << 16):
                    pass

    with Waits(instance.url) as attacked:
        attackers = [threading.Thread(target=attack) for _ in range(20)]
        for attacker in attackers:
            attacker.start()
        for attacker in attackers:
            attacker.join()

    print(f"{kind}: longest wait {at_rest.longest:.3f} s at rest, {attacked.longest:.3f} s under attack")
    assert attacked.asked > 10
    assert attacked.longest <= _LONGEST_WAIT_SECONDS + at_rest.longest


@contextmanager
def silent_connections(instance: LocalInstance) -> Iterator[list[socket.socket]]:
    """A client that keeps thousands of connections open without sending, and replaces those that the server closes."""
    port = httpx.URL(instance.url).port
    opened: list[socket.socket] = []
    stopping = threading.Event()

    def run() -> None:
        with selectors.DefaultSelector() as selector, ExitStack() as sockets:
            while not stopping.is_set():
                while len(selector.get_map()) < _SILENT:
                    one = sockets.enter_context(socket.socket())
                    one.setblocking(False)
                    one.connect_ex((HOST, port))
                    selector.register(one, selectors.EVENT_READ)
                    opened.append(one)
                for key, _ in selector.select(0.1):
                    selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()
                # An attacker could reconnect faster; the kernel's backlog is not under test here.
                stopping.wait(0.5)

    attacker = threading.Thread(target=run)
    attacker.start()
    try:
        yield opened
    finally:
        stopping.set()
        attacker.join()


@pytest.mark.shows("floods")
def test_thousands_of_silent_connections_do_not_lock_out_other_clients(
    pair: tuple[LocalInstance, LocalInstance], customers: list[str]
) -> None:
    attacked, peer = pair
    asked, failures, longest = 0, [], 0.0
    with silent_connections(attacked) as opened:
        eventually(lambda: len(opened) >= _SILENT, "the attacker has opened its connections")
        until = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < until:
            # Opens a connection for each request, like a new client.
            with httpx.Client(transport=httpx.HTTPTransport(local_address=_OTHER), timeout=10) as http:
                for url in (f"{attacked.url}/health/live", f"{attacked.url}/health/ready"):
                    began = time.monotonic()
                    failures += _failure(http, url)
                    longest = max(longest, time.monotonic() - began)
                for customer in customers:
                    # The peer forwards one of the customers to the attacked instance.
                    for instance in (attacked, peer):
                        failures += _failure(http, f"{instance.url}{GET_BALANCE}?customerId={customer}")
                asked += 2 + 2 * len(customers)

    print(f"{asked} requests, {len(failures)} failed, longest wait of a probe {longest:.3f} s, {len(opened)} attempts")
    assert asked > 50
    assert failures == []


def _failure(http: httpx.Client, url: str) -> list[str]:
    try:
        answer = http.get(url)
    except httpx.HTTPError as error:
        return [f"{url}: {error!r}"]
    return [] if answer.status_code == 200 else [f"{url}: {answer.status_code} {answer.text}"]


def _kernel_bytes() -> int:
    """Returns the kernel memory of all TCP connections on this machine."""
    (line,) = [line for line in Path("/proc/net/sockstat").read_text().splitlines() if line.startswith("TCP:")]
    fields = line.split()
    return int(fields[fields.index("mem") + 1]) * _PAGE_BYTES


@pytest.mark.shows("floods")
def test_unread_answers_use_little_memory_and_not_for_long(
    pair: tuple[LocalInstance, LocalInstance],
) -> None:
    instance = pair[0]
    port = httpx.URL(instance.url).port
    question = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * _PIPELINED
    before = _kernel_bytes()
    with ExitStack() as unread:
        for _ in range(_UNREAD):
            client = unread.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((HOST, port))
            client.sendall(question)
        most = 0
        # The server aborts the connections after ten seconds.
        until = time.monotonic() + 12
        while time.monotonic() < until:
            most = max(most, _kernel_bytes() - before)
            assert httpx.get(f"{instance.url}/health/live", timeout=10).status_code == 200
            time.sleep(0.25)
        print(f"kernel memory: at most {most / 2**20:.1f} MiB")
        assert most <= _KERNEL_BYTES
        began = time.monotonic()
        eventually(lambda: _kernel_bytes() - before < _KERNEL_BYTES / 16, "the memory is released", _GONE_SECONDS)
        print(f"gone {time.monotonic() - began:.1f} s later")
