"""The calls of the API: what each sends, and how it reads the reply. `Client` and `AsyncClient` run them."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from urllib.parse import quote

from balance_service import api
from balance_service.client.changes import Watch
from balance_service.client.errors import ClientError, InvalidCallError
from balance_service.client.exchange import Attempt, Call, Reply, Request, Server, T, has_no_state
from balance_service.client.results import (
    Balance,
    Change,
    Decided,
    Entry,
    FundsAdded,
    KeyCount,
    PartitionAnswer,
    Position,
    Readiness,
    Scan,
    SnapshotBegin,
    SnapshotEnd,
    State,
    Top,
    key_text,
    shown_key,
)
from balance_service.client.typed import lacks, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from balance_service.client.results import Key, OneKey, Role

Keyed = TypeVar("Keyed", State[Any], Entry[Any], Change[Any])
Streamed = Change[Any] | SnapshotBegin | SnapshotEnd
_BALANCE = "balance"
_MOST_WRITTEN_KEYS = 100_000
_GENERATIONS = ("generations", "comparison", "keptUntil", "problem")
_STATUS = ("applicationServer", "ready", "reasons", "causes", "models", "tasks", "problems", "applicationServers")


@dataclass(slots=True, eq=False)
class Pages(Generic[T]):
    """A list that the API answers in pages."""

    fetch: Callable[[str | None], Call[tuple[Sequence[T], str | None]]]
    """Returns a page and the key after which the next one begins, given that key of the previous page."""
    after: str | None = None
    is_over: bool = False

    def next_page(self) -> Call[Sequence[T]]:
        items, self.after = yield from self.fetch(self.after)
        self.is_over = self.after is None
        return items


class WrittenPositions:
    """The highest position of the client's own commands, by key. Any thread may use it.

    A client does not know the partition of a key, so it cannot keep one position for each partition. The least recently
    written of more than 100,000 keys is forgotten.
    """

    def __init__(self) -> None:
        self._positions: OrderedDict[str, Position] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, key: str, position: Position) -> None:
        with self._lock:
            self._positions[key] = latest(self._positions.get(key), position)
            self._positions.move_to_end(key)
            if len(self._positions) > _MOST_WRITTEN_KEYS:
                self._positions.popitem(last=False)

    def of(self, key: str) -> Position | None:
        with self._lock:
            return self._positions.get(key)


def latest(known: Position | None, new: Position) -> Position:
    """Returns the higher of two positions of a key; the new one if the key has another partition now."""
    return known if known is not None and known.partition == new.partition and known > new else new


class Calls:
    """The calls of a client."""

    def __init__(
        self, address: str, *, retry_seconds: float, retry_add_funds_seconds: float, reads_its_writes: bool
    ) -> None:
        """Args:
        address: host and port of the instance, for errors.
        retry_add_funds_seconds: the last attempt of `add_funds` begins at most that long after the first.
        """
        self._server = Server(address)
        self._retry_seconds = retry_seconds
        self._retry_add_funds_seconds = retry_add_funds_seconds
        self._written = WrittenPositions() if reads_its_writes else None
        self._keys: dict[str, str] = {}

    def get_balance(
        self,
        customer_id: str,
        *,
        min_position: Position | None = None,
        max_lag: int | None = None,
        max_age: float | None = None,
    ) -> Call[Balance]:
        """Returns the balance of a customer.

        Args:
            min_position: the answer includes the events below this position; the instance waits for them.
            max_lag: a standby may answer too, if it lags by at most that many records.
            max_age: any copy may answer that includes all events until at most that many seconds ago, also while the
                broker is away.
        """
        parameters = {"customerId": customer_id, **self._bounds(customer_id, min_position, max_lag, max_age)}
        content, answered = yield from self._one(Request(path=api.GET_BALANCE, parameters=parameters), "amount")
        return Balance(
            customer_id=customer_id, amount=None if content is None else Decimal(content["amount"]), **answered
        )

    def add_funds(
        self, customer_id: str, amount: Decimal | int | str, *, idempotency_key: str | None = None
    ) -> Call[FundsAdded]:
        """Adds funds to a customer. Returns once all in-sync replicas have the event.

        The client may send the request several times: all have one idempotency key, and only one of them counts. After
        an error, `error.idempotency_key` has the key, for another call.

        Args:
            amount: above 0, with at most two digits after the point.
            idempotency_key: 1 to 128 visible ASCII characters. Of several additions to the customer with one key, the
                first counts. By default, each call makes a key of its own.
        """
        key = str(uuid.uuid4()) if idempotency_key is None else idempotency_key
        if not re.fullmatch(api.IDEMPOTENCY_KEY_PATTERN, key):
            raise InvalidCallError("idempotency_key must have 1 to 128 visible ASCII characters")
        body = {"customerId": customer_id, "amount": _digits(amount)}
        request = _post(api.ADD_FUNDS, body, {api.IDEMPOTENCY_KEY: key})
        try:
            reply = yield from self._server.exchange(request, self._retry_add_funds_seconds)
            position = Position.parse(self._server.header(reply, api.POSITION))
        except ClientError as error:
            error.idempotency_key = key
            raise
        if self._written is not None:
            self._written.add(customer_id, position)
        return FundsAdded(position=position, idempotency_key=key)

    def get(
        self,
        model: str,
        key: Key,
        *,
        into: Any = None,
        min_position: Position | None = None,
        max_lag: int | None = None,
        max_age: float | None = None,
    ) -> Call[State[Any]]:
        """Returns a read model's answer for a key.

        Args:
            key: its text, number, UUID or bytes; the columns of a composite key, such as `{"card": "c1", "day": 20}`.
            into: the type of the value: a dataclass, such as that of the states, or another that `typed.read` knows.
            min_position, max_lag, max_age: as for `get_balance`.

        Raises:
            InvalidCallError: the value does not fit `into`; the message names the field.
        """
        of_balance = None if model != _BALANCE or isinstance(key, Mapping) else key_text(key)
        request = _of_key(model, key, self._bounds(of_balance, min_position, max_lag, max_age))
        content, answered = yield from self._one(request, "key", "value")
        if content is None:
            content = {"key": key if isinstance(key, Mapping) else key_text(key), "value": None}
        found = State(value=content["value"], **shown_key(content["key"]), **answered)
        return (yield from self.typed(model, into, [found]))[0]

    def tables(self) -> Call[list[dict[str, Any]]]:
        """Returns the tables that the instance's read models join with, as the HTTP API describes them."""
        found: list[dict[str, Any]] = (yield from self._read(Request(path=api.TABLES), "tables"))["tables"]
        return found

    def row(
        self,
        table: str,
        key: OneKey,
        *,
        min_position: Position | None = None,
        max_lag: int | None = None,
        max_age: float | None = None,
    ) -> Call[State[Any]]:
        """Returns the newest row of a table that read models join with.

        Args:
            table: its topic.
            key: its text or number.
            min_position, max_lag, max_age: as for `get_balance`, of the table's topic.
        """
        path = f"{api.TABLES}/{segment(table)}/keys/{segment(key_text(key))}"
        request = Request(path=path, parameters=self._bounds(None, min_position, max_lag, max_age))
        content, answered = yield from self._one(request, "key", "value")
        if content is None:
            content = {"key": key_text(key), "value": None}
        return State(value=content["value"], **shown_key(content["key"]), **answered)

    def entries(
        self,
        model: str,
        *,
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
        into: Any = None,
        page_size: int = 1000,
        max_lag: int | None = None,
    ) -> Pages[Entry[Any]]:
        """Yields the entries of a read model in the order of their keys, and requests them page by page.

        All pages are of the generation that answered the first one. If that is dropped before the last page,
        InvalidCallError says so.

        Args:
            start: the first key.
            end: the last key.
            prefix: every key begins with it.
            within: the first columns of a composite key; then `start`, `end` and `prefix` are of the next column.
            into: as for `get`, of each value.
            page_size: entries of a request, at most 1000.
            max_lag: as for `get_balance`.
        """
        given = {
            **_columns(within or {}),
            "from": start,
            "to": end,
            "prefix": prefix,
            "limit": page_size,
            "maxLag": max_lag,
        }

        generation: int | None = None

        def fetch(after: str | None) -> Call[tuple[Sequence[Entry[Any]], str | None]]:
            nonlocal generation
            page = {**given, "after": after, "generation": generation}
            content, scan = yield from self._scan(model, "entries", page, "entries", "next")
            generation = scan.generation
            return (yield from self.typed(model, into, _entries(content, scan))), content["next"]

        return Pages(fetch)

    def count(self, model: str, *, max_lag: int | None = None, partial: bool = False) -> Call[KeyCount]:
        """Returns how many keys of a read model have a state.

        Args:
            max_lag: as for `get_balance`.
            partial: accept an answer that lacks partitions; `scan.missing` has them.
        """
        content, scan = yield from self._scan(model, "count", {"maxLag": max_lag, "partial": partial}, "count")
        return KeyCount(count=content["count"], scan=scan)

    def top(
        self,
        model: str,
        *,
        by: str,
        into: Any = None,
        limit: int = 10,
        max_lag: int | None = None,
        partial: bool = False,
    ) -> Call[Top[Any]]:
        """Returns the entries with the greatest values of a field.

        Args:
            by: a field whose values are numbers.
            into: as for `get`, of each value.
            limit: how many entries, at most 1000.
            max_lag: as for `get_balance`.
            partial: as for `count`.
        """
        given = {"by": by, "limit": limit, "maxLag": max_lag, "partial": partial}
        content, scan = yield from self._scan(model, "top", given, "entries")
        entries = yield from self.typed(model, into, _entries(content, scan))
        return Top(entries=entries, is_cut_off="next" in content, scan=scan)

    def query(self, path: str) -> Call[Any]:
        """Returns the JSON value at a path that a read model declares, such as `/leaderboard/1`.

        None if the key that the path names has no state.

        Args:
            path: percent-encoded, with its parameters.
        """
        if not path.startswith("/") or not path.isprintable():
            raise InvalidCallError(f"{path[:100]!r} is not a path below the URL; give one that begins with a slash")
        reply = yield from self._server.exchange(Request(path=path), self._retry_seconds)
        return None if has_no_state(reply) else self._server.json(reply)

    def changes(
        self,
        model: str,
        *,
        key: Key | None = None,
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
    ) -> Watch:
        """Returns the change stream of a key, or of a range of keys."""
        given = _given({**_columns(within or {}), "from": start, "to": end, "prefix": prefix})
        if key is None:
            request = Request(path=f"{_path(model)}/changes", parameters=given)
        elif given:
            raise InvalidCallError("changes takes either a key, or start, end, prefix and within")
        else:
            request = _of_key(model, key)
        return Watch(self._server, request, self._retry_seconds)

    def ready(self) -> Call[Readiness]:
        """Returns whether the instance can answer queries. Does not retry."""
        outcome = self._server.outcome((yield Attempt(Request(path=api.READY))))
        if isinstance(outcome, Reply):
            problems = self._server.content(outcome, "status", "problems")["problems"]
            return Readiness(is_ready=True, reasons="", problems=tuple(problems))
        if outcome.status is None:
            raise outcome
        return Readiness(is_ready=False, reasons=str(outcome), problems=())

    def status(self) -> Call[dict[str, Any]]:
        """Returns what the instance knows of itself and of the others, as `/openapi.json` describes it."""
        return (yield from self._read(Request(path=api.STATUS), *_STATUS))

    def dead_letters(
        self,
        *,
        model: str | None = None,
        cause: str | None = None,
        status: str | None = None,
        on_missing: Callable[[Sequence[str]], None] | None = None,
    ) -> Pages[dict[str, Any]]:
        """Yields the dead letters that are open or were closed in the last seven days, as `/openapi.json` describes.

        Args:
            model: only those of this read model.
            cause: only those with this cause.
            status: only those with this status.
            on_missing: called with the partitions that could not be read, such as `balance/1`, after each page that
                lacks some; without it, that is an error.
        """
        given = {"model": model, "cause": cause, "status": status, "limit": 500, "partial": on_missing is not None}

        def fetch(after: str | None) -> Call[tuple[Sequence[dict[str, Any]], str | None]]:
            request = Request(path=api.DEAD_LETTERS, parameters=_given({**given, "after": after}))
            content = yield from self._read(request, "deadLetters", "next")
            if on_missing is not None and content.get("missing"):
                on_missing(content["missing"])
            return content["deadLetters"], content["next"]

        return Pages(fetch)

    def dead_letter(self, letter_id: str) -> Call[dict[str, Any]]:
        """Returns one dead letter, with its record."""
        request = Request(path=f"{api.DEAD_LETTERS}/{segment(letter_id)}")
        return (yield from self._read(request, "id", "valueBase64"))

    def redrive(self, ids: Iterable[str], *, reason: str) -> Call[Decided]:
        """Has dead letters tried again at once.

        Args:
            ids: at most 500, of at most 12 KiB in all.
            reason: stored with the decision.

        Raises:
            ClientError: none of them can be redriven; names the reason of the first.
        """
        return (yield from self._decide("redrive", ids, reason))

    def discard(self, ids: Iterable[str], *, reason: str) -> Call[Decided]:
        """Has the records of dead letters never applied, which cannot be undone. As `redrive`."""
        return (yield from self._decide("discard", ids, reason))

    def set_aside(self, ids: Iterable[str], *, reason: str) -> Call[Decided]:
        """Makes dead letters of records at positions that do not move, and has their partitions go on.

        Args:
            ids: as those of the dead letters: `STAGE/PARTITION:OFFSET`.
            reason: stored with the decision, and in the dead letter.

        Raises:
            ClientError: none of them is the next record of its partition; names the position of the first.
        """
        return (yield from self._decide("setAside", ids, reason))

    def models(self) -> Call[list[dict[str, Any]]]:
        """Returns the read models that the instances host, as `/openapi.json` describes them."""
        models: list[dict[str, Any]] = (yield from self._read(Request(path=api.MODELS), "models"))["models"]
        return models

    def generations(self, model: str) -> Call[dict[str, Any]]:
        """Returns the generations of a read model, as `/openapi.json` describes them."""
        return (yield from self._read(Request(path=f"{api.MODELS}/{segment(model)}/generations"), *_GENERATIONS))

    def differences(self, model: str) -> Call[list[dict[str, Any]]]:
        """Returns the first differences between the serving generation and the one that is built."""
        request = Request(path=f"{api.MODELS}/{segment(model)}/differences")
        found: list[dict[str, Any]] = (yield from self._read(request, "differences"))["differences"]
        return found

    def rebuild(
        self,
        model: str,
        *,
        switch: str | None = None,
        keep_old_seconds: int = api.KEEP_OLD_SECONDS,
        max_rate: int | None = None,
        files: str | None = None,
        digest: str | None = None,
        keep_files: bool = False,
        reason: str = "rebuild",
    ) -> Call[dict[str, Any]]:
        """Begins to build a new generation of a read model, from the beginning of its topic, or from files.

        Args:
            switch: `when_equal`, `always` or `never`: when it serves, once it has caught up. By default `when_equal`;
                `never` if the class of the model has another version now.
            keep_old_seconds: how long the old generation is kept after that.
            max_rate: events per second that each instance replays at most.
            files: where a batch job has left the files of the generation; with the `digest` of their manifest.
            keep_files: whether they are left when they are loaded.
            reason: stored with the request.

        Raises:
            ClientError: a generation is being built or kept already; or the files do not fit.
        """
        given = {"switch": switch, "keepOld": keep_old_seconds, "maxRate": max_rate, "reason": reason}
        given |= {"files": files, "digest": digest, "keepFiles": True if keep_files else None}
        body = {"model": model} | {name: value for name, value in given.items() if value is not None}
        return (yield from self._read(_post(f"{api.MODELS}.rebuild", body), *_GENERATIONS))

    def check_files(self, model: str, files: str) -> Call[list[dict[str, Any]]]:
        """Returns which instances do not see the folder of the next generation, and why; empty if all do.

        Args:
            files: as the command `rebuild --files` has it.
        """
        path = f"{api.MODELS}/{segment(model)}/files"
        content = yield from self._read(Request(path=path, parameters={"files": files}), "problems")
        problems: list[dict[str, Any]] = content["problems"]
        return problems

    def switch(self, model: str, *, to: int | None = None, anyway: bool = False, reason: str) -> Call[dict[str, Any]]:
        """Has another generation serve.

        Args:
            to: its number, by default that of the only other one when the call begins.
            anyway: whether it serves although something would be lost by that.
            reason: stored with the request.

        Raises:
            ClientError: it cannot serve, or something would be lost; the message names what. If an answer was lost, the
                request is sent again, and it may be refused because that generation serves already.
        """
        if to is None:
            # Without a number, the service switches to the other generation each time, also if the answer to the first
            # request was lost.
            found = (yield from self.generations(model))["generations"]
            to = next((one["generation"] for one in found if one["status"] != "serving"), None)
        body: dict[str, Any] = {"model": model, "reason": reason} | ({} if to is None else {"to": to})
        body |= {"anyway": True} if anyway else {}
        return (yield from self._read(_post(f"{api.MODELS}.switch", body), *_GENERATIONS))

    def drop(self, model: str, *, generation: int, reason: str) -> Call[dict[str, Any]]:
        """Deletes a generation that does not serve."""
        body = {"model": model, "generation": generation, "reason": reason}
        return (yield from self._read(_post(f"{api.MODELS}.drop", body), *_GENERATIONS))

    def typed(self, model: str, into: Any, found: Sequence[Keyed]) -> Call[tuple[Keyed, ...]]:
        """Returns answers with their values as a type; unchanged if it is None. A value None stays.

        Raises:
            InvalidCallError: a value does not fit; the message names the field.
        """
        if into is None:
            return tuple(found)
        asks = any(lacks(into, one.value) and not one.columns for one in found)
        column = (yield from self._key_of(model)) if asks else ""
        return tuple(
            one
            if one.value is None
            else replace(one, value=read(into, one.value, one.columns or ({column: one.key} if column else None)))
            for one in found
        )

    def typed_event(self, model: str, into: Any, event: Streamed) -> Call[Streamed]:
        """Returns an event of a change stream; of a change, with its value as `typed`."""
        return (yield from self.typed(model, into, [event]))[0] if isinstance(event, Change) else event

    def _key_of(self, model: str) -> Call[str]:
        """Returns the field of a read model's key of one column; empty if it has none."""
        if model not in self._keys:
            self._keys |= {one["name"]: one["key"] for one in (yield from self.models())}
        return self._keys.get(model, "")

    def _decide(self, decision: str, ids: Iterable[str], reason: str) -> Call[Decided]:
        request = _post(f"{api.DEAD_LETTERS}.{decision}", {"ids": [*ids], "reason": reason})
        content = yield from self._read(request, "accepted", "refused")
        return Decided(
            accepted=tuple(content["accepted"]), refused={one["id"]: one["reason"] for one in content["refused"]}
        )

    def _read(self, request: Request, *names: str) -> Call[dict[str, Any]]:
        reply = yield from self._server.exchange(request, self._retry_seconds)
        return self._server.content(reply, *names)

    def _one(self, request: Request, *names: str) -> Call[tuple[dict[str, Any] | None, dict[str, Any]]]:
        """Returns the answer for a key, None if it has no state, and the attributes of its `KeyAnswer`."""
        reply = yield from self._server.exchange(request, self._retry_seconds)
        content = None if has_no_state(reply) else self._server.content(reply, *names)
        header, lag, age = self._server.header, reply.headers.get(api.LAG), reply.headers.get(api.AGE)
        return content, {
            "application_server": header(reply, api.APPLICATION_SERVER),
            "role": header(reply, api.ROLE),
            "position": Position.parse(header(reply, api.POSITION)),
            "epoch": int(header(reply, api.EPOCH)),
            "lag": None if lag is None else int(lag),
            "age": None if age is None else float(age),
        }

    def _scan(
        self, model: str, kind: str, given: Mapping[str, object], *names: str
    ) -> Call[tuple[dict[str, Any], Scan]]:
        request = Request(path=f"{_path(model)}/{kind}", parameters=_given(given))
        reply = yield from self._server.exchange(request, self._retry_seconds)
        content = self._server.content(reply, *names)
        offsets, roles, epochs, lags = (
            _by_partition(reply.headers.get(name, "")) for name in (api.POSITION, api.ROLE, api.EPOCH, api.LAG)
        )
        partitions = {
            partition: PartitionAnswer(
                offset=int(offset),
                role=cast("Role", roles.get(partition, "standby")),
                epoch=int(epochs[partition]),
                lag=int(lags[partition]) if partition in lags else None,
            )
            for partition, offset in offsets.items()
        }
        missing, generation = reply.headers.get(api.MISSING, ""), reply.headers.get(api.GENERATION)
        return content, Scan(
            generation=None if generation is None else int(generation),
            application_server=self._server.header(reply, api.APPLICATION_SERVER),
            partitions=partitions,
            missing=frozenset(map(int, missing.split(","))) if missing else frozenset(),
        )

    def _bounds(
        self, key: str | None, min_position: Position | None, max_lag: int | None, max_age: float | None
    ) -> dict[str, str]:
        """Returns the parameters that say how recent an answer must be.

        Args:
            key: the customer, of whose additions the answer must include those of this client.
        """
        written = None if self._written is None or key is None else self._written.of(key)
        if written is not None:
            min_position = latest(min_position, written)
        return _given(
            {"minPosition": min_position, "maxLag": max_lag, "maxAge": None if max_age is None else f"{max_age:.3f}"}
        )


