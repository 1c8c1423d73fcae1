"""The results as a table."""

from __future__ import annotations


class Report:
    """Collects lines in order and prints each at once."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, str, str]] = []

    @property
    def passed(self) -> bool:
        """Whether all expectations hold."""
        return all(verdict != "FAILED" for verdict, _, _ in self._lines)

    def note(self, what: str, found: str) -> None:
        """Adds information."""
        self._add("", what, found)

    def expect(self, what: str, holds: bool, found: str) -> None:
        """Adds an expectation."""
        self._add("ok" if holds else "FAILED", what, found)

    def check(self, what: str, seconds: float, at_most: float | None = None) -> None:
        """Adds a time in seconds, with its limit if there is one."""
        if at_most is None:
            self.note(what, f"{seconds:.1f} s")
        else:
            self.expect(what, seconds < at_most, f"{seconds:.1f} s of {at_most:.0f}")

    def table(self) -> str:
        """Returns all lines and the verdict."""
        width = max(len(what) for _, what, _ in self._lines)
        rows = [f"{verdict:6}  {what:{width}}  {found}\n" for verdict, what, found in self._lines]
        return "\n" + "".join(rows) + ("all expectations hold\n" if self.passed else "some expectations FAILED\n")

    def _add(self, verdict: str, what: str, found: str) -> None:
        self._lines.append((verdict, what, found))
        print(f"{verdict or '-':6}  {what}: {found}", flush=True)
