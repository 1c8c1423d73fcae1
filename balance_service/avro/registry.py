"""Client of the schema registry: ids of the schemas that the service writes, schemas of the ids that it reads.

Any thread may call it. The client caches the registry's answers.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka.schema_registry import Schema as RegistrySchema
from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

from balance_service.avro.schemas import full_name, subject_of
from balance_service.avro.writer_schema import WriterSchema, self_contained
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.settings.network import environment_proxies
from balance_service.settings.settings import without_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from balance_service.avro.schemas import Schema
    from balance_service.settings import Settings

_NOT_FOUND = 404
_SCHEMA_NOT_FOUND = 40403
_SUBJECT_OR_VERSION_NOT_FOUND = (40401, 40402)
_KEY, _VALUE = "-key", "-value"
_CLIENT_ERRORS = range(400, 500)
_RETRIABLE_STATUSES = {408, 429}
_CREDENTIALS_REFUSED = {401, 403}
_CREDENTIALS = "BALANCE_SCHEMA_REGISTRY_USER and BALANCE_SCHEMA_REGISTRY_PASSWORD, or BALANCE_SCHEMA_REGISTRY_TOKEN"
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_SHOWN_CHARACTERS = 60
# An instance that starts asks for each. It learns an older one from its first record, which costs more.
_MOST_VERSIONS = 200
_REQUESTS_AT_ONCE = 4
_IN_ITS_PLACE = "check BALANCE_SCHEMA_REGISTRY_URL, and proxies or gateways that answer in its place"

log = structlog.get_logger(__name__)


class _NoSchemaError(Exception):
    """The answer to a request for a schema has none."""


class SchemaRegistry:
    """A Confluent-compatible schema registry. Every method raises RetriableError if the registry does not answer."""

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
        user: for basic authentication, with `password`.
        token: a bearer token, in place of user and password.
        ca_file: PEM file of the CAs that sign the registry's certificate; None for those of certifi.

        Raises:
            ConfigurationError: a proxy of the environment cannot be used.
        """
        self.url = without_user(url)
        config: dict[str, object] = {"url": url, "timeout": 5, "max.retries": 1}
        if user is not None:
            config["basic.auth.user.info"] = f"{user}:{password}"
        if token is not None:
            # The client requires a logical cluster with a token. Only Confluent Cloud uses it.
            config |= {
                "bearer.auth.credentials.source": "STATIC_TOKEN",
                "bearer.auth.token": token,
                "bearer.auth.logical.cluster": "",
            }
        if ca_file is not None:
            config["ssl.ca.location"] = str(ca_file)
        self._ids: dict[str, int] = {}
        """GUID → id."""
        self._listed: dict[int, RegistrySchema] = {}
        """Id → schema, until it is first requested."""
        with environment_proxies():
            self.client = SchemaRegistryClient(config)

    @classmethod
    def from_settings(cls, settings: Settings) -> SchemaRegistry:
        password, token = settings.schema_registry_password, settings.schema_registry_token
        return cls(
            settings.schema_registry_url,
            user=settings.schema_registry_user,
            password=password.get_secret_value() if password else None,
            token=token.get_secret_value() if token else None,
            ca_file=settings.schema_registry_ca_file,
        )

    def register(self, subject: str, schema: Schema) -> int:
        """Registers a schema if it is missing, and returns its id.

        A user with read access only gets the id of an already registered schema.

        Raises:
            ConfigurationError: the registry refuses the schema or the credentials, or its certificate is not trusted.
        """
        ours = RegistrySchema(json.dumps(schema), "AVRO")
        with self._request():
            try:
                return int(self.client.register_schema(subject, ours))
            except SchemaRegistryError as error:
                if error.http_status_code in _CREDENTIALS_REFUSED:
                    with suppress(SchemaRegistryError):
                        if (schema_id := self.client.lookup_schema(subject, ours).schema_id) is not None:
                            return schema_id
                    raise ConfigurationError(
                        f"the schema registry at {self.url} does not let this user register subject {subject} "
                        f"(HTTP {error.http_status_code}); correct {_CREDENTIALS}, or the user's rights there"
                    ) from error
                if _is_refusal(error):
                    raise ConfigurationError(
                        f"the schema registry at {self.url} refuses the schema of subject {subject}: {error}"
                    ) from error
                raise
            except Exception as error:
                if _UNTRUSTED not in str(error):
                    raise
                raise ConfigurationError(
                    f"the certificate of the schema registry at {self.url} is not trusted ({error}); "
                    "correct BALANCE_SCHEMA_REGISTRY_CA_FILE, or the host name in BALANCE_SCHEMA_REGISTRY_URL"
                ) from error

    def writer_schema(self, schema_id: int) -> WriterSchema | None:
        """The schema with an id; None if the registry does not know the id, or a schema that this one refers to."""
        with self._request():
            try:
                registered = self._listed.pop(schema_id, None) or self.client.get_schema(schema_id)
            except SchemaRegistryError as error:
                # Not every 404: a wrong path, or a proxy, must not turn events into dead letters.
                if error.error_code == _SCHEMA_NOT_FOUND:
                    return None
                raise
            if not _is_avro(registered):
                return WriterSchema(_text(registered), ())
            schema = self._complete(registered)
        return None if schema is None else WriterSchema.of(schema)

    def id_of(self, guid: str) -> int | None:
        """The id of the schema with a GUID; None if the registry does not know the GUID, or has no GUIDs."""
        if guid in self._ids:
            return self._ids[guid]
        with self._request():
            try:
                schema = self.client.get_schema_by_guid(guid)
                # The client has no method for this request.
                places = self.client._rest_client.get(f"schemas/guids/{guid}/ids")
            except SchemaRegistryError as error:
                if error.error_code == _SCHEMA_NOT_FOUND:
                    return None
                if error.http_status_code == _NOT_FOUND:
                    # A registry without GUIDs answers so, but also a proxy, which does not answer this.
                    self.client.get_schema_types()
                    return None
                raise
            for schema_id in (int(place["id"]) for place in places):
                # An id of another context than the URL's may be that of another schema here.
                if self._has(schema_id, schema):
                    self._ids[guid] = schema_id
                    return schema_id
        return None

    def _has(self, schema_id: int, schema: RegistrySchema) -> bool:
        try:
            found = self.client.get_schema(schema_id)
        except SchemaRegistryError as error:
            if error.error_code == _SCHEMA_NOT_FOUND:
                return False
            raise
        return (found.schema_str, found.references) == (_text(schema), schema.references)

    def schema_ids(self, topic: str, records: Iterable[str]) -> list[int]:
        """The ids of the newest schemas that producers of a topic use by TopicName or TopicRecordName strategy.

        Those that the registry does not let this user read are left out.

        Args:
            records: full names.
        """
        subjects = [f"{topic}{_VALUE}", *(f"{topic}-{record}" for record in records)]
        return sorted({schema_id for subject in subjects for schema_id in self._ids_of(subject)})

    def _ids_of(self, subject: str) -> list[int]:
        with self._request():
            try:
                versions = sorted(self.client.get_versions(subject))[-_MOST_VERSIONS:]
                with ThreadPoolExecutor(_REQUESTS_AT_ONCE, "registry") as pool:
                    found = [*pool.map(partial(self.client.get_version, subject), versions)]
            except SchemaRegistryError as error:
                if _is_refusal(error):
                    return []
                raise
        listed = {one.schema_id: one.schema for one in found if one.schema_id is not None}
        self._listed |= listed
        return [*listed]

    def records_of(self, topic: str) -> dict[str, Schema]:
        """The newest record schemas of a topic under TopicRecordName or TopicName strategy, by simple name.

        Raises:
            RetriableError: the registry does not answer, or does not let this user read.
        """
        found: dict[str, Schema] = {}
        for subject in self._subjects():
            if subject == f"{topic}{_VALUE}" or (subject.startswith(f"{topic}-") and not subject.endswith(_KEY)):
                for schema in self._newest(subject):
                    if subject in (f"{topic}{_VALUE}", subject_of(topic, schema)):
                        found[full_name(schema).rpartition(".")[2]] = schema
        return found

    def newest(self, topic: str, record: str) -> Schema | None:
        """The newest schema of a record on a topic, under TopicRecordName, TopicName or RecordName strategy.

        Args:
            record: its simple name.

        Raises:
            RetriableError: the registry does not answer, or does not let this user read.
        """
        if (schema := self.records_of(topic).get(record)) is not None:
            return schema
        for subject in self._subjects():
            if subject.rpartition(".")[2] == record:
                for schema in self._newest(subject):
                    if full_name(schema) == subject:
                        return schema
        return None

    def recorded(self, subject: str, propose: Callable[[], Schema | None]) -> Schema | None:
        """The first version of a subject; if there is none, registers a proposal first.

        All callers get the same schema, also if their proposals differ.

        Raises:
            ConfigurationError: the registry does not let this user register.
        """
        first = self._version(subject, 1)
        if first is None and (proposed := propose()) is not None:
            try:
                self.register(subject, proposed)
            except ConfigurationError:
                # Another instance may have registered an incompatible schema first.
                if (first := self._version(subject, 1)) is None:
                    raise
            else:
                first = self._version(subject, 1)
        return first

    def forget(self, topic: str) -> None:
        """Deletes the subjects of a topic's records under TopicRecordName strategy; their schemas stay readable by id.

        Logs which ones the registry does not let this user delete.
        """
        for subject in self._subjects():
            if not subject.startswith(f"{topic}-"):
                continue
            # Another topic's name may begin with this one's.
            if any(subject == subject_of(topic, schema) for schema in self._newest(subject)):
                with self._request():
                    try:
                        self.client.delete_subject(subject)
                    except SchemaRegistryError as error:
                        if not _is_refusal(error):
                            raise
                        log.warning("a subject of a deleted topic is left", subject=subject, error=str(error))

    def close(self) -> None:
        self.client.__exit__(None, None, None)

    def _subjects(self) -> list[str]:
        with self._request():
            return sorted(self.client.get_subjects())

    def _newest(self, subject: str) -> list[Schema]:
        """The records of the newest version of a subject: of a union, all of its members."""
        with self._request():
            return self._records(self.client.get_latest_version(subject).schema)

    def _version(self, subject: str, version: int) -> Schema | None:
        with self._request():
            try:
                return next(iter(self._records(self.client.get_version(subject, version).schema)), None)
            except SchemaRegistryError as error:
                if error.error_code in _SUBJECT_OR_VERSION_NOT_FOUND:
                    return None
                raise

    def _records(self, registered: RegistrySchema) -> list[Schema]:
        schema = self._complete(registered) if _is_avro(registered) else None
        members = schema if isinstance(schema, list) else [schema]
        # A member of a union may name types that another defines.
        records = (self_contained(member, members) if len(members) > 1 else member for member in members)
        return [one for one in records if isinstance(one, dict) and one.get("type") == "record" and "name" in one]

    def _complete(self, registered: RegistrySchema) -> Any:
        """An Avro schema with those that it refers to; None if the registry lacks one of them."""
        schema = json.loads(_text(registered))
        referenced: dict[tuple[str, int], Any] = {}
        if not all(self._add_referenced(referenced, *reference) for reference in _references(registered)):
            return None
        return self_contained(schema, referenced.values()) if referenced else schema

    def _add_referenced(self, found: dict[tuple[str, int], Any], subject: str, version: int) -> bool:
        """Adds a schema that another refers to, and those that it refers to; False if the registry lacks one."""
        if (subject, version) in found:
            return True
        try:
            # Others may refer to a schema that is deleted, unless that was permanent.
            registered = self.client.get_version(subject, version, deleted=True).schema
        except SchemaRegistryError as error:
            if error.error_code not in _SUBJECT_OR_VERSION_NOT_FOUND:
                raise
            log.warning(
                "a schema cannot be used: the registry does not have a version that it refers to",
                subject=subject,
                version=version,
            )
            return False
        found[subject, version] = json.loads(_text(registered))
        return all(self._add_referenced(found, *reference) for reference in _references(registered))

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Raises errors of the registry, and of the client's HTTP library, as RetriableError."""
        try:
            yield
        except ConfigurationError:
            raise
        except Exception as error:  # the HTTP library has its own error types
            # An answer that is no schema may be among what the client has stored, and would remain.
            self.client.clear_caches()
            raise RetriableError(f"the schema registry at {self.url} {_what_it_does(error)}") from error


def _is_refusal(error: SchemaRegistryError) -> bool:
    return error.http_status_code in _CLIENT_ERRORS and error.http_status_code not in _RETRIABLE_STATUSES


def _what_it_does(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    match error:
        case SchemaRegistryError():
            return f"rejects the request: {reason}"
        case json.JSONDecodeError():
            said = error.doc.strip()[:_SHOWN_CHARACTERS]
            return f"answers with success, but not with JSON ({said!r}); {_IN_ITS_PLACE}"
        # So the client fails at an empty body, and at JSON of another form.
        case _NoSchemaError() | AttributeError() | TypeError() | LookupError() | ValueError():
            return f"answers with success, but without what was asked for; {_IN_ITS_PLACE}"
        case _:
            return f"does not answer: {reason}"


def _text(registered: RegistrySchema) -> str:
    if not isinstance(text := registered.schema_str, str) or not text:
        raise _NoSchemaError
    return text


def _is_avro(registered: RegistrySchema) -> bool:
    return registered.schema_type in (None, "AVRO")


def _references(registered: RegistrySchema) -> list[tuple[str, int]]:
    """Subject and version of each schema that one refers to."""
    return [(str(reference.subject), int(reference.version or 0)) for reference in registered.references or ()]
