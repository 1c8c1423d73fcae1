"""What somebody does that may write to the directory of instances, or stands between them, and is none of them."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import TYPE_CHECKING, Any

import fastavro

from balance_service.avro.schemas import load_schema
from tests.support.service import PARTITIONS
from tests.support.topics import Writer, read_topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from balance_service.cluster.record_signatures import RecordSignatures
    from balance_service.devtools.local.stack import LocalStack

HUGE_EPOCH = 10**15
FORGED = "666.66"


class DirectoryWriter(Writer):
    """Writes to an application's directory of instances whatever it likes."""

    def __init__(self, stack: LocalStack, settings: Mapping[str, str]) -> None:
        super().__init__(stack, f"{settings['BALANCE_APPLICATION_ID']}-application-servers")
        self._stack = stack
        schema = load_schema("ApplicationServer")
        self._schema = fastavro.parse_schema(schema)
        schema_id = self.register(f"{self.topic}-parts.code.balance.cluster.ApplicationServer", schema)
        self._header = b"\0" + schema_id.to_bytes(4, "big")

    def claim(self, address: str, signatures: RecordSignatures | None = None, incarnation: str = "0" * 32) -> None:
        """Say that a server owns every partition, under an epoch that no owner has."""
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

    def bid_farewell(self, address: str) -> None:
        """In the name of an instance, that it is gone."""
        self.send(address, None, partition=0)
        self.producer.flush(10)

    def repeat(self, record: Any) -> None:
        """Write what an instance has written once more, header for header."""
        self.send(record.key(), record.value(), partition=0, headers=record.headers())
        self.producer.flush(10)

    def records(self) -> list[Any]:
        """What was written, as far as it is still there."""
        return read_topic(self._stack, self.topic)


class Liar:
    """A server that is no instance: what it was asked, as method and path."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self.asked: list[str] = []


@contextmanager
def lying(*, is_silent: bool = False) -> Iterator[Liar]:
    """A server that answers every query as an owner would, with an amount of its own; or never, if it is silent."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            liar.asked.append(f"{self.command} {self.path}")
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
            self.send_header("Balance-Application-Server", liar.address)
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
    liar = Liar(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield liar
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
