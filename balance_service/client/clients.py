"""`Client` and `AsyncClient`: they send the requests of calls, over httpx."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from contextlib import aclosing, closing, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from balance_service import api
from balance_service.client.calls import Calls, Pages
from balance_service.client.errors import InvalidCallError
from balance_service.client.exchange import NoReply, Reply
from balance_service.errors import ConfigurationError
from balance_service.process.package import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping

    from balance_service.client.calls import Streamed
    from balance_service.client.changes import Watch
    from balance_service.client.exchange import Attempt, Call, Request
    from balance_service.client.results import (
        Change,
        Entry,
        Key,
        OneKey,
        Position,
        SnapshotBegin,
        SnapshotEnd,
        State,
        Top,
    )

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V")
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
Event = TypeVar("Event", threading.Event, asyncio.Event)
_MOST_IDLE_CONNECTIONS = 20
_ENDED = NoReply("the server has ended it")
_CLOSED = NoReply("the client is closed; create another one", is_closed=True)


def _blocking(call: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(call)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(call(self._calls, *args, **kwargs))

    return method


def _blocking_pages(
    pages: Callable[Concatenate[Calls, P], Pages[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @wraps(pages)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        of_call = pages(self._calls, *args, **kwargs)
        while not of_call.is_over:
            yield from self._run(of_call.next_page())

    return method


def _awaited(
    call: Callable[Concatenate[Calls, P], Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(call)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(call(self._calls, *args, **kwargs))

    return method


def _awaited_pages(
    pages: Callable[Concatenate[Calls, P], Pages[T]],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[T]]:
    @wraps(pages)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        of_call = pages(self._calls, *args, **kwargs)
        while not of_call.is_over:
            for item in await self._run(of_call.next_page()):
                yield item

    return method


_entries, _awaited_entries = _blocking_pages(Calls.entries), _awaited_pages(Calls.entries)


class _Connected(ABC, Generic[Http, Event]):
    """The parameters of both clients, and their requests."""

    def __init__(
        self,
        url: str,
        *,
        token: str | Callable[[], str] | None = None,
        tls: ssl.SSLContext | None = None,
        trust_env: bool = True,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 30.0,
        silence_seconds: float = 2.5 * api.ALIVE_SECONDS,
        idempotency_window_seconds: float = api.IDEMPOTENCY_WINDOW_SECONDS,
        read_your_writes: bool = False,
    ) -> None:
        """Args:
            url: of an instance, or of a proxy before instances.
            token: is sent with every request; a function is called before each one.
            tls: for a CA or a client certificate of your own.
            trust_env: use the proxies of the environment (`HTTPS_PROXY` and others).
            timeout_seconds: the longest time to connect, to send, and to wait for the response.
            retry_seconds: how long a call is tried again while no instance can answer; 0: never.
            silence_seconds: the time without a byte after which a change stream connects again.
            idempotency_window_seconds: BALANCE_IDEMPOTENCY_WINDOW of the service. `add_funds` stops trying before it
                ends.
            read_your_writes: answers about a balance include the additions of this client.

        Raises:
            ConfigurationError: the URL cannot be used.
        """
        base = _url(url)
        self.url = url
        # An attempt takes the timeout to connect, and again to send the request.
        last_addition = max(0.0, idempotency_window_seconds - 2 * timeout_seconds)
        self._calls = Calls(
            base.netloc.decode(),
            retry_seconds=retry_seconds,
            retry_add_funds_seconds=min(retry_seconds, last_addition),
            reads_its_writes=read_your_writes,
        )
        self._token = token
        self._timeout = httpx.Timeout(timeout_seconds)
        self._stream_timeout = httpx.Timeout(timeout_seconds, read=silence_seconds)
        self._options = {
            "base_url": base,
            "headers": {"User-Agent": f"balance-service/{__version__}"},
            # A context that verifies takes long to make.
            "verify": base.scheme == "https" if tls is None else tls,
            "trust_env": trust_env,
            # Each change stream has a connection.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=_MOST_IDLE_CONNECTIONS),
        }
        self._closed: Event = self._event()
        self._begin()

    def _begin(self) -> None:
        self._http: Http = self._open(**self._options)
        self._streams: set[httpx.Response] = set()
        self._process = os.getpid()

    def _begin_in_child(self) -> None:
        """Opens connections of its own in a child of `fork`.

        It would read the answers to its parent's requests from the connections that they share.
        """
        if self._process != os.getpid():
            if not self._closed.is_set():
                # The parent's may belong to another event loop.
                self._closed = self._event()
            self._begin()

    def _ended(self, process: int) -> NoReply | None:
        """Why a change stream that was opened in a process is not read on; None if it is."""
        if self._closed.is_set():
            return _CLOSED
        return None if process == os.getpid() else NoReply("it is the connection of the parent of this process")

    def _no_reply(self, error: httpx.HTTPError | RuntimeError) -> NoReply:
        """Why there is no response. Raises a RuntimeError that is not due to the end of the client."""
        if self._closed.is_set():
            return _CLOSED
        if isinstance(error, RuntimeError):
            raise error
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        is_untrusted = any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes)
        # Without a connection, nothing was sent.
        is_late = isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout)
        return NoReply(str(error) or type(error).__name__, is_untrusted=is_untrusted, is_late=is_late)

    @abstractmethod
    def _open(self, **options: Any) -> Http:
        """Returns the HTTP client."""

    @abstractmethod
    def _event(self) -> Event:
        """Returns an event, for the end of the client."""

    def _built(self, request: Request, timeout: httpx.Timeout) -> httpx.Request:
        headers = dict(request.headers)
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token() if callable(self._token) else self._token}"
        try:
            return self._http.build_request(
                request.method,
                request.path,
                params=request.parameters or None,
                headers=headers,
                content=request.body,
                timeout=timeout,
            )
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InvalidCallError(f"the request cannot be sent: {error}") from error


class Client(_Connected[httpx.Client, threading.Event]):
    """A client of the service. Any thread may use it, and any child of `fork`. Close it, or use it in `with`.

    A call raises a subclass of `ClientError`, by what the caller does about it.
    """

    get_balance = _blocking(Calls.get_balance)
    add_funds = _blocking(Calls.add_funds)
    count = _blocking(Calls.count)
    query = _blocking(Calls.query)
    ready = _blocking(Calls.ready)
    status = _blocking(Calls.status)
    dead_letters = _blocking_pages(Calls.dead_letters)
    dead_letter = _blocking(Calls.dead_letter)
    redrive = _blocking(Calls.redrive)
    discard = _blocking(Calls.discard)
    set_aside = _blocking(Calls.set_aside)
    models = _blocking(Calls.models)
    tables = _blocking(Calls.tables)
    row = _blocking(Calls.row)
    generations = _blocking(Calls.generations)
    differences = _blocking(Calls.differences)
    rebuild = _blocking(Calls.rebuild)
    switch = _blocking(Calls.switch)
    drop = _blocking(Calls.drop)

    @overload
    def get(
        self,
        model: str,
        key: Key,
        *,
        min_position: Position | None = None,
        max_lag: int | None = None,
        max_age: float | None = None,
    ) -> State[Any]: ...

    @overload
    def get(
        self,
        model: str,
        key: Key,
        *,
        into: type[V],
        min_position: Position | None = None,
        max_lag: int | None = None,
        max_age: float | None = None,
    ) -> State[V | None]: ...

    @wraps(Calls.get)
    def get(self, model: str, key: Key, **of: Any) -> State[Any]:
        return self._run(self._calls.get(model, key, **of))

    @overload
    def entries(
        self,
        model: str,
        *,
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
        page_size: int = 1000,
        max_lag: int | None = None,
    ) -> Iterator[Entry[Any]]: ...

    @overload
    def entries(
        self,
        model: str,
        *,
        into: type[V],
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
        page_size: int = 1000,
        max_lag: int | None = None,
    ) -> Iterator[Entry[V]]: ...

    @wraps(Calls.entries)
    def entries(self, model: str, **of: Any) -> Iterator[Entry[Any]]:
        return _entries(self, model, **of)

    @overload
    def top(
        self, model: str, *, by: str, limit: int = 10, max_lag: int | None = None, partial: bool = False
    ) -> Top[Any]: ...

    @overload
    def top(
        self, model: str, *, by: str, into: type[V], limit: int = 10, max_lag: int | None = None, partial: bool = False
    ) -> Top[V]: ...

    @wraps(Calls.top)
    def top(self, model: str, **of: Any) -> Top[Any]:
        return self._run(self._calls.top(model, **of))

    @overload
    def changes(self, model: str, *, key: Key) -> Iterator[Change[Any]]: ...

    @overload
    def changes(self, model: str, *, key: Key, into: type[V]) -> Iterator[Change[V | None]]: ...

    @overload
    def changes(
        self,
        model: str,
        *,
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
    ) -> Iterator[Change[Any] | SnapshotBegin | SnapshotEnd]: ...

    @overload
    def changes(
        self,
        model: str,
        *,
        into: type[V],
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
    ) -> Iterator[Change[V | None] | SnapshotBegin | SnapshotEnd]: ...

    def changes(self, model: str, *, into: Any = None, **of: Any) -> Iterator[Any]:
        """Yields the present value of a key, then each change; connects again when the connection is lost.

        Without `key`: of all keys, of those from `start` to `end`, or of those with a prefix, as for `entries`. Then a
        snapshot comes first, and again when the instance cannot go on from where the stream was. `into` is as for
        `get`.
        """
        # A conversion that fails is no lost connection.
        with closing(self._streamed(self._calls.changes(model, **of))) as events:
            for event in events:
                yield event if into is None else self._run(self._calls.typed_event(model, into, event))

    def _streamed(self, watch: Watch) -> Generator[Streamed, None, None]:
        while True:
            response = self._sent(watch.attempt(), self._stream_timeout, stream=True)
            if isinstance(response, NoReply):
                watch.is_open(response)
                continue
            process = os.getpid()
            self._streams.add(response)
            try:
                # The client may have been closed before it knew of the response.
                reply = self._ended(process) or _reply(response, b"" if _is_stream(response) else response.read())
                if watch.is_open(reply):
                    for content in response.iter_bytes():
                        yield from watch.read(content)
                        if self._ended(process):
                            break
                    watch.lost(self._ended(process) or _ENDED)
            except (httpx.HTTPError, RuntimeError) as error:
                watch.lost(self._no_reply(error))
            finally:
                self._streams.discard(response)
                response.close()

    def close(self) -> None:
        """Closes the connections. Change streams end at once, other calls after their attempt: with `ClosedError`."""
        self._begin_in_child()
        self._closed.set()
        for response in list(self._streams):
            # A thread that reads does not notice that its socket is closed.
            with suppress(OSError):
                connection = response.extensions["network_stream"].get_extra_info("socket")
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, **options: Any) -> httpx.Client:
        return httpx.Client(**options)

    def _event(self) -> threading.Event:
        return threading.Event()

    def _run(self, call: Call[T]) -> T:
        try:
            attempt = next(call)
            while True:
                attempt = call.send(self._reply_to(attempt))
        except StopIteration as done:
            result: T = done.value
            return result

    def _reply_to(self, attempt: Attempt) -> Reply | NoReply:
        response = self._sent(attempt, self._timeout)
        return response if isinstance(response, NoReply) else _reply(response, response.content)

    def _sent(self, attempt: Attempt, timeout: httpx.Timeout, *, stream: bool = False) -> httpx.Response | NoReply:
        self._begin_in_child()
        if self._closed.wait(attempt.pause_seconds):
            return _CLOSED
        if (too_late := attempt.too_late()) is not None:
            return too_late
        try:
            return self._http.send(self._built(attempt.request, timeout), stream=stream)
        except (httpx.HTTPError, RuntimeError) as error:
            return self._no_reply(error)


class AsyncClient(_Connected[httpx.AsyncClient, asyncio.Event]):
    """As `Client`, for asyncio: calls are awaited, and lists and change streams are iterated by `async for`.

    It belongs to one event loop.
    """

    get_balance = _awaited(Calls.get_balance)
    add_funds = _awaited(Calls.add_funds)
    count = _awaited(Calls.count)
    query = _awaited(Calls.query)
    ready = _awaited(Calls.ready)
    status = _awaited(Calls.status)
    dead_letters = _awaited_pages(Calls.dead_letters)
    dead_letter = _awaited(Calls.dead_letter)
    redrive = _awaited(Calls.redrive)
    discard = _awaited(Calls.discard)
    set_aside = _awaited(Calls.set_aside)
    models = _awaited(Calls.models)
    tables = _awaited(Calls.tables)
    row = _awaited(Calls.row)
    generations = _awaited(Calls.generations)
    differences = _awaited(Calls.differences)
    rebuild = _awaited(Calls.rebuild)
    switch = _awaited(Calls.switch)
    drop = _awaited(Calls.drop)

    @overload
    def get(
        self,
        model: str,
        key: Key,
        *,
        min_position: Position | None = None,
        max_lag: int | None = None,
        max_age: float | None = None,
    ) -> Coroutine[Any, Any, State[Any]]: ...

    @overload
    def get(
        self,
        model: str,
        key: Key,
        *,
        into: type[V],
        min_position: Position | None = None,
        max_lag: int | None = None,
        max_age: float | None = None,
    ) -> Coroutine[Any, Any, State[V | None]]: ...

    @wraps(Calls.get)
    def get(self, model: str, key: Key, **of: Any) -> Coroutine[Any, Any, State[Any]]:
        return self._run(self._calls.get(model, key, **of))

    @overload
    def entries(
        self,
        model: str,
        *,
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
        page_size: int = 1000,
        max_lag: int | None = None,
    ) -> AsyncIterator[Entry[Any]]: ...

    @overload
    def entries(
        self,
        model: str,
        *,
        into: type[V],
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
        page_size: int = 1000,
        max_lag: int | None = None,
    ) -> AsyncIterator[Entry[V]]: ...

    @wraps(Calls.entries)
    def entries(self, model: str, **of: Any) -> AsyncIterator[Entry[Any]]:
        return _awaited_entries(self, model, **of)

    @overload
    def top(
        self, model: str, *, by: str, limit: int = 10, max_lag: int | None = None, partial: bool = False
    ) -> Coroutine[Any, Any, Top[Any]]: ...

    @overload
    def top(
        self, model: str, *, by: str, into: type[V], limit: int = 10, max_lag: int | None = None, partial: bool = False
    ) -> Coroutine[Any, Any, Top[V]]: ...

    @wraps(Calls.top)
    def top(self, model: str, **of: Any) -> Coroutine[Any, Any, Top[Any]]:
        return self._run(self._calls.top(model, **of))

    @overload
    def changes(self, model: str, *, key: Key) -> AsyncIterator[Change[Any]]: ...

    @overload
    def changes(self, model: str, *, key: Key, into: type[V]) -> AsyncIterator[Change[V | None]]: ...

    @overload
    def changes(
        self,
        model: str,
        *,
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
    ) -> AsyncIterator[Change[Any] | SnapshotBegin | SnapshotEnd]: ...

    @overload
    def changes(
        self,
        model: str,
        *,
        into: type[V],
        start: OneKey | None = None,
        end: OneKey | None = None,
        prefix: str | None = None,
        within: Mapping[str, str | int] | None = None,
    ) -> AsyncIterator[Change[V | None] | SnapshotBegin | SnapshotEnd]: ...

    async def changes(self, model: str, *, into: Any = None, **of: Any) -> AsyncIterator[Any]:
        """As `Client.changes`."""
        async with aclosing(self._streamed(self._calls.changes(model, **of))) as events:
            async for event in events:
                yield event if into is None else await self._run(self._calls.typed_event(model, into, event))

    async def _streamed(self, watch: Watch) -> AsyncGenerator[Streamed, None]:
        while True:
            response = await self._sent(watch.attempt(), self._stream_timeout, stream=True)
            if isinstance(response, NoReply):
                watch.is_open(response)
                continue
            process = os.getpid()
            try:
                if watch.is_open(_reply(response, b"" if _is_stream(response) else await response.aread())):
                    async for content in response.aiter_bytes():
                        for event in watch.read(content):
                            yield event
                        if self._ended(process):
                            break
                    watch.lost(self._ended(process) or _ENDED)
            except (httpx.HTTPError, RuntimeError) as error:
                watch.lost(self._no_reply(error))
            finally:
                await response.aclose()

    async def aclose(self) -> None:
        """Closes the connections. Calls and change streams end at once, with `ClosedError`."""
        self._begin_in_child()
        self._closed.set()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _open(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**options)

    def _event(self) -> asyncio.Event:
        return asyncio.Event()

    async def _run(self, call: Call[T]) -> T:
        try:
            attempt = next(call)
            while True:
                attempt = call.send(await self._reply_to(attempt))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _reply_to(self, attempt: Attempt) -> Reply | NoReply:
        response = await self._sent(attempt, self._timeout)
        return response if isinstance(response, NoReply) else _reply(response, response.content)

    async def _sent(
        self, attempt: Attempt, timeout: httpx.Timeout, *, stream: bool = False
    ) -> httpx.Response | NoReply:
        self._begin_in_child()
        if attempt.pause_seconds:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), attempt.pause_seconds)
        if self._closed.is_set():
            return _CLOSED
        if (too_late := attempt.too_late()) is not None:
            return too_late
        try:
            return await self._http.send(self._built(attempt.request, timeout), stream=stream)
        except (httpx.HTTPError, RuntimeError) as error:
            return self._no_reply(error)


def _url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
        url.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError):
        url = httpx.URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError(f"{text} is not an http or https URL; give one, such as https://localhost:5051")
    return url


def _reply(response: httpx.Response, body: bytes) -> Reply:
    return Reply(response.status_code, response.reason_phrase, response.headers, body)


def _is_stream(response: httpx.Response) -> bool:
    return str(response.headers.get("Content-Type", "")).startswith(api.EVENT_STREAM)
