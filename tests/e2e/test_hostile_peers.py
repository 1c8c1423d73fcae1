"""Attackers that write to the instance directory or answer in an instance's place, with the peer secret and without."""

from __future__ import annotations

import json
import threading
import time
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import TYPE_CHECKING, Any

import fastavro
import httpx
import pytest

from balance_service.avro.schemas import load_schema
from balance_service.cluster.signatures import RecordSignatures
from balance_service.http.peers.connections import AnswerReader
from balance_service.http.peers.trust import FORWARDED_HEADER, PROOF_HEADER, Peer, PeerTrust
from balance_service.kafka.signing import SharedSecret
from tests.e2e.clients import Poller
from tests.support.api import GET_BALANCE
from tests.support.kafka import Writer, read_topic
from tests.support.service import (
    PARTITIONS,
    add,
    address,
    application,
    ask,
    ask_again,
    customers_of,
    new_instance,
    running,
    status,
    wait_until_spread,
)
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.devtools.local.stack import LocalInstance, LocalStack

    Pair = tuple[LocalInstance, LocalInstance]

HUGE_EPOCH = 10**15
FORGED = "666.66"


class DirectoryWriter(Writer):
    """Writes forged records to an application's instance directory."""

    def __init__(self, stack: LocalStack, settings: Mapping[str, str]) -> None:
        super().__init__(stack, f"{settings['BALANCE_APPLICATION_ID']}-application-servers")
        self._stack = stack
        schema = load_schema("ApplicationServer")
        self._schema = fastavro.parse_schema(schema)
        schema_id = self.register(f"{self.topic}-parts.code.balance.cluster.ApplicationServer", schema)
        self._header = b"\0" + schema_id.to_bytes(4, "big")

    def claim(self, address: str, signatures: RecordSignatures | None = None, incarnation: str = "0" * 32) -> None:
        """Claims every partition for a server, under an epoch higher than any real one."""
        tasks = [
            {
                "readModel": "balance",
                "partition": partition,
                "role": "ACTIVE",
                "state": "RUNNING",
                "epoch": HUGE_EPOCH,
                "position": 1,
            }
            for partition in range(PARTITIONS)
        ]
        models = [{"name": "balance", "partitions": PARTITIONS}]
        body = BytesIO(self._header)
        body.seek(0, 2)
        record = {"address": address, "incarnation": incarnation, "models": models, "tasks": tasks}
        fastavro.schemaless_writer(body, self._schema, record)
        headers: Any = {} if signatures is None else signatures.sign(address, body.getvalue())
        self.send(address, body.getvalue(), partition=0, headers=headers)
        self.producer.flush(10)

    def write_tombstone(self, address: str) -> None:
        """Removes an instance from the directory."""
        self.send(address, None, partition=0)
        self.producer.flush(10)

    def replay(self, record: Any) -> None:
        """Appends a copy of a record, with its headers."""
        self.send(record.key(), record.value(), partition=0, headers=record.headers())
        self.producer.flush(10)

    def records(self) -> list[Any]:
        """Returns the records in the directory topic."""
        return read_topic(self._stack, self.topic)


