"""Chromium, as this machine has it, and pages whose reports are kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Page

SCREENSHOTS = Path(__file__).parents[2] / "screenshots"
"""Pictures of the last run. They are not part of the repository."""
MISSING = (
    "Chromium was not found, so the console was not tested in a browser: install it (Debian: apt-get install "
    "chromium), or set CHROMIUM to the path of one"
)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PHONE, DESKTOP = 390, 1440
_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_FAILED_REQUEST = re.compile(r"Failed to load resource: (?:the server responded with a status of (\d+)|net::)")
_SERIOUS = ("serious", "critical")
_TABS = 80


def chromium() -> str | None:
    """Returns the path of the browser; None if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)


class View:
    """A page in a window of its own, and what the browser reported about it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.reports: list[str] = []
        page.on("console", self._report)
        page.on("pageerror", lambda error: self.reports.append(f"error: {error}"))

    def _report(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.reports.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def unexpected(self, *statuses: int, lost: bool = False) -> list[str]:
        """Returns the reports, without those of answers with these statuses.

        Args:
            lost: also without those of requests that got no answer.
        """

        def is_expected(report: str) -> bool:
            failed = _FAILED_REQUEST.search(report)
            if failed is None:
                return False
            return lost if failed[1] is None else int(failed[1]) in statuses

        return [report for report in self.reports if not is_expected(report)]

    def keep(self, name: str) -> None:
        """Saves a picture of the whole page."""
        SCREENSHOTS.mkdir(exist_ok=True)
        self.page.evaluate("scrollTo(0, 0)")
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True, animations="disabled")

    def open(self, panel: str) -> None:
        """Opens a panel by the name of its tab."""
        self.page.locator("nav").get_by_role("link", name=panel, exact=True).click()

    def text(self, element: str) -> str:
        return self.page.inner_text(element)

    def wait_for_text(self, element: str, pattern: str, seconds: float = 60.0) -> None:
        """Waits until the text of an element, by its id, matches a regular expression."""
        self.page.wait_for_function(
            "([id, pattern]) => new RegExp(pattern).test(document.getElementById(id).innerText)",
            arg=[element, pattern],
            timeout=seconds * 1000,
        )

    def tab_to(self, reached: str, *, back: bool = False) -> None:
        """Presses Tab, or Shift and Tab, until the element with the focus matches a selector."""
        for _ in range(_TABS):
            self.page.keyboard.press("Shift+Tab" if back else "Tab")
            if self.page.evaluate("(selector) => document.activeElement.matches(selector)", reached):
                return
        raise AssertionError(f"{reached} is not reached by Tab")

    def accessibility_findings(self) -> list[str]:
        """Returns the serious findings of axe-core."""
        self.page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
        found: Any = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{one['id']}: {json.dumps([node['target'] for node in one['nodes']])}: {one['nodes'][0]['failureSummary']}"
            for one in found["violations"]
            if one["impact"] in _SERIOUS
        ]


@contextmanager
def viewed(
    browser: Browser, url: str, *, width: int = DESKTOP, dark: bool = False, waits: bool = True
) -> Iterator[View]:
    """Opens a page in a new window.

    Args:
        waits: until it shows a status.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        has_touch=width == PHONE,
    )
    try:
        view = View(context.new_page())
        view.page.goto(url)
        if waits:
            view.wait_for_text("state", "live")
        yield view
    finally:
        context.close()
