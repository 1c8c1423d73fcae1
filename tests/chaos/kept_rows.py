"""A read model of the newest row of each key, from a JSON topic that the broker compacts; `systems` remembers the rows.

Instances load it by name, so nothing of it is used in the check.
"""

from __future__ import annotations

from dataclasses import dataclass

from balance_service import RECORD_KEY, ReadModel, Stream, Upsert


@dataclass
class Row:
    name: str
    number: int


class KeptRows(ReadModel):
    name = "kept-rows"
    source = Stream("kept-rows", Row, format="json", compacted=True)
    key = RECORD_KEY
    state = Row
    fold = Upsert(Row)
