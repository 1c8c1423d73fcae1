"""The formats that a declaration can name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from balance_service.formats.framed_avro import FramedAvro
from balance_service.formats.json_format import CloudEvents, ConnectJson, JsonFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balance_service.formats.format import Format

FORMATS: Mapping[str, Format] = {one.name: one for one in (FramedAvro(), JsonFormat(), CloudEvents(), ConnectJson())}
"""By name, as `Stage.format` has it."""
