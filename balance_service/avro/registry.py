"""Client of the schema registry: ids of the schemas that the service writes, schemas of the ids that it reads.

Any thread may call it. Schemas that were read are kept, because they never change.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import structlog
from confluent_kafka.schema_registry import Schema as RegistrySchema
from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError

from balance_service.avro.bounded_answers import (
    MOST_BYTES,
    AnswerTooLargeError,
    AnswerTooSlowError,
    bound_answers,
)
from balance_service.avro.schemas import subject_of
from balance_service.avro.writer_schema import (
    UnusableSchemaError,
    WriterSchema,
    definitions_of,
    named_in,
    parsed_schema,
    records_told,
    with_definitions,
)
from balance_service.errors import ConfigurationError, MustAskError, RetriableError
from balance_service.settings.network import environment_proxies
from balance_service.settings.settings import without_user

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from balance_service.avro.schemas import Schema
    from balance_service.avro.writer_schema import Definitions
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
_REQUESTS_AT_ONCE = 16
_UNKNOWN_SECONDS = 3.0
_MOST_UNKNOWN = 10_000
_MOST_REFERENCES = 1_000
_REFERENCES_AT_ONCE = 16
# Contexts of a registry that have a schema.
_MOST_PLACES = 16
# Ids are signed in the registry, and unsigned in a frame.
_GREATEST_ID = (1 << 31) - 1
_AVRO = "AVRO"
_IN_ITS_PLACE = "check BALANCE_SCHEMA_REGISTRY_URL, and proxies or gateways that answer in its place"

log = structlog.get_logger(__name__)

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class _NoSchemaError(Exception):
    """The answer to a request for a schema has none."""


class _Records:
    """The records of one schema."""

    def __init__(self, by_name: Mapping[str, Schema]) -> None:
        self.by_name = by_name

    @cached_property
    def _named(self) -> Definitions:
        return named_in(self.by_name.values())

    def completed(self, name: str) -> Schema | None:
        """A record with the definitions that it takes from others of its schema; None if it cannot be read then."""
        if len(self.by_name) == 1:
            return self.by_name[name]
        try:
            return with_definitions(self.by_name[name], self._named)  # type: ignore[no-any-return]
        except UnusableSchemaError as error:
            log.warning("a schema cannot be used", record=name, reason=f"the schema {error}")
            return None


class _Registered(NamedTuple):
    """A schema as the registry has it."""

    text: str
    schema_type: str
    references: tuple[tuple[str, int], ...]
    """Subject and version of each schema that it refers to."""

    @classmethod
    def from_answer(cls, answer: Any) -> _Registered:
        if not isinstance(text := answer.get("schema"), str) or not text:
            raise _NoSchemaError
        references = [(str(one["subject"]), int(one["version"])) for one in answer.get("references") or ()]
        return cls(text, answer.get("schemaType") or _AVRO, tuple(references))


class Place(Protocol):
    """Where texts of schemas are, such as a store."""

    def schema_text(self, key: bytes) -> bytes | None:
        """Returns the value under a reserved key; None if the place has none, or is closed."""


def ask_together(ask: Callable[[Asked], Answer], about: Collection[Asked]) -> Iterator[Answer]:
    """Asks the registry several questions at once; yields the answers in order.

    Raises the first error; what was not asked until then is not.
    """
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE, "registry") as pool:
        yield from pool.map(ask, about)


class SchemaRegistry:
    """A Confluent-compatible schema registry. Every method raises RetriableError if the registry does not answer."""

    is_set = True
    """Whether the application has a registry."""
    has_fingerprints = False
    """Whether records of the service are written with the fingerprints of their schemas."""

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
        self._listed: dict[tuple[str, int], int] = {}
        """Subject and version → id."""
        self._texts: dict[int, _Registered] = {}
        """Id → schema, until it is first requested."""
        self._writers: dict[int, WriterSchema] = {}
        self._references: dict[tuple[str, int], _Registered] = {}
        self._unknown: dict[int | str, float] = {}
        """Id or GUID that the registry does not know → when to ask for it again."""
        with environment_proxies():
            self.client = SchemaRegistryClient(config)
        bound_answers(self.client._rest_client.session)

    @classmethod
    def from_settings(cls, settings: Settings) -> SchemaRegistry:
        password, token = settings.schema_registry_password, settings.schema_registry_token
        if settings.schema_registry_url is None:
            return NoRegistry()
        return cls(
            settings.schema_registry_url,
            user=settings.schema_registry_user,
            password=password.get_secret_value() if password else None,
            token=token.get_secret_value() if token else None,
            ca_file=settings.schema_registry_ca_file,
        )

    @property
    def of_producers(self) -> SchemaRegistry:
        """The registry of the schemas of records that others write."""
        return self

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
        """The schema with an id, or why no value under it can be read.

        None if the registry does not know the id, or a schema that this one refers to. That is remembered for some
        seconds, or until `ask_anew`.

        Raises:
            MustAskError: it is not known yet, and this thread runs an event loop.
            RetriableError: the registry does not answer.
        """
        if not 0 <= schema_id <= _GREATEST_ID:
            return None
        if (writer := self._writers.get(schema_id)) is None and not self._is_unknown(schema_id):
            if _runs_event_loop():
                raise MustAskError(partial(self.writer_schema, schema_id))
            with self._request():
                writer = self._writer_schema(schema_id)
            if writer is None:
                self._remember_unknown(schema_id)
            else:
                self._writers[schema_id] = writer
        return writer

    def _writer_schema(self, schema_id: int) -> WriterSchema | None:
        try:
            registered = self._texts.pop(schema_id, None) or self._with_id(schema_id)
            if registered is None:
                return None
            if registered.schema_type != _AVRO:
                return WriterSchema.from_other_format(registered.schema_type, registered.text)
        except UnusableSchemaError as error:
            return WriterSchema.unusable(str(error))
        try:
            referenced = self._referenced(registered)
        except UnusableSchemaError as error:
            return WriterSchema.unusable(str(error), records_told(registered.text))
        return None if referenced is None else WriterSchema.from_avro(registered.text, referenced)

    def _with_id(self, schema_id: int) -> _Registered | None:
        try:
            return self._registered(f"schemas/ids/{schema_id}")
        except SchemaRegistryError as error:
            # Not every 404: a wrong path, or a proxy, must not turn events into dead letters.
            if error.error_code == _SCHEMA_NOT_FOUND:
                return None
            raise

    def _registered(self, path: str, **query: Any) -> _Registered:
        return _Registered.from_answer(self._answer(path, **query))

    def _answer(self, path: str, **query: Any) -> Any:
        """The answer to a request for a schema. The client's methods would also read what does not concern Avro."""
        try:
            return self.client._rest_client.get(path, query)
        except AnswerTooLargeError as error:
            if error.may_hold_schema:
                raise _too_large() from None
            raise

    def look_in(self, place: Place) -> None:
        """Has schemas that are named by their fingerprints looked for in a place, if any are.

        The place is forgotten when nothing else refers to it.
        """

    def learn(self, key: bytes, value: bytes | None) -> bool:  # noqa: ARG002
        """Takes the text of a schema from a record of the service's own topics.

        Returns:
            Whether the record is one with a text, if such are written.
        """
        return False

    def ask_anew(self) -> None:
        """Forgets which ids and GUIDs the registry did not know."""
        self._unknown.clear()

    def _is_unknown(self, asked: int | str) -> bool:
        return time.monotonic() < self._unknown.get(asked, 0.0)

    def _remember_unknown(self, asked: int | str) -> None:
        if len(self._unknown) >= _MOST_UNKNOWN:
            self._unknown.clear()
        self._unknown[asked] = time.monotonic() + _UNKNOWN_SECONDS

    def id_of(self, guid: str) -> int | None:
        """The id of the schema with a GUID; None if the registry does not know the GUID, or has no GUIDs.

        That it does not is remembered for some seconds, or until `ask_anew`.
        """
        if guid in self._ids:
            return self._ids[guid]
        if self._is_unknown(guid):
            return None
        with self._request():
            schema_id = self._id_of(guid)
        if schema_id is None:
            self._remember_unknown(guid)
        else:
            self._ids[guid] = schema_id
        return schema_id

    def _id_of(self, guid: str) -> int | None:
        try:
            schema = self._registered(f"schemas/guids/{guid}")
            places = self._answer(f"schemas/guids/{guid}/ids")
            # An id of another context than the URL's may be that of another schema here.
            ids = (int(place["id"]) for place in places[:_MOST_PLACES])
            return next((schema_id for schema_id in ids if self._with_id(schema_id) == schema), None)
        except UnusableSchemaError:
            return None
        except SchemaRegistryError as error:
            if error.error_code == _SCHEMA_NOT_FOUND:
                return None
            if error.http_status_code == _NOT_FOUND:
                # A registry without GUIDs answers so, but also a proxy, which does not answer this.
                self.client.get_schema_types()
                return None
            raise

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
            except SchemaRegistryError as error:
                if _is_refusal(error):
                    return []
                raise
            found = [*ask_together(partial(self._id_of_version, subject), versions)]
        return [schema_id for schema_id in found if schema_id is not None]

    def _id_of_version(self, subject: str, version: int) -> int | None:
        """None if the registry does not answer for this version, which must not delay a start."""
        if (subject, version) in self._listed:
            return self._listed[subject, version]
        try:
            answer = self._answer(_version_path(subject, version))
            schema_id, registered = int(answer["id"]), _Registered.from_answer(answer)
        except Exception as error:  # the HTTP library has its own error types
            reason = _what_it_does(error)
            log.warning("a schema is left until a record names it", subject=subject, version=version, reason=reason)
            return None
        if schema_id not in self._writers:
            self._texts[schema_id] = registered
        self._listed[subject, version] = schema_id
        return schema_id

    def records_of(self, topic: str) -> dict[str, Schema]:
        """The newest record schemas of a topic under TopicRecordName or TopicName strategy, by simple name.

        Raises:
            RetriableError: the registry does not answer, or does not let this user read.
        """
        found = {name: records.completed(full) for name, (full, records) in self._records_of(topic).items()}
        return {name: schema for name, schema in found.items() if schema is not None}

    def _records_of(self, topic: str) -> dict[str, tuple[str, _Records]]:
        """Simple name of each record → its full name, and all records of its schema."""
        found: dict[str, tuple[str, _Records]] = {}
        for subject in self._subjects():
            if subject == f"{topic}{_VALUE}" or (subject.startswith(f"{topic}-") and not subject.endswith(_KEY)):
                records = self._newest(subject)
                for name, schema in records.by_name.items():
                    if subject in (f"{topic}{_VALUE}", subject_of(topic, schema)):
                        found[name.rpartition(".")[2]] = name, records
        return found

    def all_records(self, chosen: Callable[[Sequence[str]], Iterable[str]]) -> list[Schema]:
        """The newest record schemas of subjects of values, by subject.

        Args:
            chosen: returns the wanted ones of all subjects.

        Raises:
            RetriableError: the registry does not answer, or does not let this user read.
        """
        subjects = [one for one in chosen(self._subjects()) if not one.endswith(_KEY)]
        read = [records.completed(name) for records in map(self._newest, subjects) for name in records.by_name]
        return [schema for schema in read if schema is not None]

    def newest(self, topic: str, record: str) -> Schema | None:
        """The newest schema of a record on a topic, under TopicRecordName, TopicName or RecordName strategy.

        Args:
            record: its simple name.

        Raises:
            RetriableError: the registry does not answer, or does not let this user read.
        """
        if (found := self._records_of(topic).get(record)) is not None:
            name, records = found
            return records.completed(name)
        for subject in self._subjects():
            if subject.rpartition(".")[2] == record:
                records = self._newest(subject)
                if subject in records.by_name:
                    return records.completed(subject)
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
            if any(subject == subject_of(topic, schema) for schema in self._newest(subject).by_name.values()):
                self._delete(subject)

    def forget_all(self, subjects: re.Pattern[str]) -> None:
        """Deletes the subjects that match completely. Logs as `forget`."""
        for subject in filter(subjects.fullmatch, self._subjects()):
            self._delete(subject)

    def _delete(self, subject: str) -> None:
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

    def _newest(self, subject: str) -> _Records:
        """The records of the newest version of a subject: of a union, all of its members."""
        with self._request():
            return _Records(self._definitions(subject, "latest"))

    def _version(self, subject: str, version: int) -> Schema | None:
        with self._request():
            try:
                return next(iter(self._definitions(subject, version).values()), None)
            except SchemaRegistryError as error:
                if error.error_code in _SUBJECT_OR_VERSION_NOT_FOUND:
                    return None
                raise

    def _definitions(self, subject: str, version: int | str) -> dict[str, Schema]:
        """The records of a version; none if it is not of Avro, or if it cannot be read, which is logged."""
        try:
            registered = self._registered(_version_path(subject, version))
            if registered.schema_type != _AVRO or (referenced := self._referenced(registered)) is None:
                return {}
            return definitions_of(parsed_schema(registered.text, referenced))
        except UnusableSchemaError as error:
            reason = f"the schema {error}"
            log.warning("a schema cannot be used", subject=subject, version=version, reason=reason)
            return {}

    def _referenced(self, registered: _Registered) -> list[str] | None:
        """The texts of the schemas that one refers to, and of those that they refer to; None if one is missing."""
        found: dict[tuple[str, int], _Registered] = {}
        wanted = {*registered.references}
        while wanted:
            if len(found) + len(wanted) > _MOST_REFERENCES:
                raise UnusableSchemaError(f"refers to more than {_MOST_REFERENCES} others")
            named = sorted(wanted)
            # In parts, because their sizes are only known afterwards.
            for part in (named[at : at + _REFERENCES_AT_ONCE] for at in range(0, len(named), _REFERENCES_AT_ONCE)):
                for reference, one in zip(part, ask_together(self._reference, part), strict=True):
                    if one is None:
                        return None
                    found[reference] = one
                if len(registered.text) + sum(len(one.text) for one in found.values()) > MOST_BYTES:
                    raise _too_large()
            wanted = {reference for one in found.values() for reference in one.references} - found.keys()
        return [one.text for one in found.values()]

    def _reference(self, reference: tuple[str, int]) -> _Registered | None:
        if reference in self._references:
            return self._references[reference]
        subject, version = reference
        try:
            # Others may refer to a schema that is deleted, unless that was permanent.
            registered = self._registered(_version_path(subject, version), deleted=True)
        except SchemaRegistryError as error:
            if error.error_code not in _SUBJECT_OR_VERSION_NOT_FOUND:
                raise
            log.warning(
                "a schema cannot be used: the registry does not have a version that it refers to",
                subject=subject,
                version=version,
            )
            return None
        if len(self._references) >= _MOST_REFERENCES:
            self._references.clear()
        self._references[reference] = registered
        return registered

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


