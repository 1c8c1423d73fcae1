"""Finds the record at which Spark fails, by decoding records in ever smaller parts, and at last alone.

A file names the records of each failed attempt, because the instance exits after an attempt that has ended the JVM. An
attempt that ends with the instance has not failed: an operator or the platform has killed the instance. A record is to
blame if it has failed twice alone, and each time Spark has decoded another record that is known to be harmless, or its
JVM has ended. The records after it cannot show that: they may be as bad.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import structlog

from balance_service.engine.database import has_room
from balance_service.errors import FatalError
from balance_service.spark.row_query import QueryEndedError, QueryInterruptedError
from balance_service.spark.session import JvmEndedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

log = structlog.get_logger(__name__)

# A failure may end the instance: 1,024 records take three, one by one, and a fourth to be sure.
_PARTS = 32
_FAILURES = 2
# Of the harmless record, in a row.
_MOST_FAILURES = 3
_DECODES = threading.Lock()
"""Held by the attempt that a task of this process makes."""
_LOOK_SECONDS = 0.2
_ENDED = "Spark's JVM ended while it decoded the record"


@dataclass(frozen=True, slots=True)
class Suspect:
    """The records `[offset, end)`. Spark has failed at one of them `attempts` times in a row.

    `end` is None for a query: it failed at the offset or at any record behind it.
    """

    offset: int
    end: int | None
    attempts: int


@dataclass(frozen=True, slots=True)
class Trial:
    """The first of some records, decoded; or a single one that is to blame."""

    records: Sequence[Mapping[str, Any]]
    rows: pa.Table | None
    """None if the record is to blame."""
    detail: str = ""


class Trials:
    """Decodes the records of one task, and remembers at which of them Spark has failed. One thread calls."""

    def __init__(
        self,
        path: Path,
        decode: Callable[[Sequence[Mapping[str, Any]]], pa.Table],
        decode_harmless: Callable[[], object],
        require_jvm: Callable[[], None],
    ) -> None:
        """Args:
        path: of the file; its folder may be missing.
        decode: raises QueryEndedError, or JvmEndedError.
        decode_harmless: decodes a record of this service, and raises likewise.
        require_jvm: raises JvmEndedError if the JVM has ended.
        """
        self._require_jvm = require_jvm
        self._path = path
        self._decode = decode
        self._decode_harmless = decode_harmless
        self._said = _ENDED
        self._failures = 0

    def may_query(self, position: int) -> bool:
        """Whether a query may begin at a position: not where two have failed, nor before a suspect record."""
        suspect = self._read()
        if suspect is not None and suspect.end is not None:
            return position >= suspect.end
        return self._failed_queries(position, suspect) < _FAILURES

    def query_failed(self, position: int) -> None:
        """Notes that a query has failed that had handed over everything below the position."""
        self._write(Suspect(position, None, self._failed_queries(position, self._read()) + 1))

    def forget(self) -> None:
        """Forgets what has failed: it has succeeded, or was given up for another reason."""
        self._path.unlink(missing_ok=True)

    def decoded(
        self, records: Sequence[Mapping[str, Any]], is_interrupted: Callable[[], bool] = lambda: False
    ) -> Trial:
        """Decodes the first records: all of them, unless Spark fails at one.

        Args:
            records: at least one, in offset order.

        Raises:
            QueryEndedError: Spark fails at the harmless record too.
            QueryInterruptedError: interrupted between two attempts.
            JvmEndedError: the JVM has ended.
            FatalError: Spark has failed at the harmless record three times in a row.
        """
        while not is_interrupted():
            known = self._read()
            part = _part(records, known)
            tried = Suspect(part[0]["offset"], part[-1]["offset"] + 1, 1)
            if known is not None and (known.offset, known.end) == (tried.offset, tried.end):
                tried = Suspect(tried.offset, tried.end, known.attempts + 1)
            if len(part) == 1 and tried.attempts > _FAILURES:
                self.check()
                self.forget()
                return Trial(part, None, self._said)
            try:
                # An attempt that ends the JVM would count for all that were made at the time.
                with _one_at_a_time(is_interrupted):
                    # Another partition's attempt may have ended it.
                    self._require_jvm()
                    try:
                        rows = self._decode(part)
                    except (QueryEndedError, JvmEndedError) as error:
                        log.warning("Spark fails at records", first=tried.offset, records=len(part), error=str(error))
                        self._note(known, tried, error)
                        continue
            except QueryInterruptedError:
                break
            self._write(_left(known, tried))
            return Trial(part, rows)
        raise QueryInterruptedError("the search for the record at which Spark fails was interrupted")

    def check(self) -> None:
        """Checks that Spark decodes a harmless record. Raises as `decoded`."""
        try:
            self._decode_harmless()
        except QueryEndedError as error:
            if not has_room(self._path.parent):
                raise
            self._failures += 1
            log.error("Spark fails at a record that reads nothing from outside", error=str(error), times=self._failures)
            if self._failures >= _MOST_FAILURES:
                raise FatalError(f"Spark decodes nothing any more: {error}") from error
            raise
        self._failures = 0

    def _note(self, known: Suspect | None, tried: Suspect, error: QueryEndedError | JvmEndedError) -> None:
        """Notes that Spark has failed at records, unless it fails at the harmless record too. Raises as `decoded`."""
        self._said = str(error)
        # Before the check: a JVM that hangs does not get beyond it.
        self._write(tried)
        if isinstance(error, JvmEndedError):
            raise error
        try:
            self.check()
        except JvmEndedError:
            raise
        except (QueryEndedError, FatalError):
            self._write(known)
            raise

    def _failed_queries(self, position: int, suspect: Suspect | None) -> int:
        is_there = suspect is not None and suspect.end is None and suspect.offset == position
        return suspect.attempts if suspect is not None and is_there else 0

    def _read(self) -> Suspect | None:
        # A file that a crash has cut says nothing, and only costs another attempt.
        with suppress(OSError, ValueError, TypeError):
            return Suspect(**json.loads(self._path.read_text(encoding="ascii")))
        return None

    def _write(self, suspect: Suspect | None) -> None:
        if suspect is None:
            self.forget()
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(asdict(suspect)), encoding="ascii")
        except OSError as error:
            raise QueryEndedError(f"{self._path} cannot be written: {error.strerror}") from error


@contextmanager
def _one_at_a_time(is_interrupted: Callable[[], bool]) -> Iterator[None]:
    while not _DECODES.acquire(timeout=_LOOK_SECONDS):
        if is_interrupted():
            raise QueryInterruptedError("interrupted before an attempt")
    try:
        yield
    finally:
        _DECODES.release()


def _part(records: Sequence[Mapping[str, Any]], suspect: Suspect | None) -> Sequence[Mapping[str, Any]]:
    """Returns the records to try next: those before the suspect ones, or the first of these; all if none is suspect."""
    if suspect is None or suspect.end is None:
        return records
    inside = [record for record in records if suspect.offset <= record["offset"] < suspect.end]
    if not inside:
        return records
    before = [record for record in records if record["offset"] < suspect.offset]
    return before or inside[: max(1, len(inside) // _PARTS)]


def _left(known: Suspect | None, done: Suspect) -> Suspect | None:
    """Returns what remains suspect after records were decoded."""
    if known is None or known.end is None or done.end is None or known.end <= done.end:
        return None
    return Suspect(max(known.offset, done.end), known.end, known.attempts if known.offset >= done.end else 0)
