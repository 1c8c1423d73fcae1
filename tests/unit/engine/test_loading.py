"""A store is loaded from files part by part: a kill costs one part, other files none of their records, and the end is
the position of the files."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import structlog

from balance_service.engine.commit import write_position
from balance_service.engine.dead_letter import Letter, Status
from balance_service.engine.hosted_generations import HostedGenerations
from balance_service.engine.loading import loads, require_loaded
from balance_service.engine.records import POSITION_KEY, RESERVED_PREFIX, Loading, Position
from balance_service.engine.replica import Restoration
from balance_service.engine.schema_records import NO_SCHEMAS
from balance_service.engine.store import StateStore
from balance_service.errors import RetriableError, StoreFullError, TaskHaltedError
from balance_service.kafka.topics import Topic
from balance_service.model.generations import Generations, Load, Switch
from balance_service.process import failpoints
from balance_service.read_models.balance import Balance
from balance_service.settings import load_settings
from balance_service.testing.fakes import FakeWriter
from tests.support.fakes import DECLARED
from tests.support.loads import folder_of, write_folder
from tests.unit.engine.test_commit import FOLDING, POSITIONS, STATES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from balance_service.engine.hosted_stage import HostedStage
    from balance_service.engine.records import Record

STAGE = Balance().stages[-1].of_generation(2)
SOURCE = Topic(STAGE.source, "the source", 1)
SETTINGS = load_settings()
REACHED = 1000
MARKER = RESERVED_PREFIX + b"once-by-name0123456789abcdef"
BEGUN = Position(0, 3, SOURCE.topic_id, changelog_topic_id="log", source="balance:0", owner=STAGE.mark)


def states(count: int, start: int = 0) -> list[Record]:
    return [(b"c%06d" % number, b"state %d" % number) for number in range(start, start + count)]


FILES = [[*states(5), (MARKER, b"a marker")], states(4, 5)]
ALL = dict(record for file in FILES for record in file)


class Sender(SimpleNamespace):
    """The view of the generation that sends."""

    def scan(self, start: bytes, *_: object) -> Sequence[tuple[bytes, bytes]]:
        found = [(b"\xffletter-at" + one.offset.to_bytes(8, "big"), one) for one in self.letters]
        codec = FOLDING.letters.codec
        return [(key, codec.encode(one.record())) for key, one in found if key >= start]


def sender(offset: int = REACHED, *some: Letter) -> Any:
    counts = {one.counter: 1 for one in some}
    return Sender(position=Position(offset, 1, SOURCE.topic_id, letters=counts), letters=some)


class Loaded:
    """A task's store that is loaded from files, again after each kill."""

    def __init__(self, tmp_path: Path) -> None:
        self.files = tmp_path / "files"
        self.path = tmp_path / "balance.g2_0"
        self.digest = self.write()
        self.writer: Any = FakeWriter()
        self.sender: Any = sender()
        self.is_loaded_at_all = True
        self.store = StateStore(self.path, POSITIONS)

    def write(self, **changed: Any) -> str:
        given = {
            "source_topic_id": SOURCE.topic_id,
            "state_schema_id": STATES.schema_id,
            "partitions": [(REACHED, FILES)],
            "keys": [9],
            **changed,
        }
        return write_folder(self.files, STAGE, SETTINGS, DECLARED, **given).digest

    @property
    def generations(self) -> Generations:
        load = Load(2, str(self.files), self.digest) if self.is_loaded_at_all else None
        return Generations("balance").begun(DECLARED).rebuilt(DECLARED, Switch.NEVER, 60, None, "", "", load)

    def steps(self) -> Iterator[None] | None:
        hosted = HostedGenerations(lambda: self.generations)
        tasks = SimpleNamespace(task=lambda _partition: SimpleNamespace(sends=True, last_view=self.sender))
        if self.sender is not None:
            hosted.add(1, cast("Any", tasks))
        context = SimpleNamespace(
            name=STAGE.name,
            stage=STAGE,
            processor=FOLDING,
            generations=hosted,
            schemas=NO_SCHEMAS,
            settings=SETTINGS,
            source=SOURCE,
            partitioner="murmur2",
        )
        self.progress = Restoration(structlog.get_logger())
        found = cast("HostedStage", context)
        return loads(found, 0, self.store, self.writer, BEGUN, self.progress)

    def load(self) -> None:
        for _ in self.steps() or ():
            pass

    def killed_after(self, steps: int) -> None:
        """The process dies after some steps of a load, and another one opens the store."""
        going = self.steps()
        assert going is not None
        for _ in range(steps):
            next(going)
        del going
        self.reopen()

    def reopen(self) -> None:
        self.store.close()
        self.store = StateStore(self.path, POSITIONS)
        # The new task has fenced the old one.
        self.writer.is_closed = False

    @property
    def content(self) -> dict[bytes, bytes | None]:
        keys = self.store.recorded_keys(b"", 1000)
        return dict(zip(keys, self.store.get_many(keys), strict=True))

    @property
    def changelog(self) -> dict[bytes, bytes | None]:
        """The records of the changelog once it is compacted."""
        written = {key: value for records, _, _ in self.writer.commits for key, value in records}
        return {key: value for key, value in written.items() if value is not None}

    @property
    def positions(self) -> list[Position]:
        return [Position.of(POSITIONS.decode(frame)) for _, _, frame in self.writer.commits]


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Loaded]:
    failpoints.arm("parts=2")
    one = Loaded(tmp_path)
    yield one
    one.store.close()
    failpoints.arm("")


