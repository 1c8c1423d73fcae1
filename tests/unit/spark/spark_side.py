"""A thread that replaces Spark and its JVM at the other end of a query's sockets."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = pa.schema({"offset": pa.int64(), "key": pa.binary()})
LONG = 10.0


def lone_session(*, is_stopped: bool = False, exit_code: int | None = None) -> Any:
    """A session without a query; it only shows whether its JVM lives. Its heap cannot be read."""
    gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: exit_code))
    bean = SimpleNamespace(getRuntimeMXBean=lambda: SimpleNamespace(getPid=lambda: 1))
    java = SimpleNamespace(lang=SimpleNamespace(management=SimpleNamespace(ManagementFactory=bean)))
    context = SimpleNamespace(_gateway=gateway, _jvm=SimpleNamespace(java=java))
    session = SimpleNamespace(sparkContext=lambda: SimpleNamespace(isStopped=lambda: is_stopped))
    return SimpleNamespace(sparkContext=context, _jsparkSession=session)


class Message(NamedTuple):
    """A record batch in the form that the socket carries, after the number of rows before it."""

    rows: int
    data: bytes


def message(*offsets: int) -> Message:
    batch = pa.record_batch({"offset": offsets, "key": [b"k%d" % n for n in offsets]}, schema=SCHEMA)
    return Message(len(offsets), batch.serialize().to_pybytes())


class Spark:
    """The parts of Spark that a query uses: session, DataFrame, writer and query in one.

    It opens one partition. It sends the schema, then a message for each byte that requests one; then it tells that the
    batch is completed, if `completes`, and closes the connection, if `ends`.
    """

    def __init__(
        self,
        *messages: Message,
        partition: int = 0,
        lost_rows: int = 0,
        ends: bool = True,
        connects: bool = True,
        failure: Exception | None = None,
        completes: bool = False,
        is_endless: bool = False,
        on_start: Callable[[], None] = lambda: None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._messages = messages
        self._partition = partition
        self._lost_rows = lost_rows
        self._ends = ends
        self._connects = connects
        self._failure = failure
        self._completes = completes
        self._is_endless = is_endless
        self._on_start = on_start
        self._on_stop = on_stop
        self._path = ""
        self._thread = threading.Thread(target=self._run)
        self.columns = ["offset", "key", "partition"]
        self.has_rows = threading.Event()
        """Cleared by a test to delay the rows."""
        self.has_rows.set()
        self.asked = 0
        self.is_left = False
        """Whether the other end has closed the connection."""
        self.told: dict[str, object] = {}
        self.calls: list[str] = []
        self.sparkContext = lone_session().sparkContext
        self.isActive = connects or failure is None

    def __getattr__(self, name: str) -> Any:
        # Each step of the path to a class or a method of the JVM is this object.
        if name in {"_jvm", "parts", "code", "balance", "_jdf", "_jwrite", "writeStream"}:
            return self
        raise AttributeError(name)

    def schema(self) -> str:
        return "schema"

    def drop(self, column: str) -> Spark:
        assert column == "partition"
        return self

    def Handover(self, path: str, most_rows: int, most_bytes: int, schema: str, sent: str) -> str:
        assert (most_rows > 0, most_bytes > 0, schema, sent) == (True, True, "schema", "schema")
        self._path = path
        return path

    def outputMode(self, mode: str) -> Spark:
        return self._tell(mode=mode)

    def trigger(self, **trigger: str) -> Spark:
        return self._tell(**trigger)

    def option(self, name: str, value: str) -> Spark:
        return self._tell(**{name: value})

    def foreach(self, handover: str) -> Spark:
        return self._tell(handover=handover)

    def start(self) -> Spark:
        self.calls.append("start")
        self._on_start()
        if self._connects:
            self._thread.start()
        return self

    def stop(self) -> None:
        self.calls.append("stop")
        self._on_stop()

    def awaitTermination(self, _seconds: float) -> bool:
        return not self._is_endless

    def exception(self) -> Exception | None:
        return self._failure

    def end(self) -> None:
        self.has_rows.set()
        if self._thread.is_alive():
            self._thread.join(LONG)

    @property
    def listener(self) -> Path:
        return Path(self._path)

    @property
    def checkpoint(self) -> Path:
        return Path(str(self.told["checkpointLocation"]))

    def _tell(self, **told: object) -> Spark:
        self.told |= told
        return self

    def _run(self) -> None:
        with suppress(OSError), socket.socket(socket.AF_UNIX) as opening:
            opening.connect(self._path)
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
            connection.settimeout(LONG)
            connection.connect(f"{self._path}.{self._partition}")
            connection.sendall(SCHEMA.serialize().to_pybytes())
            before = 0
            for rows, data in self._messages:
                if not self._is_asked(connection):
                    return
                self.has_rows.wait(LONG)
                connection.sendall(before.to_bytes(8) + data)
                before += rows + self._lost_rows
            if self._completes and self._is_asked(connection):
                connection.sendall((-1).to_bytes(8, signed=True))
            while not self._ends and self._is_asked(connection):
                pass

    def _is_asked(self, connection: socket.socket) -> bool:
        asked = len(connection.recv(1))
        self.asked += asked
        self.is_left = not asked
        return bool(asked)