class NoRegistry(SchemaRegistry):
    """Stands for the registry of an application that has none."""

    is_set = False

    def __init__(self) -> None:
        self.url = ""

    def register(self, subject: str, schema: Schema) -> int:  # noqa: ARG002
        raise _not_set(f"the schema of subject {subject} would be registered")

    def writer_schema(self, schema_id: int) -> WriterSchema | None:
        raise _not_set(f"a record names schema {schema_id} of a registry")

    def id_of(self, guid: str) -> int | None:
        raise _not_set(f"a record names schema {guid} of a registry")

    def schema_ids(self, topic: str, records: Iterable[str]) -> list[int]:  # noqa: ARG002
        return []

    def records_of(self, topic: str) -> dict[str, Schema]:
        raise _not_set(f"the schemas of topic '{topic}' are in the registry")

    def all_records(self, chosen: Callable[[Sequence[str]], Iterable[str]]) -> list[Schema]:  # noqa: ARG002
        raise _not_set("the schemas of all topics are in the registry")

    def newest(self, topic: str, record: str) -> Schema | None:
        raise _not_set(f"the schema of {record} on topic '{topic}' is in the registry")

    def recorded(self, subject: str, propose: Callable[[], Schema | None]) -> Schema | None:  # noqa: ARG002
        raise _not_set(f"the schema of subject {subject} is in the registry")

    def forget(self, topic: str) -> None: ...

    def forget_all(self, subjects: re.Pattern[str]) -> None: ...

    def ask_anew(self) -> None: ...

    def close(self) -> None: ...


