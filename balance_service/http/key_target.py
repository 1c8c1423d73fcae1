"""The forms of request targets that ask for one key of a read model: one table for all ways to an answer.

`http/server/plain.py` looks a target up by its text, routes are made from them, and both parse the key and make the
query here.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import quote

from balance_service import api
from balance_service.errors import InvalidInputError
from balance_service.http.access.clients import Scope
from balance_service.model.keys import MAX_KEY_BYTES, TEXT, KeyType
from balance_service.model.read_model import Collection, Routes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from balance_service.http.requests import CopyParameters
    from balance_service.model.read_model import ReadModel

KEY_SCOPES = frozenset({Scope.READ})
# Source: RFC 3986, section 2.3. A forwarded query contains them unescaped, too.
_UNRESERVED = string.ascii_letters + string.digits + "-._~"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyQuery:
    """A validated query for one key.

    `path` and `parameters` are those of the request to a peer. `noun` is the word for the key in error texts.
    `echoed_key` is the key as the answer shows it next to the value; None: the answer is the value alone.
    """

    key: bytes
    path: str
    parameters: Mapping[str, str]
    noun: str
    echoed_key: str | Mapping[str, str | int] | None = None
    peers_echo_key: bool = False
    """Whether the answer of a peer shows the key next to the value."""
    min_position: tuple[int, int] | None = None
    max_lag: int | None = None
    max_age: float | None = None

    @property
    def takes_standbys(self) -> bool:
        """Whether a standby may answer: only if the query says how recent the answer must be."""
        return self.min_position is not None or self.max_lag is not None or self.max_age is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTarget:
    """A form of request target that asks for one key of a read model."""

    model: str
    noun: str
    path: str
    peer_path: str
    """The path of the target that peers use."""
    key_type: KeyType = TEXT
    parameters: tuple[str, ...] = ()
    """The parameters with the columns of the key; empty if the key is the last segment of the path."""
    echoes_key: bool = False
    """Whether the answer contains the key next to the value."""

    @property
    def before_key(self) -> str:
        """The target up to its last `=` or, without one, `/`."""
        return f"{self.path}?{self.parameters[0]}" if self.parameters else self.path

    @property
    def is_forwarded(self) -> bool:
        """Whether peers ask at this target."""
        return self.path == self.peer_path

    def key_of(self, text: str) -> bytes | None:
        """Parses the key at the end of a target; None if it is invalid or needs the full parser."""
        # Dots alone may change the path.
        if not 0 < len(text) <= MAX_KEY_BYTES or text.strip(_UNRESERVED) or not (self.parameters or text.strip(".")):
            return None
        if self.key_type.is_text:
            return text.encode()
        try:
            # An answer echoes the text, and a UUID may be written otherwise.
            return self.key_type.parse(text) if self.key_type.shown(text) == text else None
        except InvalidInputError:
            return None

    def query(self, text: str, given: CopyParameters | None = None) -> KeyQuery:
        """Returns the query for a key.

        Args:
            text: the key as requests name it.
            given: the other parameters of the request; those that change the answer are passed on to a peer.

        Raises:
            InvalidInputError: the key is not of its type.
        """
        key = self.key_type.parse(text)
        of_columns = self.key_type.texts(text).values()
        parameters = dict(zip(self.parameters, of_columns, strict=True)) if self.parameters else {}
        if given is not None:
            parameters |= given.passed_on()
        return KeyQuery(
            key=key,
            path=self.peer_path if self.parameters else f"{self.peer_path}/{quote(text, safe='')}",
            parameters=parameters,
            noun=self.noun,
            echoed_key=self.key_type.shown(text) if self.echoes_key else None,
            peers_echo_key=self.echoes_key or not self.is_forwarded,
            min_position=None if given is None else given.min_position,
            max_lag=None if given is None else given.max_lag,
            max_age=None if given is None else given.max_age,
        )


def target_of_any_model(name: str, key_type: KeyType) -> KeyTarget:
    """The target that every read model has."""
    path = f"{api.MODELS}/{name}/keys"
    columns = key_type.columns if key_type.is_composite else ()
    return KeyTarget(
        model=name, noun="key", path=path, peer_path=path, key_type=key_type, parameters=columns, echoes_key=True
    )


def names_of(declared: Routes | Collection) -> tuple[str, ...]:
    """The names of the parameters with the columns of the key."""
    return (declared.key,) if isinstance(declared.key, str) else declared.key


def declared_target(model: ReadModel, declared: Routes | Collection) -> KeyTarget:
    """The target that a read model declares."""
    of_model = replace(target_of_any_model(model.name, model.key_type), noun=declared.noun, echoes_key=False)
    if isinstance(declared, Collection):
        return replace(of_model, path=declared.path)
    return replace(of_model, path=declared.path, peer_path=declared.path, parameters=names_of(declared))


def key_targets(models: Iterable[ReadModel]) -> Iterator[KeyTarget]:
    """Yields the targets for the keys of read models whose text says that no other route is meant."""
    for model in models:
        if not model.has_states() or model.key_type.is_composite:
            continue
        yield target_of_any_model(model.name, model.key_type)
        match model.queries:
            case Routes() as declared:
                yield declared_target(model, declared)
            # A text key could be the name of another route, such as `count`.
            case Collection() as declared if model.key_type.is_number:
                yield declared_target(model, declared)
