"""Work on a thread that does not outlive the test, and whose failure is the test's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

# Longer than any request or wait that such a thread makes.
_END_SECONDS = 60.0


class Background:
    """Runs a function on a thread while the context is open.

    The context ends when the function has returned, and raises what the function has raised.
    """

    def __init__(self, run: Callable[[threading.Event], None], name: str) -> None:
        """Args:
        run: takes an event, and returns soon after it is set.
        """
        self._run = run
        self._ending = threading.Event()
        # The process ends even if the thread does not.
        self._thread = threading.Thread(target=self._ran, name=name, daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, of_test: object, *_: object) -> None:
        self._ending.set()
        self._thread.join(_END_SECONDS)
        if of_test is not None:
            # That the test failed says more.
            return
        assert not self._thread.is_alive(), f"the thread {self._thread.name} does not end"
        if self._failure is not None:
            raise self._failure

    def _ran(self) -> None:
        try:
            self._run(self._ending)
        except BaseException as error:
            self._failure = error
