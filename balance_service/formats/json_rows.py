"""How Spark reads JSON: `java/JsonResolving.java` decodes documents, without a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812  (Spark's own idiom)
from pyspark.sql.classic.column import Column as ClassicColumn

from balance_service.formats.rows import Rows, first_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column

    from balance_service.model.stage import Stage


class JsonRows(Rows):
    def __init__(self, jvm: Any, stage: Stage, texts: Sequence[str]) -> None:
        told = stage.told
        self._header = told.header
        self._documents: Any = jvm.parts.code.balance.JsonResolving([*texts], told.field, told.data, told.schema)

    def of(self, value: Column, headers: Column) -> Column:
        nothing = F.lit(bytearray())
        kind: Any = F.coalesce(first_header(headers, self._header), nothing) if self._header else nothing
        of_value: Any = value
        return ClassicColumn(self._documents.of(of_value._jc, kind._jc))