@pytest.mark.shows("load")
def test_a_store_has_all_records_of_the_files_and_their_position(loaded: Loaded) -> None:
    loaded.load()

    assert loaded.content == loaded.changelog == ALL
    assert loaded.store.position == replace(BEGUN, offset=REACHED, keys=9)
    assert loaded.store.loading is None
    assert [position.loading is None for position in loaded.positions] == [False] * (len(loaded.positions) - 1) + [True]
    assert (loaded.progress.to_restore, loaded.progress.restored) == (10, 10)


@pytest.mark.shows("load")
def test_the_first_record_and_the_end_of_each_part_say_that_the_store_is_loaded(loaded: Loaded) -> None:
    going = loaded.steps()
    assert going is not None
    seen = []
    for _ in going:
        position = loaded.store.loading
        assert position is not None
        seen.append(position.loading)
        # Nothing takes it for a place where events are folded.
        assert (loaded.store.position, loaded.store.view and loaded.store.view.position) == (None, None)
        with pytest.raises(RetriableError, match="part of the files"):
            require_loaded(loaded.store)

    assert seen[:3] == [
        Loading(loaded.digest),
        Loading(loaded.digest, 0, b"c000001\0"),
        Loading(loaded.digest, 0, b"c000003\0"),
    ]
    require_loaded(loaded.store)


@pytest.mark.shows("load")
@pytest.mark.parametrize("steps", range(1, 7))
def test_a_load_that_was_cut_off_goes_on_behind_its_last_part(loaded: Loaded, steps: int) -> None:
    loaded.killed_after(steps)
    before = len(loaded.writer.commits)
    loaded.load()

    assert loaded.content == loaded.changelog == ALL
    assert loaded.store.position == replace(BEGUN, offset=REACHED, keys=9)
    # No record twice: the first one of the rest is the load's own.
    again = [key for records, _, _ in loaded.writer.commits[before:] for key, _ in records]
    first = [key for records, _, _ in loaded.writer.commits[:before] for key, _ in records]
    assert sorted([*first, *again]) == sorted(ALL)
    assert loaded.progress.restored == len(again)


@pytest.mark.shows("load")
@pytest.mark.parametrize("stays", [True, False], ids=["other files", "no files"])
def test_what_was_loaded_from_other_files_is_deleted(loaded: Loaded, *, stays: bool) -> None:
    loaded.killed_after(3)
    assert loaded.content
    loaded.digest = loaded.write(keys=[8])
    loaded.is_loaded_at_all = stays
    deleting = loaded.steps()
    assert deleting is not None
    next(deleting)
    # A kill amid the deletion.
    del deleting
    loaded.reopen()
    loaded.load()

    assert loaded.content == loaded.changelog == (ALL if stays else {})
    assert loaded.store.position == (replace(BEGUN, offset=REACHED, keys=8) if stays else None)
    # It may be folded from the beginning.
    require_loaded(loaded.store)


def test_a_store_with_a_position_is_not_loaded(loaded: Loaded) -> None:
    write_position(replace(BEGUN, offset=5), POSITIONS, loaded.store, loaded.writer)

    assert loaded.steps() is None


def test_a_store_of_a_generation_without_files_is_not_loaded(loaded: Loaded) -> None:
    loaded.is_loaded_at_all = False

    assert loaded.steps() is None


def cut(loaded: Loaded) -> None:
    path = next((loaded.files / STAGE.application_id / "balance.g2" / "partition-00000").iterdir())
    path.write_bytes(path.read_bytes()[:-1])


