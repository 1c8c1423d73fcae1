"""The schema registry: ids for the schemas we write, writer schemas for the ids we read.

Any thread may call; the client underneath caches what it was told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka.schema_registry import Schema as RegistrySchema
from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

from balance_service.avro.schemas import full_name, subject_of
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.settings.network import environment_proxies
from balance_service.settings.settings import without_user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from balance_service.avro.schemas import Schema
    from balance_service.settings import Settings

_SCHEMA_NOT_FOUND = 40403
_NO_SUCH_SUBJECT = (40401, 40402)
_KEY, _VALUE = "-key", "-value"
_CLIENT_ERRORS = range(400, 500)
_TRY_AGAIN = {408, 429}
_CREDENTIALS_REFUSED = {401, 403}
_CREDENTIALS = "BALANCE_SCHEMA_REGISTRY_USER and BALANCE_SCHEMA_REGISTRY_PASSWORD, or BALANCE_SCHEMA_REGISTRY_TOKEN"
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"


def _record(registered: RegistrySchema | None) -> Schema | None:
    """A registered schema as a record; None of anything else."""
    if registered is None or registered.schema_type not in (None, "AVRO"):
        return None
    try:
        schema: Any = json.loads(registered.schema_str or "")
    except ValueError:
        return None
    return schema if isinstance(schema, dict) and schema.get("type") == "record" and "name" in schema else None


@dataclass(frozen=True)
class WriterSchema:
    """A schema as its writer registered it; `record` is its full name, empty if it is no named type."""

    record: str
    text: str


class SchemaRegistry:
    """A Confluent-compatible schema registry."""

    def __init__(
        self,
        url: str,
        *,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        ca_file: Path | None = None,
    ) -> None:
        """Args:
        user: with `password`, for basic authentication.
        token: sent as bearer, instead.
        ca_file: the CAs by which the registry's certificate is checked, in PEM; None for those of certifi.

        Raises:
            ConfigurationError: a proxy that the environment names cannot be used.
        """
        self.url = without_user(url)
        config: dict[str, object] = {"url": url, "timeout": 5, "max.retries": 1}
        if user is not None:
            config["basic.auth.user.info"] = f"{user}:{password}"
        if token is not None:
            # The client will not have a token without a logical cluster, which only Confluent's cloud heeds.
            config |= {
                "bearer.auth.credentials.source": "STATIC_TOKEN",
                "bearer.auth.token": token,
                "bearer.auth.logical.cluster": "",
            }
        if ca_file is not None:
            config["ssl.ca.location"] = str(ca_file)
        with environment_proxies():
            self.client = SchemaRegistryClient(config)

    @classmethod
    def from_settings(cls, settings: Settings) -> SchemaRegistry:
        """The registry that an instance is configured to use."""
        password, token = settings.schema_registry_password, settings.schema_registry_token
        return cls(
            settings.schema_registry_url,
            user=settings.schema_registry_user,
            password=password.get_secret_value() if password else None,
            token=token.get_secret_value() if token else None,
            ca_file=settings.schema_registry_ca_file,
        )

    def register(self, subject: str, schema: Schema) -> int:
        """Register a schema, if it is not there yet, and return its id.

        A user with read access alone gets the id of what others registered.

        Raises:
            RetriableError: the registry cannot be reached.
            ConfigurationError: the registry refuses the schema or our credentials, or its certificate is not trusted.
        """
        ours = RegistrySchema(json.dumps(schema), "AVRO")
        try:
            return int(self.client.register_schema(subject, ours))
        except SchemaRegistryError as error:
            if error.http_status_code in _CREDENTIALS_REFUSED:
                if (schema_id := self._registered(subject, ours)) is not None:
                    return schema_id
                raise ConfigurationError(
                    f"the schema registry at {self.url} does not let us register subject {subject} "
                    f"(HTTP {error.http_status_code}); correct {_CREDENTIALS}, or the rights of that user there"
                ) from error
            if self._is_refusal(error):
                raise ConfigurationError(
                    f"the schema registry at {self.url} refuses the schema of subject {subject}: {error}"
                ) from error
            raise self._unavailable(error) from error
        except Exception as error:  # transport errors of whichever HTTP library the client uses
            if _UNTRUSTED in str(error):
                raise ConfigurationError(
                    f"the certificate of the schema registry at {self.url} is not to be trusted ({error}); "
                    "correct BALANCE_SCHEMA_REGISTRY_CA_FILE, or the host name in BALANCE_SCHEMA_REGISTRY_URL"
                ) from error
            raise self._unavailable(error) from error

    def writer_schema(self, schema_id: int) -> WriterSchema | None:
        """The schema behind an id; None if a registry that is up does not know it.

        Raises:
            RetriableError: the registry cannot be reached, or refuses to say.
        """
        try:
            registered = self.client.get_schema(schema_id)
        except SchemaRegistryError as error:
            # Not any 404: a wrong path, or a proxy in between, must not turn events into dead letters.
            if error.error_code == _SCHEMA_NOT_FOUND:
                return None
            raise self._unavailable(error) from error
        except Exception as error:  # transport errors of whichever HTTP library the client uses
            raise self._unavailable(error) from error
        text = registered.schema_str or ""
        try:
            record = full_name(json.loads(text)) if registered.schema_type == "AVRO" else ""
        except ValueError:
            record = ""
        return WriterSchema(record, text)

    def schema_ids(self, topic: str) -> list[int]:
        """The ids of all schemas registered for a topic by TopicRecordNameStrategy; none if the registry will not say.

        Raises:
            RetriableError: the registry cannot be reached.
        """
        try:
            subjects = [s for s in self.client.get_subjects() if s.startswith(f"{topic}-")]
            versions = ((s, v) for s in subjects for v in self.client.get_versions(s))
            ids = {self.client.get_version(s, v).schema_id for s, v in versions}
            return sorted(i for i in ids if i is not None)
        except SchemaRegistryError as error:
            if self._is_refusal(error):
                return []
            raise self._unavailable(error) from error
        except Exception as error:  # transport errors of whichever HTTP library the client uses
            raise self._unavailable(error) from error

    def records_of(self, topic: str) -> dict[str, Schema]:
        """The newest record schemas registered for a topic under TopicRecordName or TopicName strategy, by simple name.

        Raises:
            RetriableError: the registry does not answer, or does not let us read.
        """
        found: dict[str, Schema] = {}
        for subject in self._subjects():
            if subject == f"{topic}{_VALUE}" or (subject.startswith(f"{topic}-") and not subject.endswith(_KEY)):
                schema = self._newest(subject)
                if schema is not None and subject in (f"{topic}{_VALUE}", subject_of(topic, schema)):
                    found[full_name(schema).rpartition(".")[2]] = schema
        return found

    def newest(self, topic: str, record: str) -> Schema | None:
        """The newest schema of a record on a topic, under TopicRecordName, TopicName or RecordName strategy.

        Args:
            record: its simple name.

        Raises:
            RetriableError: the registry does not answer, or does not let us read.
        """
        if (schema := self.records_of(topic).get(record)) is not None:
            return schema
        for subject in self._subjects():
            if subject.rpartition(".")[2] == record:
                schema = self._newest(subject)
                if schema is not None and full_name(schema) == subject:
                    return schema
        return None

    def recorded(self, subject: str, propose: Callable[[], Schema | None]) -> Schema | None:
        """The first schema that was registered under a subject; where there is none, a proposal is.

        All who ask come to the same, whoever proposes what.

        Raises:
            RetriableError: the registry does not answer.
            ConfigurationError: the registry does not let us register.
        """
        first = self._version(subject, 1)
        if first is None and (proposed := propose()) is not None:
            try:
                self.register(subject, proposed)
            except ConfigurationError:
                # Another may have been first, with a schema that is not compatible.
                if (first := self._version(subject, 1)) is None:
                    raise
            else:
                first = self._version(subject, 1)
        return first

    def close(self) -> None:
        """Close the connections."""
        self.client.__exit__(None, None, None)

    def _subjects(self) -> list[str]:
        try:
            return sorted(self.client.get_subjects())
        except Exception as error:  # the registry's own, and those of whichever HTTP library the client uses
            raise self._unavailable(error) from error

    def _newest(self, subject: str) -> Schema | None:
        try:
            return _record(self.client.get_latest_version(subject).schema)
        except Exception as error:  # as above
            raise self._unavailable(error) from error

    def _version(self, subject: str, version: int) -> Schema | None:
        try:
            return _record(self.client.get_version(subject, version).schema)
        except SchemaRegistryError as error:
            if error.error_code in _NO_SUCH_SUBJECT:
                return None
            raise self._unavailable(error) from error
        except Exception as error:  # as above
            raise self._unavailable(error) from error

    def _registered(self, subject: str, schema: RegistrySchema) -> int | None:
        try:
            return self.client.lookup_schema(subject, schema).schema_id
        except SchemaRegistryError:
            return None

    @staticmethod
    def _is_refusal(error: SchemaRegistryError) -> bool:
        return error.http_status_code in _CLIENT_ERRORS and error.http_status_code not in _TRY_AGAIN

    def _unavailable(self, error: Exception) -> RetriableError:
        reason = str(error) or type(error).__name__
        return RetriableError(f"the schema registry at {self.url} does not answer: {reason}")
