"""An operator of a read model's generations, who asks any instance that answers, and asks again."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_HTTP = httpx.Client(timeout=10, verify=False, limits=httpx.Limits(max_keepalive_connections=0))


class Operator:
    """Rebuilds, switches and drops."""

    def __init__(self, model: str, urls: Callable[[], Iterable[str]], seconds: float) -> None:
        """Args:
        urls: returns the instances to ask now, the preferred one first.
        seconds: how long each request and each wait may take.
        """
        self._model = model
        self._urls = urls
        self._seconds = seconds

    def post(self, verb: str, **body: Any) -> int | None:
        """Sends a request to the first instance that accepts it; returns the status, None without an answer."""
        for url in self._urls():
            try:
                given = {"model": self._model, "reason": "a test", **body}
                return _HTTP.post(f"{url}/api/models.{verb}", json=given).status_code
            except httpx.ConnectError:
                continue
            except httpx.TransportError:
                return None
        return None

    def ask(self, verb: str, **body: Any) -> None:
        """Sends a request until it is taken."""
        answers: list[int | None] = []

        def is_taken() -> bool:
            answers.append(self.post(verb, **body))
            # One that was taken without an answer is refused the next time.
            return answers[-1] == 202 or (answers[-1] == 409 and self._is_done(verb, body))

        eventually(is_taken, lambda: f"{verb} {body}: {answers} {self.generations()}", self._seconds)

    def _is_done(self, verb: str, body: Mapping[str, Any]) -> bool:
        statuses = self.statuses()
        if verb == "drop":
            return body["generation"] not in statuses
        return statuses.get(body["to"]) == "serving" if verb == "switch" else len(statuses) > 1

    def generations(self) -> dict[str, Any]:
        """Returns the generations as an instance knows them; empty without an answer."""
        for url in self._urls():
            with suppress(httpx.TransportError):
                answer = _HTTP.get(f"{url}/api/models/{self._model}/generations")
                if answer.is_success:
                    known: dict[str, Any] = answer.json()
                    return known
        return {}

    def statuses(self) -> dict[int, str]:
        """Returns the status of each live generation."""
        found: dict[int, str] = {}

        def answers() -> bool:
            found.update({one["generation"]: one["status"] for one in self.generations().get("generations", ())})
            return bool(found)

        eventually(answers, "no instance answers", self._seconds)
        return found

    def the(self, status: str, *, other_than: int = 0) -> int:
        """Waits until a generation has a status, and returns its number."""
        found: list[int] = []

        def has() -> bool:
            found[:] = [number for number, now in self.statuses().items() if now == status and number != other_than]
            return bool(found)

        eventually(has, lambda: f"none is {status}: {self.generations()}", self._seconds)
        return found[0]

    def wait_settled(self) -> None:
        """Waits until the generation that was switched to sends all outputs."""
        eventually(lambda: self.generations().get("action") == "settle", lambda: str(self.generations()), self._seconds)