class FakePeer:
    """A server that is no instance; records method and path of its requests."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.asked: list[str] = []


@contextmanager
def fake_peer(*, is_silent: bool = False) -> Iterator[FakePeer]:
    """Serves forged answers to every query as an owner would; answers nothing if `is_silent`."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            impostor.asked.append(f"{self.command} {self.path}")
            if is_silent:
                over.wait(60)
                self.close_connection = True
                return
            path, _, query = self.path.partition("?")
            body, partitions = (
                _forged(path),
                ",".join(f"{p}:9" for p in range(PARTITIONS) if f"partitions={p}" in query),
            )
            of_partitions = {"Position": partitions, "Epoch": partitions, "Role": partitions.replace(":9", ":active")}
            told = of_partitions if partitions else {"Position": "0:9", "Epoch": str(HUGE_EPOCH), "Role": "active"}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Balance-Application-Server", impostor.address)
            for name, value in told.items():
                self.send_header(f"Balance-{name}", value)
            self.send_header("Balance-Proof", "a1" * 32)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    impostor = FakePeer(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield impostor
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _forged(path: str) -> bytes:
    kind = path.rpartition("/")[2].rpartition(".")[2]
    amount = f'{{"amount":{FORGED}}}'
    bodies = {
        "entries": f'{{"entries":[{{"key":"forged","value":{amount}}}],"next":null}}',
        "top": f'{{"entries":[{{"key":"forged","value":{amount}}}],"next":null}}',
        "count": '{"count":666}',
        "deadLetters": '{"deadLetters":[],"next":null}',
        "discard": json.dumps({"refused": {}}),
        "redrive": json.dumps({"refused": {}}),
    }
    return bodies.get(kind, amount).encode()


_SECRET = "a secret that all instances share"
_CUSTOMERS = {customer: "1.50" for partition in range(PARTITIONS) for customer in customers_of(partition, 3)}
_MOST_SECONDS = 10.0
_FORGING_SECONDS = 12.0
_CLAIMED_SECONDS = 5.0
# Allowance for a busy machine where no query has to wait.
_UNMOVED_SECONDS = 2.0
_SERVER = "Balance-Application-Server"


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    return application(BALANCE_PEER_SECRET=_SECRET)


@pytest.fixture(scope="module")
def fed(pair: Pair) -> Pair:
    """Two instances with balances; each owns a partition."""
    return feed(pair)


@pytest.fixture(scope="module")
def directory(stack: LocalStack, settings: dict[str, str], pair: Pair) -> Iterator[DirectoryWriter]:
    with DirectoryWriter(stack, settings) as writer:
        yield writer


def feed(pair: Pair) -> Pair:
    positions = {customer: add(pair[0].url, customer, amount) for customer, amount in _CUSTOMERS.items()}
    for instance in pair:
        for customer, position in positions.items():
            assert ask_again(instance.url, customer, position).json() == {"amount": 1.5}
    return pair


@contextmanager
def asked_all_the_time(pair: Pair) -> Iterator[Poller]:
    """Queries both instances continuously; checks that every answer is right or 503, and that all have answered."""
    with Poller(pair, {customer: f'{{"amount":{amount}}}' for customer, amount in _CUSTOMERS.items()}) as poller:
        yield poller
    assert poller.wrong == []
    assert len(poller.silences) == len(pair) * PARTITIONS


def metric(instance: LocalInstance, name: str) -> float:
    lines = httpx.get(f"{instance.url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.shows("peers")
def test_forged_records_are_ignored_and_reported_while_queries_continue(fed: Pair, directory: DirectoryWriter) -> None:
    real = [record for record in directory.records() if record.value() is not None]
    with fake_peer() as impostor, asked_all_the_time(fed) as poller:
        until = time.monotonic() + _FORGING_SECONDS
        while time.monotonic() < until:
            directory.claim(impostor.address)
            directory.claim(impostor.address, RecordSignatures(SharedSecret("another secret"), directory.topic))
            for instance in fed:
                directory.write_tombstone(address(instance))
            directory.replay(real[-1])
            time.sleep(0.2)

    assert impostor.asked == []
    assert max(poller.silences.values()) < _UNMOVED_SECONDS
    for instance in fed:
        known = {server["applicationServer"] for server in status(instance)["applicationServers"]}
        assert known == {address(other) for other in fed}
        for reason in ("unsigned", "wrongly signed", "repeated"):
            refused = f'balance_directory_records_refused_total{{reason="{reason}"}}'
            eventually(lambda i=instance, r=refused: metric(i, r) > 0, refused)  # type: ignore[misc]
        warnings = [line for line in instance.log.read_text().splitlines() if "directory was ignored" in line]
        assert 1 <= len(warnings) <= 4
        assert any("give all instances the same BALANCE_PEER_SECRET" in line for line in warnings)


@pytest.mark.shows("peers")
def test_a_proof_is_accepted_once_and_its_answer_is_signed(fed: Pair) -> None:
    for instance in fed:
        known = status(instance)
        (itself,) = [s for s in known["applicationServers"] if s["applicationServer"] == address(instance)]
        (partition,) = [task["partition"] for task in known["tasks"] if task["role"] == "active"]
        target = f"{GET_BALANCE}?customerId={customers_of(partition, 1)[0]}"
        peer = PeerTrust(_SECRET)
        for question in (target, f"{target}&maxLag=1000000"):  # ahead of aiohttp, and by it
            mark = peer.mark("peer:1", Peer(address(instance), itself["incarnation"]), f"GET {question}")

            first, again = (
                httpx.get(instance.url + question, headers={FORWARDED_HEADER: mark}, timeout=30) for _ in range(2)
            )

            assert (first.status_code, again.status_code) == (200, 403)
            assert "used before" in again.text
            assert PROOF_HEADER not in again.headers
            received = AnswerReader().feed(_raw(first))
            assert received is not None
            assert peer.is_proven(received.answer, mark, received.proof)


@pytest.mark.shows("peers")
def test_an_answer_that_no_peer_gave_never_reaches_a_client(fed: Pair, directory: DirectoryWriter) -> None:
    # Holders of the secret are trusted. The claim stands for a proxy that changes the answers of a real peer.
    signatures = RecordSignatures(SharedSecret(_SECRET), directory.topic)
    models = "/api/models/balance"
    ids = [f"balance/{partition}:{10**6}" for partition in range(PARTITIONS)]
    with fake_peer() as impostor:
        for instance in fed:
            with httpx.Client(base_url=instance.url, timeout=30) as client:
                others = next(c for c in _CUSTOMERS if ask(instance.url, c).headers[_SERVER] != address(instance))
                lists = [f"{models}/{question}" for question in ("entries", "count", "top?by=amount")]
                for path in (*lists, f"{models}/keys/{others}", f"{GET_BALANCE}?customerId={others}"):
                    _claim_again(fed, directory, impostor.address, signatures)
                    found = _asked_again(client, "GET", path)
                    assert found.status_code == 200
                    assert FORGED not in found.text
                    assert "666" not in found.text
                _claim_again(fed, directory, impostor.address, signatures)
                assert _asked_again(client, "GET", "/api/deadLetters").json() == {
                    "deadLetters": [],
                    "next": None,
                    "missing": [],
                }
                _claim_again(fed, directory, impostor.address, signatures)
                decided = client.post("/api/deadLetters.discard", json={"ids": ids, "reason": "a test"})
                # No such dead letter exists, which only the owners of the partitions know.
                assert decided.status_code == 404, decided.text
        asked = {line.split()[1].partition("?")[0].partition("/keys/")[0] for line in impostor.asked}
        with claiming(directory, impostor.address, signatures), asked_all_the_time(fed) as poller:
            time.sleep(_CLAIMED_SECONDS)

    assert asked == {
        *(f"{models}/{question}" for question in ("entries", "count", "top")),
        models,
        GET_BALANCE,
        "/api/deadLetters",
        "/api/deadLetters.discard",
    }
    assert max(poller.silences.values()) < _MOST_SECONDS


@pytest.mark.shows("false-claim")
@pytest.mark.parametrize("is_renewed", [False, True])
def test_an_unconfirmed_claim_without_a_secret_delays_queries_for_less_than_ten_seconds(
    unsecured: Pair, stack: LocalStack, *, is_renewed: bool
) -> None:
    settings = dict(unsecured[0].environment)
    with (
        DirectoryWriter(stack, settings) as directory,
        fake_peer(is_silent=True) as impostor,
        asked_all_the_time(unsecured) as poller,
    ):
        directory.claim(impostor.address)
        with claiming(directory, impostor.address, None) if is_renewed else threading.Lock():
            time.sleep(_FORGING_SECONDS + _MOST_SECONDS)
            for instance in unsecured:
                for customer in _CUSTOMERS:
                    assert ask(instance.url, customer).status_code == 200

    assert impostor.asked
    assert max(poller.silences.values()) < _MOST_SECONDS


@pytest.fixture(scope="module")
def unsecured(stack: LocalStack) -> Iterator[Pair]:
    settings = application()
    first, second = new_instance(stack, settings), new_instance(stack, settings)
    with running(first, second):
        wait_until_spread((first, second))
        yield feed((first, second))


@contextmanager
def claiming(directory: DirectoryWriter, server: str, signatures: RecordSignatures | None) -> Iterator[None]:
    """Renews a claim as often as an instance does."""
    over = threading.Event()

    def claim() -> None:
        while not over.wait(0.5):
            directory.claim(server, signatures)

    thread = threading.Thread(target=claim)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        directory.write_tombstone(server)


def _claim_again(pair: Pair, directory: DirectoryWriter, server: str, signatures: RecordSignatures) -> None:
    """Claims all partitions under a new incarnation and waits until both instances know the claim."""
    incarnation = uuid.uuid4().hex
    directory.claim(server, signatures, incarnation)
    for instance in pair:
        eventually(
            lambda i=instance: any(s["incarnation"] == incarnation for s in status(i)["applicationServers"]),  # type: ignore[misc]
            "both instances know the claim",
        )


def _asked_again(client: httpx.Client, method: str, path: str) -> httpx.Response:
    deadline = time.monotonic() + _MOST_SECONDS
    while (answer := client.request(method, path)).status_code == 503 and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def _raw(answer: httpx.Response) -> bytes:
    """Returns the raw bytes of a response."""
    lines = [b"HTTP/1.1 %d x" % answer.status_code, *(b"%b: %b" % field for field in answer.headers.raw), b"", b""]
    return b"\r\n".join(lines) + answer.content
