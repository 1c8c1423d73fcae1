"""All routes of an instance. A route that is listed here is answered, guarded, traced and documented."""

from __future__ import annotations

from balance_service.http.api.balance_routes import BALANCE_ROUTES
from balance_service.http.api.collection_routes import COLLECTION_ROUTES
from balance_service.http.api.dead_letter_routes import DEAD_LETTER_ROUTES
from balance_service.http.api.key_routes import KEY_ROUTES
from balance_service.http.api.model_routes import MODEL_ROUTES
from balance_service.http.api.operations_routes import OPERATIONS_ROUTES
from balance_service.http.api.route import Routes

ROUTES = Routes(
    (*BALANCE_ROUTES, *KEY_ROUTES, *COLLECTION_ROUTES, *MODEL_ROUTES, *DEAD_LETTER_ROUTES, *OPERATIONS_ROUTES)
)
