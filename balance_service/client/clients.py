"""`Client` and `AsyncClient`: they send the requests of calls, over httpx."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from abc import ABC, abstractmethod
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
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from balance_service.client.exchange import Attempt, Call, Request
    from balance_service.client.results import Change, SnapshotBegin, SnapshotEnd

P = ParamSpec("P")
T = TypeVar("T")
Http = TypeVar("Http", httpx.Client, httpx.AsyncClient)
_MOST_IDLE_CONNECTIONS = 20


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


class _Connected(ABC, Generic[Http]):
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
        self._process = os.getpid()
        self._opened: Http = self._open(**self._options)

    @property
    def _http(self) -> Http:
        """The HTTP client of this process.

        A child of `fork` shares the connections of its parent, and would read the answers to the parent's requests. So
        it opens connections of its own, and leaves the others alone.
        """
        if self._process != os.getpid():
            self._opened, self._process = self._open(**self._options), os.getpid()
        return self._opened

    @abstractmethod
    def _open(self, **options: Any) -> Http:
        """Returns the HTTP client."""

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


class Client(_Connected[httpx.Client]):
    """A client of the service. Any thread may use it, and any child of `fork`. Close it, or use it in `with`.

    A call raises a subclass of `ClientError`, by what the caller does about it.
    """

    get_balance = _blocking(Calls.get_balance)
    add_funds = _blocking(Calls.add_funds)
    get = _blocking(Calls.get)
    entries = _blocking_pages(Calls.entries)
    count = _blocking(Calls.count)
    top = _blocking(Calls.top)
    query = _blocking(Calls.query)
    ready = _blocking(Calls.ready)
    status = _blocking(Calls.status)
    dead_letters = _blocking_pages(Calls.dead_letters)
    dead_letter = _blocking(Calls.dead_letter)
    redrive = _blocking(Calls.redrive)
    discard = _blocking(Calls.discard)
    set_aside = _blocking(Calls.set_aside)
    models = _blocking(Calls.models)
    generations = _blocking(Calls.generations)
    differences = _blocking(Calls.differences)
    rebuild = _blocking(Calls.rebuild)
    switch = _blocking(Calls.switch)
    drop = _blocking(Calls.drop)

    @overload
    def changes(self, model: str, *, key: str | int) -> Iterator[Change]: ...

    @overload
    def changes(
        self, model: str, *, start: str | int | None = None, end: str | int | None = None, prefix: str | None = None
    ) -> Iterator[Change | SnapshotBegin | SnapshotEnd]: ...

    def changes(self, model: str, **of: Any) -> Iterator[Any]:
        """Yields the present value of a key, then each change; connects again when the connection is lost.

        Without `key`: of all keys, of those from `start` to `end`, or of those with a prefix. Then a snapshot comes
        first, and again when the instance cannot go on from where the stream was.
        """
        watch = self._calls.changes(model, **of)
        while True:
            attempt = watch.attempt()
            time.sleep(attempt.pause_seconds)
            process = os.getpid()
            try:
                response = self._http.send(self._built(attempt.request, self._stream_timeout), stream=True)
            except httpx.HTTPError as error:
                watch.is_open(_no_reply(error))
                continue
            try:
                is_stream = _is_stream(response)
                if watch.is_open(_reply(response, b"" if is_stream else response.read())):
                    for content in response.iter_bytes():
                        yield from watch.read(content)
                        if os.getpid() != process:
                            break
                    is_forked = os.getpid() != process
                    watch.lost("it belongs to the parent of this process" if is_forked else "the server has ended it")
            except httpx.HTTPError as error:
                watch.lost(_no_reply(error).reason)
            finally:
                response.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, **options: Any) -> httpx.Client:
        return httpx.Client(**options)

    def _run(self, call: Call[T]) -> T:
        try:
            attempt = next(call)
            while True:
                attempt = call.send(self._reply_to(attempt))
        except StopIteration as done:
            result: T = done.value
            return result

    def _reply_to(self, attempt: Attempt) -> Reply | NoReply:
        time.sleep(attempt.pause_seconds)
        if (too_late := attempt.too_late()) is not None:
            return too_late
        try:
            response = self._http.send(self._built(attempt.request, self._timeout))
        except httpx.HTTPError as error:
            return _no_reply(error)
        return _reply(response, response.content)


class AsyncClient(_Connected[httpx.AsyncClient]):
    """As `Client`, for asyncio: calls are awaited, and lists and change streams are iterated by `async for`.

    It belongs to one event loop.
    """

    get_balance = _awaited(Calls.get_balance)
    add_funds = _awaited(Calls.add_funds)
    get = _awaited(Calls.get)
    entries = _awaited_pages(Calls.entries)
    count = _awaited(Calls.count)
    top = _awaited(Calls.top)
    query = _awaited(Calls.query)
    ready = _awaited(Calls.ready)
    status = _awaited(Calls.status)
    dead_letters = _awaited_pages(Calls.dead_letters)
    dead_letter = _awaited(Calls.dead_letter)
    redrive = _awaited(Calls.redrive)
    discard = _awaited(Calls.discard)
    set_aside = _awaited(Calls.set_aside)
    models = _awaited(Calls.models)
    generations = _awaited(Calls.generations)
    differences = _awaited(Calls.differences)
    rebuild = _awaited(Calls.rebuild)
    switch = _awaited(Calls.switch)
    drop = _awaited(Calls.drop)

    @overload
    def changes(self, model: str, *, key: str | int) -> AsyncIterator[Change]: ...

    @overload
    def changes(
        self, model: str, *, start: str | int | None = None, end: str | int | None = None, prefix: str | None = None
    ) -> AsyncIterator[Change | SnapshotBegin | SnapshotEnd]: ...

    async def changes(self, model: str, **of: Any) -> AsyncIterator[Any]:
        """As `Client.changes`."""
        watch = self._calls.changes(model, **of)
        while True:
            attempt = watch.attempt()
            await asyncio.sleep(attempt.pause_seconds)
            try:
                response = await self._http.send(self._built(attempt.request, self._stream_timeout), stream=True)
            except httpx.HTTPError as error:
                watch.is_open(_no_reply(error))
                continue
            try:
                is_stream = _is_stream(response)
                if watch.is_open(_reply(response, b"" if is_stream else await response.aread())):
                    async for content in response.aiter_bytes():
                        for event in watch.read(content):
                            yield event
                    watch.lost("the server has ended it")
            except httpx.HTTPError as error:
                watch.lost(_no_reply(error).reason)
            finally:
                await response.aclose()

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _open(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**options)

    async def _run(self, call: Call[T]) -> T:
        try:
            attempt = next(call)
            while True:
                attempt = call.send(await self._reply_to(attempt))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _reply_to(self, attempt: Attempt) -> Reply | NoReply:
        await asyncio.sleep(attempt.pause_seconds)
        if (too_late := attempt.too_late()) is not None:
            return too_late
        try:
            response = await self._http.send(self._built(attempt.request, self._timeout))
        except httpx.HTTPError as error:
            return _no_reply(error)
        return _reply(response, response.content)


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


def _no_reply(error: httpx.HTTPError) -> NoReply:
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    is_untrusted = any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes)
    return NoReply(str(error) or type(error).__name__, is_untrusted=is_untrusted)


def _is_stream(response: httpx.Response) -> bool:
    return str(response.headers.get("Content-Type", "")).startswith(api.EVENT_STREAM)
