"""The versions of read models: a class declares one, and each generation is folded by the class of its version.

While a class is changed, the former one may stand next to it under the same name, with a lower `version`. An instance
without the class of a generation keeps answering for it, as far as the generation serves, but does not fold it.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NoReturn

from balance_service.avro.named_types import contracted, expanded
from balance_service.avro.resolution import difference
from balance_service.avro.schemas import fields_of, type_name
from balance_service.errors import ConfigurationError, RetriableError
from balance_service.model.converters import unconverted
from balance_service.model.events import HALT
from balance_service.model.generations import Declaration
from balance_service.model.placing import stages_of
from balance_service.model.read_model import ReadModel
from balance_service.model.record_keys import RecordKey
from balance_service.model.sources import has_several, sources_of
from balance_service.model.stream import Global
from balance_service.settings.spark import VALUE_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from balance_service.model.events import Emit, OfState
    from balance_service.model.generations import Generations
    from balance_service.model.keys import KeyType
    from balance_service.model.record_keys import KeyFormat
    from balance_service.model.stage import Stage
    from balance_service.model.stream import Join, Table
    from balance_service.settings import Settings

LACKS_VERSION = "BALANCE_MODELS has only"
_PARTS: Mapping[str, str] = {
    "events": "the schemas of its events",
    "keepsOrder": "its `order`",
    "last": "its source's topic, records, conditions or joins",
    "made": "the schemas of its outputs",
    "onFailure": "its `on_failure`",
    "outputs": "its outputs",
    "reads": "its source, its re-keys or its key",
    "state": "the schema of its states",
    "transform": "its `transform`",
}
"""What a part of a fingerprint is of, where its name does not say it."""
OTHER_TRANSFORM = "has another `transform` or declaration"
"""In the sentences of `why_still`: an operator has to decide, and no waiting helps."""


class Versions:
    """The read models of an instance, in all of their versions that it has."""

    def __init__(
        self, models: Iterable[ReadModel], settings: Settings, generations_of: Callable[[str], Generations]
    ) -> None:
        """Raises ConfigurationError: two versions of a model cannot be generations of one."""
        self._generations_of = generations_of
        self._models: dict[str, dict[int, ReadModel]] = {}
        for model in models:
            self._models.setdefault(model.name, {})[model.version] = model
        self._newest = {name: known[max(known)] for name, known in self._models.items()}
        self._stages = {
            (name, version): stages_of(model, settings)[-1]
            for name, known in self._models.items()
            for version, model in known.items()
        }
        self._declarations = {
            (name, version): declaration_of(model)
            for name, known in self._models.items()
            for version, model in known.items()
            if model.has_states()
        }
        for name in self.with_states:
            for version in self._models[name]:
                self._check_reads(name, self._declarations[name, version])

    @property
    def with_states(self) -> Sequence[str]:
        """The names of the read models that keep states, and so have generations."""
        return [name for name, model in self._newest.items() if model.has_states()]

    def of(self, name: str) -> tuple[int, ...]:
        """Returns the versions of a read model that are here; none for a stage of retries."""
        return tuple(sorted(self._models[name])) if name in self._newest else ()

    def declaration(self, name: str) -> Declaration:
        """Returns the declaration of a read model's newest version here."""
        return self._declarations[name, self._newest[name].version]

    def stage(self, name: str, generation: int) -> Stage:
        """Returns the last stage of a generation; without its class, with the declaration of the newest one."""
        known = self._version(name, generation) if self.knows(name, generation) else self._newest[name].version
        return self._stages[name, known].of_generation(generation)

    def live(self, name: str) -> list[Stage]:
        """Returns the last stages of the generations that this instance hosts.

        It leaves one alone that is built by a class that it lacks. One that serves or served must be here: it answers,
        or its outputs are taken over.
        """
        now = self._generations_of(name)
        building = None if now.building is None else now.building.generation
        return [self.stage(name, number) for number in now.live if number != building or self.knows(name, number)]

    def knows(self, name: str, generation: int) -> bool:
        """Whether this instance has the class that folds a generation."""
        return self._version(name, generation) in self._models[name]

    def changes(self, name: str, generation: int) -> list[str]:
        """Returns what differs, in words, between the class that folds a generation here and when it was begun."""
        if name not in self.with_states:
            return []
        declared = self._generations_of(name).declarations.get(generation)
        here = self._declarations.get((name, self._version(name, generation)))
        return [] if declared is None or here is None else differences(declared, here)

    def has_changed(self, name: str, generation: int) -> bool:
        """Whether the class that folds a generation here is declared in another way than when it was begun."""
        return bool(self.changes(name, generation))

    def read_model(self, stage: Stage) -> ReadModel | None:
        """Returns what folds a stage; without its class, a model that only answers. None for a stage of retries."""
        name, generation = stage.owner, stage.generation
        if name not in self._newest:
            return None
        if stage.passes_on:
            return self._newest[name]
        if self.knows(name, generation):
            return self._models[name][self._version(name, generation)]
        return _without_class(self._newest[name], self._generations_of(name).declarations[generation])

    def why_still(self, stage: Stage) -> str:
        """Returns why a stage is not folded here; empty if it is.

        The fingerprint of a `transform` says exactly what is computed. Code in Python has none, so another declaration
        of a model without a `transform` is only a warning.
        """
        name, generation = stage.owner, stage.generation
        if name not in self._newest or stage.passes_on:
            return ""
        if self.knows(name, generation):
            changes = [] if stage.transform is None else self.changes(name, generation)
            if not changes:
                return ""
            return (
                f"version {self._version(name, generation)} of '{name}' {OTHER_TRANSFORM} here than the one that "
                f"generation {generation} was begun with, so its answers stand still. What differs: "
                f"{'; '.join(changes)}. Give back what it had, give the class the next `version`, or rebuild the model "
                "and switch"
            )
        known = " and ".join(map(str, sorted(self._models[name])))
        return (
            f"generation {generation} of '{name}' has version {self._version(name, generation)}, and {LACKS_VERSION} "
            f"{known} here, so its answers stand still: switch to a generation of another version, or name "
            "the class of that version too"
        )

    def check_serving(self) -> None:
        """Checks that the classes here can follow the generations that serve, and read their states.

        Raises ConfigurationError.
        """
        for name in self.with_states:
            now = self._generations_of(name)
            if (declared := now.declarations.get(now.serving)) is not None:
                self._check_reads(name, declared)
                if (model := self._models[name].get(declared.version)) is not None:
                    _check_state(model, declared, now.serving)

    def _version(self, name: str, generation: int) -> int:
        declared = self._generations_of(name).declarations.get(generation)
        return self._newest[name].version if declared is None else declared.version

    def _check_reads(self, name: str, declared: Declaration) -> None:
        ours = self.declaration(name)
        passes_rows_on = any(stage.transform is not None for stage in self._newest[name].stages[:-1])
        if not fits(declared, ours) or (passes_rows_on and _changed_settings(declared, ours)):
            is_rekeyed = self._newest[name].stages[-1].reads_rekeyed
            or_else = "; or stop all instances and run `balance-service rebuild --offline`, which folds new ones"
            raise ConfigurationError(
                f"the read model '{name}', version {ours.version}, reads another topic, re-keys differently, or has "
                f"another key than version {declared.version}, which has states, so neither can be built next to the "
                "other (a higher version may have more `sources`, of records that the former one does not fold): give "
                f"the new one a name of its own{'' if is_rekeyed else or_else}"
            )


