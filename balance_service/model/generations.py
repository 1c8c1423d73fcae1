"""The generations of a read model: the builds of its states. One of them serves.

A read model is rebuilt as a new generation while the serving one answers. Then another generation serves, and the
former one is kept for a while, so that it may serve again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from balance_service import api
from balance_service.avro.rules import DECODER_RULES
from balance_service.errors import InvalidInputError
from balance_service.structs import Struct

if TYPE_CHECKING:
    from typing import Self

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class Switch(Enum):
    """When a generation that is built begins to serve."""

    WHEN_EQUAL = "when_equal"
    """Once it has caught up, if every key has the same state."""
    ALWAYS = "always"
    """Once it has caught up."""
    NEVER = "never"
    """When an operator says so."""


Keys = Annotated[int, Ge(0)]
GenerationStatus = Literal["serving", "building", "ready", "kept"]


# Of the serving generation and the one that is built.
@dataclass(frozen=True, slots=True)
class Comparison(Struct):
    equal: Keys = 0
    """Keys with equal states in both generations, at the same positions."""
    different: Keys = 0
    only_serving: Keys = 0
    """Keys that only the serving generation has."""
    only_building: Keys = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.equal + other.equal,
            self.different + other.different,
            self.only_serving + other.only_serving,
            self.only_building + other.only_building,
        )

    @property
    def is_equal(self) -> bool:
        return not (self.different or self.only_serving or self.only_building)


@dataclass(frozen=True, slots=True)
class Declaration(Struct):
    """What folds a generation: see `schemas/Generations.avsc`, where it has the number of the generation, too.

    Two are equal if version and declaration are; changed Python code does not show.
    """

    version: int
    fingerprint: str
    reads: str
    state: str
    own_view: bool
    decoder_rules: int = DECODER_RULES
    begins: tuple[int, ...] = field(default=(), compare=False)
    """The first offset of each partition of the source when the generation began; 0 for those that are missing."""
    settings: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Those of Spark that the values of a `transform` depend on."""

    def begins_at(self, partition: int) -> int:
        return self.begins[partition] if partition < len(self.begins) else 0

    def cut_to(self, starts: Mapping[int, int]) -> Declaration:
        """Returns the declaration of a generation that has nothing below these offsets, by partition."""
        return self.beginning_at({p: max(start, self.begins_at(p)) for p, start in starts.items()})

    def beginning_at(self, starts: Mapping[int, int]) -> Declaration:
        """Returns the declaration of a generation that begins at these offsets, by partition."""
        return replace(self, begins=tuple(start for _, start in sorted(starts.items())))


@dataclass(frozen=True, slots=True)
class Building(Struct):
    """A generation that is built. `keep_old_seconds` and `max_rate` are as in the topic's record."""

    generation: int
    switch: Switch
    keep_old_seconds: int
    max_rate: int | None = None


