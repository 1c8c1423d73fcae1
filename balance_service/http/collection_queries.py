"""Queries for a read model that answers as a collection. Peers are asked by the routes of every read model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from balance_service.http.given import Given
from balance_service.http.model_queries import DEFAULT_ENTRIES
from balance_service.http.parameters import LIMIT
from balance_service.http.scan import Count, Entries
from balance_service.http.scatter import MALFORMED, malformed_answer
from balance_service.http.scheduling import asker_of
from balance_service.model.json_view import exact_json

if TYPE_CHECKING:
    from aiohttp import web

    from balance_service.http.api.declarations import Parameter
    from balance_service.http.model_queries import ModelQueries
    from balance_service.model.keys import KeyType
    from balance_service.model.read_model import Collection

_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionQueries:
    """Answers of one read model in the form of its collection."""

    name: str
    declared: Collection
    key_type: KeyType
    key: Parameter[str]
    start: Parameter[str]
    end: Parameter[str]
    after: Parameter[str]

    async def one(self, models: ModelQueries, request: web.Request) -> web.Response:
        """What is known of one key."""
        answer = await models.one(request, models.of(self.name), self.key, self.declared.noun)
        if answer.status != _OK:
            return answer
        without_value = exact_json({"key": Given(request).required(self.key), "value": None})
        body = answer.body if isinstance(answer.body, bytes) else b""
        value = body.removeprefix(without_value.removesuffix("null}").encode())[:-1]
        try:
            json.loads(value)
        except MALFORMED as error:
            raise malformed_answer() from error
        answer.body = value
        return answer

    async def all(self, models: ModelQueries, request: web.Request) -> web.Response:
        """What is known of each key, in their order, a page at a time."""
        return await self._entries(models, request, Given(request))

    async def range(self, models: ModelQueries, request: web.Request) -> web.Response:
        """The same from one key to another, both inclusive."""
        given = Given(request)
        return await self._entries(models, request, given, given.required(self.start), given.required(self.end))

    async def count(self, models: ModelQueries, request: web.Request) -> web.Response:
        """How many keys there are, on all instances."""
        answer = await models.of(self.name).gathered(request, "count", Count())
        return answer.response()

    async def count_local(self, models: ModelQueries, request: web.Request) -> web.Response:
        """How many keys this instance owns."""
        answer = await models.of(self.name).scatter.answer_owned(Count(), asker_of(request))
        return answer.response()

    async def _entries(
        self,
        models: ModelQueries,
        request: web.Request,
        given: Given,
        start: str | None = None,
        end: str | None = None,
    ) -> web.Response:
        after, limit = given.optional(self.after), given.optional(LIMIT) or DEFAULT_ENTRIES
        scan = Entries(start=start, end=end, after=after, limit=limit, key_type=self.key_type)
        answer = await models.of(self.name).gathered(request, "entries", scan)
        page = json.loads(answer.body, parse_float=Decimal)
        response = answer.response()
        response.body = exact_json({entry["key"]: entry["value"] for entry in page["entries"]}).encode()
        if page["next"] is not None:
            following = request.rel_url.update_query({self.after.name: page["next"]})
            response.headers["Link"] = f'<{following}>; rel="next"'
        return response