def _check_state(model: ReadModel, declared: Declaration, generation: int) -> None:
    if why := difference(expanded(json.loads(declared.state)), expanded(model.state_schema)):
        raise ConfigurationError(
            f"the read model '{model.name}', version {model.version}, cannot read the states of its generation "
            f"{generation}, which has the same version: {why}; give the class the next `version`, which is built next "
            "to the one that serves, or give back what it has there; or stop all instances and run "
            "`balance-service rebuild --offline`, which folds new ones"
        )


def declaration_of(model: ReadModel) -> Declaration:
    """Returns what identifies the declaration of a read model that keeps states."""
    *earlier, last = model.stages
    is_transformed = any(stage.transform is not None for stage in model.stages)
    described = dict(_described(last))
    reads = {
        "earlier": [] if has_several(model) else [*map(_described, earlier)],
        "topic": last.source,
        "key": _key(model.key_type),
    }
    every = [_digest(reads), *sorted(_chains(earlier))]
    state = contracted(model.state_schema)
    folded = {
        "reads": every if has_several(model) else reads,
        "transform": described.pop("transform", None),
        "last": described,
        "partitioner": last.partitioner,
        "events": {name: contracted(schema) for name, schema in last.wanted_schemas.items()},
        "folds": {name: repr(fold) for name, fold in model.standard_folds.items()},
        "outputs": [
            [
                *(emit.topic, emit.record, emit.each.value, str(emit.where)),
                *(*_taken(emit.fields), *_form(emit.key_format), *_format(emit)),
            ]
            for emit in model.outputs
        ],
        "made": {name: contracted(schema) for name, schema in model.made_schemas.items()},
        "state": state,
        "keepsOrder": model.keeps_order,
        # Without it, the fingerprints of models that do not name it would change.
        **({} if model.on_failure is HALT else {"onFailure": model.on_failure.value}),
    }
    fingerprint = " ".join(f"{part}:{_digest({part: of})[:16]}" for part, of in sorted(folded.items()))
    return Declaration(
        model.version,
        fingerprint,
        " ".join(every),
        json.dumps(state),
        model.computes_answers,
        settings=VALUE_SETTINGS if is_transformed else {},
    )


def differences(declared: Declaration, ours: Declaration) -> list[str]:
    """Returns what differs between two declarations, in words.

    A setting of Spark that only one of them has is no difference: a release adds those that have Spark's default, which
    the other one had too.
    """
    before, now = _parts(declared), _parts(ours)
    changed = sorted(part for part in before.keys() | now.keys() if before.get(part) != now.get(part))
    return [_PARTS.get(part, part) for part in changed] + _changed_settings(declared, ours)