@dataclass(frozen=True, slots=True)
class Generations(Struct, names={"is_settled": "settled"}, beside=("model", "declarations")):
    """The generations of one read model. A transition returns the next state, with the next number.

    At most two are live: the one that serves, and one that is built or kept.
    """

    model: str
    number: int = 0
    newest: int = 1
    newest_version: int = 0
    """The highest version that a generation was built of."""
    declarations: Mapping[int, Declaration] = field(default_factory=dict)
    """By live or former generation; empty until the model has a record."""
    serving: int = 1
    building: Building | None = None
    comparison: Comparison | None = None
    """Of the two live generations, once the newer one had caught up."""
    kept: int | None = None
    former: tuple[int, ...] = ()
    """Replaced by an offline rebuild. Their changelogs say what was sent, until the serving one has taken that over."""
    serving_since: int = 0
    """The `number` with which the serving generation began to serve."""
    is_settled: bool = True
    """Whether the serving generation sends the outputs of all partitions, so that no other one is needed for that."""
    kept_until: datetime | None = None
    keep_old_seconds: int = api.KEEP_OLD_SECONDS
    """How long a generation is kept after each switch, by the rebuild of the newest one that served."""
    action: str = ""
    by: str = ""
    reason: str = ""
    at: datetime = _NEVER

    @property
    def live(self) -> list[int]:
        """The generations that are folded, in order."""
        others = (None if self.building is None else self.building.generation, self.kept)
        return sorted({self.serving, *(number for number in others if number is not None)})

    @property
    def writable(self) -> list[int]:
        """The generations whose changelogs exist, in order: the live ones, and `former`."""
        return sorted({*self.live, *self.former})

    def status_of(self, number: int) -> GenerationStatus:
        """Returns what a live generation is for: `serving`, `building`, `ready` (to serve) or `kept`."""
        if number == self.serving:
            return "serving"
        if self.building is None or number != self.building.generation:
            return "kept"
        return "building" if self.comparison is None else "ready"

    def refusal(self, before: Generations) -> str:
        """Returns why this cannot be the state after another one; empty if it can."""
        if self.number != before.number + 1:
            return f"its number is {self.number}, and {before.number + 1} is next"
        is_replaced = self.serving == self.newest == before.newest + 1 and {*before.writable} <= {*self.former}
        if self.serving not in before.live and not is_replaced:
            return f"generation {self.serving} serves in it, which was not live before"
        if not before.newest <= self.newest <= before.newest + 1:
            return f"generation {self.newest} is its newest, and {before.newest} was before"
        return ""

    def begun(self, declaration: Declaration) -> Generations:
        """The first generation is folded by a declaration; unchanged if the model has a record."""
        if self.number:
            return self
        reason = "it is hosted for the first time"
        return self._next(
            "begin", "", reason, newest_version=declaration.version, declarations={self.serving: declaration}
        )

    def upgraded(self, declaration: Declaration, switch: Switch, keep_old_seconds: int) -> Generations:
        """A generation of a higher version than any so far is built; unchanged if there is one, or another is live."""
        if declaration.version <= self.newest_version or len(self.live) > 1:
            return self
        reason = f"version {declaration.version}"
        return self.rebuilt(declaration, switch, keep_old_seconds, None, "", reason)

    def replaced(self, declaration: Declaration) -> Generations:
        """A new generation serves at once, which takes over from all others. For a stopped application."""
        number = self.newest + 1
        return self._next(
            "rebuild offline",
            "balance-service rebuild --offline",
            "",
            newest=number,
            newest_version=max(self.newest_version, declaration.version),
            declarations={**self.declarations, number: declaration},
            serving=number,
            building=None,
            comparison=None,
            kept=None,
            kept_until=None,
            former=tuple(self.writable),
            is_settled=False,
        )

    def rebuilt(
        self,
        declaration: Declaration,
        switch: Switch | None,
        keep_old_seconds: int,
        max_rate: int | None,
        by: str,
        reason: str,
    ) -> Generations:
        """Another generation is built.

        Args:
            switch: None for WHEN_EQUAL, or, if its version differs from the serving one's, NEVER.

        Raises:
            InvalidInputError: another generation is being built, or kept.
        """
        if self.building is not None:
            raise InvalidInputError(
                f"generation {self.building.generation} of '{self.model}' is being built: wait for it, or drop it first"
            )
        if self.kept is not None:
            raise InvalidInputError(
                f"generation {self.kept} of '{self.model}' is still kept after a switch: drop it first"
            )
        is_same = declaration.version == self.declarations[self.serving].version
        switch = switch or (Switch.WHEN_EQUAL if is_same else Switch.NEVER)
        number = self.newest + 1
        return self._next(
            "rebuild",
            by,
            reason,
            newest=number,
            newest_version=max(self.newest_version, declaration.version),
            building=Building(number, switch, keep_old_seconds, max_rate),
            declarations={**self.declarations, number: declaration},
        )

    def compared(
        self, generation: int, comparison: Comparison, starts: Mapping[int, int] | None = None, *, why_not: str = ""
    ) -> Generations:
        """The generation that is built has caught up, and serves if its `switch` says so.

        Args:
            starts: the first offset of each partition of the source now; None: as when the generation was begun.
            why_not: why it must not serve by itself, in any case; empty if it may.

        Raises:
            InvalidInputError: another one is built now, or none.
        """
        building = self.building
        if building is None or building.generation != generation:
            raise InvalidInputError(f"generation {generation} of '{self.model}' is not being built")
        declared = self.declarations[generation]
        declared = declared if starts is None else declared.cut_to(starts)
        after = replace(self, comparison=comparison, declarations={**self.declarations, generation: declared})
        serves = building.switch is Switch.ALWAYS or (building.switch is Switch.WHEN_EQUAL and comparison.is_equal)
        if serves and not why_not:
            always = building.switch is Switch.ALWAYS
            why = "was to serve then in any case" if always else "all states are equal"
            return after._serve_built(building, "", f"it has caught up, and {why}")
        return after._next("compare", "", why_not if serves else "")

    def switched(self, to: int | None, by: str, reason: str) -> Generations:
        """Another generation serves: the one that is built, or the one that is kept. `Rebuilds` checks that it is fit.

        Args:
            to: None for the only one possible.

        Raises:
            InvalidInputError: it does not exist, or serves.
        """
        building, kept = self.building, self.kept
        to = to or (building.generation if building is not None else kept)
        if to is None:
            raise InvalidInputError(f"'{self.model}' has no other generation than {self.serving}")
        if to == self.serving:
            raise InvalidInputError(f"generation {to} of '{self.model}' serves already")
        if building is not None and to == building.generation:
            return self._serve_built(building, by, reason)
        if to == kept:
            return self._switched(kept, self.keep_old_seconds, by, reason)
        raise InvalidInputError(f"'{self.model}' has no generation {to} now")

    def dropped(self, generation: int, by: str, reason: str) -> Generations:
        """Raises InvalidInputError: the generation serves, or does not exist."""
        if generation == self.serving:
            raise InvalidInputError(f"generation {generation} of '{self.model}' serves: switch to another one first")
        if self.building is not None and generation == self.building.generation:
            return self._next("drop", by, reason, building=None, comparison=None)
        if generation == self.kept:
            if not self.is_settled:
                raise InvalidInputError(
                    f"generation {self.serving} of '{self.model}' has not taken over all partitions from {generation} "
                    "yet: try again, and look at `problem` of the generations if it stays so"
                )
            return self._next("drop", by, reason, kept=None, kept_until=None, comparison=None)
        raise InvalidInputError(f"'{self.model}' has no generation {generation} now")

    def settled(self) -> Generations:
        """The serving generation sends the outputs of all partitions."""
        reason = f"generation {self.serving} has taken over all partitions"
        return self._next("settle", "", reason, is_settled=True, former=())

    def _serve_built(self, building: Building, by: str, reason: str) -> Generations:
        return self._switched(building.generation, building.keep_old_seconds, by, reason)

    def _switched(self, to: int, keep_old_seconds: int, by: str, reason: str) -> Generations:
        return self._next(
            "switch",
            by,
            reason,
            serving=to,
            building=None,
            kept=self.serving,
            kept_until=datetime.now(UTC) + timedelta(seconds=keep_old_seconds),
            keep_old_seconds=keep_old_seconds,
            is_settled=False,
        )

    def _next(self, action: str, by: str, reason: str, **changes: Any) -> Generations:
        after = replace(
            self, number=self.number + 1, action=action, by=by, reason=reason, at=datetime.now(UTC), **changes
        )
        known = after.writable
        return replace(
            after,
            declarations={n: declared for n, declared in after.declarations.items() if n in known},
            serving_since=self.serving_since if after.serving == self.serving else after.number,
        )

    def record(self) -> dict[str, Any]:
        """Returns the Avro record `Generations`."""
        declarations = [{"generation": number, **one.record()} for number, one in self.declarations.items()]
        return {**Struct.record(self), "declarations": declarations}

    @classmethod
    def of(cls, record: Mapping[str, Any], **beside: Any) -> Self:
        """Reads the Avro record `Generations` of a `model`."""
        declarations = {one["generation"]: Declaration.of(one) for one in record["declarations"]}
        return super(Generations, cls).of(record, declarations=declarations, **beside)
