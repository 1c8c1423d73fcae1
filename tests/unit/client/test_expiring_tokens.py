"""A change stream of the client, from the service's own HTTP server, when its token is revoked."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import TYPE_CHECKING

import pytest

from balance_service.client import AsyncClient, NotAllowedError
from balance_service.http.access.authentication import Authenticator, load_tokens
from balance_service.http.access.authorization import Access
from balance_service.http.server.reloading import Reloaded
from balance_service.http.streams import event_stream
from tests.unit.http.streaming import Owner, stage, until, write_tokens

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "an-old-token-of-at-least-thirty-two-characters", "a-new-token-of-at-least-thirty-two-characters"


@pytest.mark.parametrize("is_renewed", [True, False])
def test_a_change_stream_outlives_its_token_if_the_client_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_renewed: bool
) -> None:
    monkeypatch.setattr(event_stream, "_RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(event_stream, "_SWEEP_SECONDS", 0.1)
    file = tmp_path / "tokens.json"
    write_tokens(file, OLD)
    tokens = Reloaded([file], lambda: load_tokens(file))
    owner = Owner(tmp_path / "store", access=Access(Authenticator(tokens)))
    sent: list[str] = []

    def token() -> str:
        sent.append(NEW if is_renewed and sent else OLD)
        return sent[-1]

    async def run() -> object:
        async with stage(owner), AsyncClient(f"http://{owner.address}", token=token) as client:
            changes = client.changes("balance", key="c1")
            assert (await anext(changes)).value is None
            write_tokens(file, NEW)
            assert tokens.refresh()
            following = asyncio.ensure_future(anext(changes))
            await until(lambda: len(sent) == 2)
            owner.commit({"c1": "0.10"})
            return (await following).value

    if is_renewed:
        assert asyncio.run(run()) == {"amount": Decimal("0.10")}
    else:
        with pytest.raises(NotAllowedError, match="token"):
            asyncio.run(run())
