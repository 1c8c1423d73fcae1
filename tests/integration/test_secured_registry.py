"""A registry behind TLS and a login: accepted and refused credentials, and read-only access."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from balance_service.avro.registry import SchemaRegistry
from balance_service.avro.schemas import load_schema
from balance_service.errors import ConfigurationError
from balance_service.settings import load_settings
from tests.integration import secured as planted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from balance_service.settings import Settings
    from tests.integration.secured import SecuredStack

_USER = {"schema_registry_user": planted.REGISTRY_USER, "schema_registry_password": planted.REGISTRY_PASSWORD}
_TOKEN = {"schema_registry_token": planted.REGISTRY_TOKEN}
_WRONG = f"{planted.CANARY}-wrong"


@contextmanager
def _registry(settings: Settings) -> Iterator[SchemaRegistry]:
    registry = SchemaRegistry.from_settings(settings)
    try:
        yield registry
    finally:
        registry.close()


@pytest.mark.parametrize("login", [_USER, _TOKEN], ids=["basic", "bearer"])
def test_a_registry_behind_tls_accepts_each_login(secured: SecuredStack, login: dict[str, Any]) -> None:
    settings = load_settings(schema_registry_url=secured.registry_url, schema_registry_ca_file=secured.ca, **login)

    with _registry(settings) as registry:
        schema_id = registry.register("secured-test", load_schema("Position"))
        written = registry.writer_schema(schema_id)

    assert written is not None
    assert written.record == "parts.code.balance.state.Position"


def test_a_read_only_client_gets_the_ids_of_registered_schemas_and_may_not_register(secured: SecuredStack) -> None:
    at = {"schema_registry_url": secured.registry_url, "schema_registry_ca_file": secured.ca}
    reads = load_settings(**at, schema_registry_token=planted.REGISTRY_READER_TOKEN)

    with _registry(load_settings(**at, **_TOKEN)) as writer, _registry(reads) as reader:
        schema_id = writer.register("secured-by-another", load_schema("Position"))
        assert reader.register("secured-by-another", load_schema("Position")) == schema_id
        with pytest.raises(ConfigurationError, match="does not let this user register"):
            reader.register("secured-by-another", load_schema("FundsAdded"))


@pytest.mark.parametrize(
    ("login", "trusts", "named"),
    [
        (_USER | {"schema_registry_password": _WRONG}, True, "BALANCE_SCHEMA_REGISTRY_PASSWORD"),
        ({"schema_registry_token": _WRONG}, True, "BALANCE_SCHEMA_REGISTRY_TOKEN"),
        ({}, True, "BALANCE_SCHEMA_REGISTRY_USER"),
        (_USER, False, "BALANCE_SCHEMA_REGISTRY_CA_FILE"),
    ],
)
def test_an_untrusted_registry_or_a_refused_login_names_the_setting(
    secured: SecuredStack, login: dict[str, Any], trusts: bool, named: str
) -> None:
    trust = {"schema_registry_ca_file": secured.ca} if trusts else {}
    settings = load_settings(schema_registry_url=secured.registry_url, **trust, **login)

    with _registry(settings) as registry, pytest.raises(ConfigurationError, match=named) as caught:
        registry.register("secured-test", load_schema("Position"))

    assert planted.CANARY not in str(caught.value)
    assert secured.registry_url in str(caught.value)