def segment(text: str) -> str:
    """Returns a segment of a path, percent-encoded; dots alone, which change a path, too.

    Raises InvalidCallError: the text is not UTF-8.
    """
    try:
        return quote(text, safe="") if text.strip(".") else "%2E" * len(text)
    except UnicodeEncodeError:
        raise InvalidCallError(f"{text!r} is not UTF-8") from None


def _of_key(model: str, key: Key, parameters: Mapping[str, str] | None = None) -> Request:
    """Returns the request for one key."""
    if isinstance(key, Mapping):
        return Request(path=f"{_path(model)}/keys", parameters={**_given(_columns(key)), **(parameters or {})})
    return Request(path=f"{_path(model)}/keys/{segment(key_text(key))}", parameters=parameters or {})


def _columns(given: Mapping[str, str | int]) -> Mapping[str, str | int]:
    """Returns columns of a composite key as they are. Raises InvalidCallError: one is a parameter of queries."""
    if taken := given.keys() & api.NO_PART_NAMES:
        raise InvalidCallError(f"'{min(taken)}' is a parameter of queries, and so no column of a composite key")
    return given


def _path(model: str) -> str:
    return f"{api.MODELS}/{segment(model)}"


def _post(path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Request:
    return Request(
        method="POST",
        path=path,
        headers={"Content-Type": "application/json", **(headers or {})},
        body=json.dumps(body).encode(),
    )


def _given(parameters: Mapping[str, object]) -> dict[str, str]:
    """Returns the parameters to send; None and False are those that the caller did not give."""
    return {
        name: "true" if value is True else key_text(value) if isinstance(value, bytes) else str(value)
        for name, value in parameters.items()
        if value is not None and value is not False
    }


def _digits(amount: object) -> str:
    """Returns an amount as text, which the API takes so that no digit is lost."""
    match amount:
        case str():
            return amount
        case int() | Decimal():
            return format(Decimal(amount), "f")
    raise InvalidCallError(
        f"the amount {amount!r} is a {type(amount).__name__}; give a Decimal, such as Decimal('12.34')"
    )


def _entries(content: Mapping[str, Any], scan: Scan) -> tuple[Entry[Any], ...]:
    return tuple(Entry(value=entry["value"], scan=scan, **shown_key(entry["key"])) for entry in content["entries"])


def _by_partition(text: str) -> dict[int, str]:
    """Parses `partition:value`, separated by commas."""
    pairs = (one.partition(":") for one in text.split(",") if one)
    return {int(partition): value for partition, _, value in pairs}