def alter(loaded: Loaded) -> None:
    path = next((loaded.files / STAGE.application_id / "balance.g2" / "partition-00000").iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(loaded: Loaded) -> None:
    next((loaded.files / STAGE.application_id / "balance.g2" / "partition-00000").iterdir()).unlink()


def remove_all(loaded: Loaded) -> None:
    folder_of(loaded.files, STAGE).delete()


def make_anew(loaded: Loaded) -> None:
    """The same records, made by another job."""
    loaded.write(keys=[8])


def alter_manifest(loaded: Loaded) -> None:
    path = loaded.files / STAGE.application_id / "balance.g2" / "manifest.json"
    record = json.loads(path.read_text())
    record["partitions"][0]["position"] += 1
    path.write_text(json.dumps(record, indent=1, sort_keys=True))


def of_another_source(loaded: Loaded) -> None:
    loaded.digest = loaded.write(source_topic_id="recreated")


def of_another_schema(loaded: Loaded) -> None:
    loaded.digest = loaded.write(state_schema_id=77)


@pytest.mark.shows("load")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "part-.* is cut or altered: run the rebuild again"),
        (alter, "part-.* is cut or altered: run the rebuild again"),
        (remove, "part-.* is missing: run the rebuild again"),
        (remove_all, r"manifest.json is missing: run the rebuild again"),
        (make_anew, r"another job has replaced the files; run the rebuild again"),
        (alter_manifest, r"manifest.json has digest .* and the rebuild began with"),
        (of_another_source, "its id of the source topic is 'recreated', and here it is 'the source'; run the rebuild"),
        (of_another_schema, "its states are of schema 77 of the registry"),
    ],
)
def test_files_that_are_not_what_the_rebuild_began_with_are_refused(loaded: Loaded, damage: Any, said: str) -> None:
    damage(loaded)

    with pytest.raises(TaskHaltedError, match=said):
        loaded.load()
    assert loaded.store.position is None


def test_a_full_disk_is_noticed_before_a_part_is_written(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    going = loaded.steps()
    assert going is not None
    next(going)
    commits = len(loaded.writer.commits)

    def full(*_: object, serves: bool = True) -> None:
        assert not serves
        raise StoreFullError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(StateStore, "require_room", full)
        with pytest.raises(StoreFullError):
            next(going)
    assert len(loaded.writer.commits) == commits
    loaded.reopen()
    loaded.load()
    assert loaded.content == ALL


@pytest.mark.parametrize("behind", [None, REACHED - 1])
def test_it_waits_for_the_generation_that_sends(loaded: Loaded, behind: int | None) -> None:
    loaded.sender = None if behind is None else sender(behind)

    with pytest.raises(RetriableError, match="waits for the generation that sends, which"):
        loaded.load()
    # All records are there, and it is still no state of the source.
    assert loaded.content == ALL
    assert loaded.store.position is None
    loaded.sender = sender()
    loaded.reopen()
    loaded.load()
    assert loaded.store.position is not None


@pytest.mark.parametrize(
    ("status", "is_refused"),
    [(Status.SCHEDULED, True), (Status.DISCARDED, True), (Status.APPLIED, False), (Status.SUPERSEDED, False)],
)
def test_files_that_apply_a_record_which_the_sending_generation_leaves_out_are_refused(
    loaded: Loaded, status: Status, *, is_refused: bool
) -> None:
    letter = replace(Letter.first(7, "schema-id-unknown", b"k", 0, 300_000), status=status)
    loaded.sender = sender(REACHED + 5, letter, replace(letter, offset=REACHED + 1))

    with pytest.raises(TaskHaltedError, match=r"offset 7 of .*-0 is a dead letter") if is_refused else nullcontext():
        loaded.load()
    assert (loaded.store.position is None) is is_refused


def test_a_crash_after_the_ingestion_leaves_a_store_that_is_known_to_be_ahead(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    going = loaded.steps()
    assert going is not None
    next(going)
    offset = loaded.store.changelog_offset

    class DiedError(Exception):
        pass

    def die(name: str) -> None:
        if name == "part-ingested":
            raise DiedError

    with monkeypatch.context() as patched:
        patched.setattr("balance_service.engine.store.failpoint", die)
        with pytest.raises(DiedError):
            next(going)
    loaded.reopen()

    assert loaded.store.changelog_offset == offset
    assert loaded.store.written_up_to > offset
    assert loaded.store.get_many([POSITION_KEY]) != [None]
    # The opening replays the rest of the changelog.
    records, _, frame = loaded.writer.commits[-1]
    loaded.store.apply([*records, (POSITION_KEY, frame)], loaded.store.written_up_to)
    loaded.load()
    assert loaded.content == ALL
