"""A read model of JSON documents with a fold of its own. Instances load it by name."""

from __future__ import annotations

from dataclasses import dataclass

from balance_service import ReadModel, Stream


@dataclass
class PageVisited:
    visitor: str
    page: str
    seconds: int


@dataclass
class Visitor:
    visitor: str
    visits: int
    longest: int
    pages: list[str]


_PAGES = 5


class Visits(ReadModel):
    """Visits of pages → how many, the longest one, and the last pages."""

    name = "visits"
    source = Stream("visits", PageVisited, format="json")
    key = "visitor"
    state = Visitor

    def fold(self, state: Visitor | None, event: PageVisited) -> Visitor:
        before = state or Visitor(event.visitor, 0, 0, [])
        longest = max(before.longest, event.seconds)
        return Visitor(event.visitor, before.visits + 1, longest, [*before.pages, event.page][-_PAGES:])
