"""Settings of Kafka and of the schema registry: where they are, and how they are secured. Part of `Settings`."""

from __future__ import annotations

import ssl
from functools import cached_property
from pathlib import Path  # noqa: TC003  # pydantic reads the annotations
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode

from balance_service.settings import kafka_properties as properties
from balance_service.settings.jvm_properties import jvm_properties
from balance_service.settings.kafka_properties import PropertyError

_P = "BALANCE_"


class KafkaSettings(BaseSettings):
    """What contradicts itself, or what one of the Kafka clients does not understand, is refused in one sentence."""

    bootstrap_servers: str = Field("localhost:9092", description="Kafka brokers to start from.", min_length=1)
    schema_registry_url: str = Field(
        "http://localhost:8081", repr=False, description="Confluent-compatible schema registry.", pattern=r"^https?://"
    )
    schema_registry_user: str | None = Field(
        None, pattern=r"^[^:]+$", description="Basic-auth user of the registry; goes together with the password."
    )
    schema_registry_password: SecretStr | None = Field(None, description="Basic-auth password of the registry.")
    schema_registry_token: SecretStr | None = Field(
        None, min_length=1, description="Bearer token for the registry, in place of user and password."
    )
    schema_registry_ca_file: Path | None = Field(
        None, description="PEM file of the CAs by which the registry's certificate is checked; certifi's when unset."
    )
    kafka_config: Annotated[dict[str, str], NoDecode] = Field(
        default_factory=dict,
        repr=False,
        description="Extra Kafka client properties, librdkafka names (TLS, SASL); Spark's client gets them translated.",
    )
    kafka_config_file: Path | None = Field(
        None,
        description="Properties file of the same, read at start, which keeps secrets out of the environment.",
    )

    @field_validator("kafka_config", mode="before")
    @classmethod
    def _parse_kafka_config(cls, value: Any) -> Any:
        return properties.parse_json(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _credentials_are_whole(self) -> Self:
        if (self.schema_registry_user is None) != (self.schema_registry_password is None):
            raise ValueError(f"{_P}SCHEMA_REGISTRY_USER and {_P}SCHEMA_REGISTRY_PASSWORD go together; set both or none")
        return self

    @model_validator(mode="after")
    def _registry_is_secured_in_one_way(self) -> Self:
        url = self.schema_registry_url
        ways = {
            f"{_P}SCHEMA_REGISTRY_USER": self.schema_registry_user is not None,
            f"{_P}SCHEMA_REGISTRY_TOKEN": self.schema_registry_token is not None,
            f"a user in {_P}SCHEMA_REGISTRY_URL": "@" in urlsplit(url).netloc,
        }
        if len(given := [way for way, is_given in ways.items() if is_given]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one")
        if self.schema_registry_ca_file is not None:
            if not url.startswith("https://"):
                raise ValueError(f"{_P}SCHEMA_REGISTRY_CA_FILE is not used while {_P}SCHEMA_REGISTRY_URL is not https")
            try:
                ssl.create_default_context(cafile=self.schema_registry_ca_file)
            except (OSError, ssl.SSLError) as error:
                reason = "holds no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
                raise ValueError(
                    f"{_P}SCHEMA_REGISTRY_CA_FILE: {self.schema_registry_ca_file} cannot be used: {reason}"
                ) from None
        return self

    @model_validator(mode="after")
    def _kafka_properties_suit_both_clients(self) -> Self:
        name = f"{_P}KAFKA_CONFIG_FILE"
        try:
            given = self.kafka_properties
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        try:
            jvm_properties(given)
        except PropertyError as error:
            setting = f"{_P}KAFKA_CONFIG" if error.name in self.kafka_config or not self.kafka_config_file else name
            raise ValueError(f"{setting}: {error}") from None
        return self

    @cached_property
    def kafka_properties(self) -> dict[str, str]:
        """Extra properties of every Kafka client, of the setting and of the file."""
        if self.kafka_config_file is None:
            return dict(self.kafka_config)
        of_file = properties.read_file(self.kafka_config_file)
        if both := sorted(of_file.keys() & self.kafka_config.keys()):
            raise ValueError(f"{both[0]} is in {_P}KAFKA_CONFIG too; keep one")
        return of_file | self.kafka_config