def _parts(declared: Declaration) -> dict[str, str]:
    return {part.partition(":")[0]: part for part in declared.fingerprint.split()}


def _changed_settings(declared: Declaration, ours: Declaration) -> list[str]:
    known = sorted(declared.settings.keys() & ours.settings.keys())
    return [
        f"Spark's {name}, which was {declared.settings[name]} and is {ours.settings[name]}"
        for name in known
        if declared.settings[name] != ours.settings[name]
    ]


def _chains(earlier: Iterable[Stage]) -> list[str]:
    """Returns a digest of the stages of each of several sources, and the records that they pass on."""
    chains, chain = [], []
    for stage in earlier:
        chain.append(_described(stage))
        if stage.passes_to:
            passed_on = stage.records if stage.makes is None else [stage.makes["name"]]
            chains.append(f"{_digest({'source': chain})}:{','.join(sorted(passed_on))}")
            chain = []
    return chains


def fits(declared: Declaration, ours: Declaration) -> bool:
    """Whether one version can be built next to another: both read alike, and the newer one may have more sources.

    Those pass on records of other names: the former version would fold them too.
    """
    older, newer = sorted((declared, ours), key=lambda one: one.version)
    (read, *sources), (reads, *more) = older.reads.split(), newer.reads.split()
    if older.version == newer.version or not sources:
        return older.reads == newer.reads
    added = {*more} - {*sources}
    return read == reads and {*sources} <= {*more} and not _passed_on(added) & _passed_on(sources)


def _passed_on(sources: Iterable[str]) -> set[str]:
    return {name for source in sources for name in source.partition(":")[2].split(",")}


def _taken(fields: Mapping[str, str | OfState]) -> Sequence[Any]:
    return [[field, of if isinstance(of, str) else ["state", of.field]] for field, of in sorted(fields.items())]


def _key(key_type: KeyType) -> Any:
    parts = [[part.column, part.is_number] for part in key_type.parts]
    if isinstance(key_type, RecordKey):
        return [*parts[0], *_form(key_type.key_format)]
    return parts if key_type.is_composite else parts[0]


def _form(key_format: KeyFormat | None) -> Sequence[Mapping[str, Any]]:
    """Returns what a fingerprint has of a form of keys; nothing if none is named, as before there were any."""
    return [] if key_format is None else [{"keys": key_format}]


def _described(stage: Stage) -> Mapping[str, Any]:
    return {
        "source": stage.source,
        "records": stage.records,
        "conditions": [*map(str, stage.conditions)],
        "joins": [*map(_joined, stage.joins)],
        "by": stage.by if stage.by is None or len(stage.by) > 1 else stage.by[0],
        "makes": stage.makes,
        **({} if stage.format == "avro" else {"format": stage.format, "type": stage.type}),
        **({"compacted": True} if stage.compacted else {}),
        **({} if stage.transform is None else {"transform": stage.transform.fingerprint}),
    }


def _joined(join: Join) -> Sequence[Any]:
    table = join.table
    known = table.topic, table.record, isinstance(table, Global), str(table.history), join.on, join.take, join.missing
    return [*known, *_form(None if table.key_format == "string" else table.key_format), *_format(table)]


def _format(declared: Emit | Table) -> Sequence[str]:
    """Returns what the format adds to a fingerprint; nothing for Avro, so that those of former releases remain."""
    return [] if declared.format == "avro" else [declared.format]


def _digest(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=dict).encode()).hexdigest()[:32]


def _without_class(newest: ReadModel, declared: Declaration) -> ReadModel:
    """Returns a read model with known states, which are its answers; it folds nothing."""
    state_schema = json.loads(declared.state)

    def view(self: ReadModel, _state: Any) -> NoReturn:
        raise RetriableError(
            f"version {self.version} of '{self.name}' computes its answers, and its class is not here: name it in "
            "BALANCE_MODELS too, or switch to a generation of another version"
        )

    def init(self: ReadModel) -> None:
        self.key, self.key_type, self.state_schema = newest.key, newest.key_type, state_schema
        self.key_columns = newest.key_columns
        self._states = unconverted(state_schema)
        self.state_fields = fields_of(expanded(state_schema))
        self.field_types = {
            name: type_name(kind) for name, kind in self.state_fields.items() if name not in self.key_columns
        }
        self.stages, self.outputs, self.made_schemas = newest.stages, (), {}
        self.standard_folds, self._answers = {}, []
        self.needs_events, self.combine, self.keeps_order = False, None, newest.keeps_order
        self.keeps_newest = newest.keeps_newest

    source = {"sources": sources_of(newest)} if has_several(newest) else {"source": newest.source}
    members: dict[str, Any] = {"name": newest.name, **source, "state": state_schema["name"]}
    members |= {"version": declared.version, "__init__": init}
    if declared.own_view:
        members |= {"view": view, "fields": {}}
    found: ReadModel = type("WithoutClass", (ReadModel,), members)()
    return found