def _not_set(why: str) -> ConfigurationError:
    return ConfigurationError(f"{why}, and BALANCE_SCHEMA_REGISTRY_URL is not set: set it to the registry's address")


def _is_refusal(error: SchemaRegistryError) -> bool:
    return error.http_status_code in _CLIENT_ERRORS and error.http_status_code not in _RETRIABLE_STATUSES


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _what_it_does(error: Exception) -> str:
    reason = str(error) or type(error).__name__
    match error:
        case SchemaRegistryError():
            return f"rejects the request: {reason}"
        case json.JSONDecodeError():
            said = error.doc.strip()[:_SHOWN_CHARACTERS]
            return f"answers with success, but not with JSON ({said!r}); {_IN_ITS_PLACE}"
        case AnswerTooLargeError() | AnswerTooSlowError():
            return f"cannot be used: {reason}; {_IN_ITS_PLACE}"
        # So the client fails at an empty body, and at JSON of another form.
        case _NoSchemaError() | AttributeError() | TypeError() | LookupError() | ValueError() | RecursionError():
            return f"answers with success, but without what was asked for; {_IN_ITS_PLACE}"
        case _:
            return f"does not answer: {reason}"


def _version_path(subject: str, version: int | str) -> str:
    return f"subjects/{quote(subject, safe='')}/versions/{version}"


def _too_large() -> UnusableSchemaError:
    return UnusableSchemaError(f"takes more than {MOST_BYTES >> 20} MiB, with those that it refers to")
