"""How commands ask a running instance: by HTTPS and with a token where the settings say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import httpx

from balance_service.errors import BalanceServiceError, ConfigurationError, RetriableError
from balance_service.http.server.tls import TlsFiles, client_context
from balance_service.settings.proxies import heeding_proxies

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from balance_service.settings import Settings

_ANSWER_SECONDS = 30.0

at_url = click.option(
    "--url",
    help="Where to ask, such as https://balances.example.org; BALANCE_APPLICATION_SERVER, by HTTPS if "
    "BALANCE_TLS_CA or BALANCE_TLS_CERTIFICATE is set, unless given.",
)


class AnsweredError(BalanceServiceError):
    """An instance answers with an error; `status` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def ask(
    settings: Settings,
    url: str | None,
    path: str,
    parameters: dict[str, str],
    *,
    names: Sequence[str],
    body: object = None,
) -> httpx.Response:
    """What an instance answers to GET, or, with a body, to POST.

    BALANCE_TOKEN is sent along if it is set, and BALANCE_TLS_CERTIFICATE shown to those who ask for one.

    Args:
        names: what an instance's answer has.

    Raises:
        ConfigurationError: a file, an address or a proxy cannot be used; names the setting.
        RetriableError: nobody answers.
        AnsweredError: the answer is an error.
        BalanceServiceError: the answer is not one of an instance: they all are JSON objects, with those names.
    """
    base = _base(settings, url)
    setting = "--url" if url else "BALANCE_APPLICATION_SERVER"
    headers = {}
    if settings.token is not None:
        headers["Authorization"] = f"Bearer {settings.token.get_secret_value()}"
    verify: ssl.SSLContext | bool = _context(settings) if base.scheme == "https" else False
    # An instance's own address is behind no proxy; where a URL says where to ask, one may be on the way.
    uses_proxy = url is not None
    with heeding_proxies():
        client = httpx.Client(verify=verify, headers=headers, timeout=_ANSWER_SECONDS, trust_env=uses_proxy)
    try:
        with client:
            request = client.build_request(
                "GET" if body is None else "POST", base.join(path), params=parameters, json=body
            )
            answer = client.send(request)
    except UnicodeError:
        raise ConfigurationError(f"{base.host} in {setting} is no host's name; correct it") from None
    except httpx.HTTPError as error:
        raise RetriableError(
            f"the instance at {base.netloc.decode()} does not answer ({error}); start it, or correct {setting}"
        ) from error
    said = _said(answer)
    if answer.is_error:
        raise AnsweredError(answer.status_code, _reason(answer, said))
    lacking = [] if said is None else [f"'{name}'" for name in names if name not in said]
    if not answer.is_success or said is None or lacking:
        without = f" without {'a JSON object' if said is None else lacking[0]}" if answer.is_success else ""
        raise BalanceServiceError(
            f"what answers at {base.netloc.decode()} is no instance: "
            f"it says {answer.status_code} {answer.reason_phrase}{without}; correct {setting}"
        )
    return answer


def _base(settings: Settings, url: str | None) -> httpx.URL:
    uses_tls = settings.speaks_tls or settings.tls_ca is not None
    try:
        base = httpx.URL(url or f"{'https' if uses_tls else 'http'}://{settings.application_server}")
    except httpx.InvalidURL:
        base = httpx.URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise ConfigurationError(f"--url {url} is no http or https URL; give one, such as https://localhost:5051")
    return base


def _context(settings: Settings) -> ssl.SSLContext:
    own = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        password = settings.tls_key_password
        own = TlsFiles(
            settings.tls_certificate, settings.tls_key, None if password is None else password.get_secret_value()
        )
    return client_context(settings.tls_ca, own)


def _said(answer: httpx.Response) -> dict[str, Any] | None:
    """The JSON object that an answer is; None if it is none."""
    try:
        said = answer.json()
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _reason(answer: httpx.Response, said: dict[str, Any] | None) -> str:
    told = f"{answer.status_code}: {answer.text[:200]}" if said is None or "detail" not in said else str(said["detail"])
    return f"{told} (BALANCE_TOKEN)" if answer.status_code in (401, 403) else told
