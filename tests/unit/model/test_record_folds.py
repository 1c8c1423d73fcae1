"""`Upsert`: the newest record of a key is its state, in any batches, and supersedes earlier ones that failed."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balance_service import ANY, RECORD_KEY, Count, Emit, ReadModel, Stream, Upsert, col
from balance_service.engine.dead_letter import Status
from balance_service.engine.dead_letters import Letters
from balance_service.errors import ConfigurationError
from balance_service.model.versions import declaration_of
from balance_service.testing import Driver, InputEvent, check_contract, event, tombstone
from tests.support.models import MONEY, ship

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UNKNOWN = "schema-id-unknown"
INCOMPATIBLE = "schema-incompatible"
ARTICLE = ship(
    "Article",
    {"sku": "string", "name": ["null", "string"], "price": MONEY, "tags": {"type": "array", "items": "string"}},
)


class Articles(ReadModel):
    name = "test-articles"
    source = Stream("articles", ARTICLE)
    key = "sku"
    state = ARTICLE
    fold = Upsert(ARTICLE)


@dataclass
class Priced:
    sku: str
    name: str | None


class Listed(ReadModel):
    """Of some fields, in a dataclass; without those that have no name."""

    name = "test-listed"
    source = Stream("articles", ARTICLE)
    key = "sku"
    state = Priced
    fold = Upsert(ARTICLE, where=~col("name").is_null())


class Sent(Articles):
    """Its events are folded one by one."""

    name = "test-articles-sent"
    emits = Emit("articles-changed")


def article(sku: str = "a", name: str | None = "one", unreadable: str | None = None, **more: Any) -> InputEvent:
    fields = {"sku": sku, "name": name, "price": Decimal("1.00"), "tags": ["x"], **more}
    # As in the service, a record that cannot be decoded has Kafka's key.
    return event(ARTICLE, fields, unreadable=unreadable, record_key=sku if unreadable else None)


def named(driver: Driver, sku: str = "a") -> Any:
    found = driver.view(sku)
    return None if found is None else found["name"]


def statuses(driver: Driver) -> list[str]:
    return [letter.status.value for letter in driver.letters()]


@pytest.fixture(params=[False, True], ids=["singly", "combined"])
def articles(request: pytest.FixtureRequest) -> Iterator[Driver]:
    with Driver(Articles, combines_few=request.param) as driver:
        yield driver


# The state


def test_the_newest_record_is_the_state_and_a_tombstone_deletes_it(articles: Driver) -> None:
    articles.given(article(name="one"), article("b"), article(name="two", tags=["y", "z"]), article("c"))
    articles.then({"name": "one", "price": Decimal("1.00"), "tags": ["x"]})
    assert articles.view("a") == {"name": "two", "price": Decimal("1.00"), "tags": ["y", "z"]}

    done = articles.commit([article(name="three"), tombstone("a"), tombstone("b"), tombstone("never"), article("b")])

    assert (named(articles), named(articles, "b"), named(articles, "c")) == (None, "one", "one")
    assert (done.applied, done.deleted, articles.counted) == (5, 1, 2)
    assert articles.restart().view("a") is None
    assert not articles.dead_letters()


def test_a_null_in_the_newest_record_is_its_value(articles: Driver) -> None:
    articles.given(article(name="one"), article(name=None))

    assert articles.view("a") == {"name": None, "price": Decimal("1.00"), "tags": ["x"]}


def test_records_for_which_the_condition_is_not_true_delete_the_state() -> None:
    with Driver(Listed, combines_few=True) as listed:
        listed.given(article(), article("b")).given(article(name=None), article("c", name=None))

        assert (listed.view("a"), listed.view("b"), listed.view("c")) == (None, {"name": "one"}, None)
        assert (listed.counted, listed.dead_letters()) == (1, [])


def test_a_malformed_key_is_a_dead_letter_also_without_a_value(articles: Driver) -> None:
    articles.given(tombstone("line\nbreak"), article("line\nbreak"), article())

    assert [letter.cause for letter in articles.dead_letters()] == ["sku-malformed"] * 2
    assert (named(articles), articles.counted) == ("one", 1)


@pytest.mark.parametrize("model", [Articles, Listed, Sent])
def test_the_contract_holds(model: type[ReadModel]) -> None:
    check_contract(model, seconds=6.0)


def test_the_state_or_its_deletion_is_sent_after_each_record() -> None:
    with Driver(Sent) as sent:
        sent.given(article(name="one"), article(name="two"), tombstone("a"))

        names = [None if record is None else record["name"] for record in sent.emitted("articles-changed")]
        assert names == ["one", "two", None]


def test_a_price_with_more_digits_than_the_schema_has_is_a_dead_letter() -> None:
    with Driver(Articles) as articles:
        articles.given(article(price=Decimal("9" * 16 + ".99")))
        assert articles.view("a")["price"] == Decimal("9" * 16 + ".99")


@dataclass
class Named:
    name: str | None


class Numbered(ReadModel):
    """The key is a long, which is no field of the record."""

    name = "test-numbered"
    source = Stream("articles", Named, key_format="long")
    key = RECORD_KEY
    state = Named
    fold = Upsert(Named)


def test_a_dead_letter_of_a_key_that_is_stored_in_another_form_is_superseded_too() -> None:
    key = (7).to_bytes(8, "big")
    with Driver(Numbered, combines_few=True) as driver:
        letter = InputEvent("Named", {"name": "old"}, key, unreadable=UNKNOWN)
        driver.given(letter).given(InputEvent("Named", {"name": "new"}, key))
        driver.mend(UNKNOWN).advance(minutes=5)

        assert (driver.view("7"), statuses(driver)) == ({"name": "new"}, ["superseded"])
        driver.given(InputEvent("", {}, key))
        assert driver.view("7") is None


# A compacted topic


class Kept(Articles):
    name = "test-articles-kept"
    source = Stream("articles", ARTICLE, compacted=True)


def test_what_compaction_leaves_has_the_same_states() -> None:
    check_contract(Kept, seconds=4.0)
    with Driver(Kept) as kept:
        kept.given(article(name="one"), article("b"), article(name="two"), article("c"), tombstone("c"))
        before = kept.states()

        assert kept.compact().rebuild().states() == before
        assert (named(kept), named(kept, "c"), kept.counted) == ("two", None, 2)


def test_only_a_declared_topic_is_compacted(articles: Driver) -> None:
    with pytest.raises(ValueError, match=r"is not `Stream\(…, compacted=True\)`"):
        articles.compact()


@pytest.mark.shows("newest")
def test_a_dead_letter_whose_record_compaction_removed_is_superseded() -> None:
    with Driver(Kept) as kept:
        kept.given(article(name="old", unreadable=UNKNOWN), article(name="new", unreadable=INCOMPATIBLE))

        kept.compact().mend(UNKNOWN).advance(minutes=5)

        assert (named(kept), statuses(kept)) == (None, ["superseded", "waiting"])
        kept.mend(INCOMPATIBLE).redrive(1)
        assert (named(kept), statuses(kept)) == ("new", ["superseded", "applied"])


def test_a_compacted_source_is_part_of_the_declaration() -> None:
    assert declaration_of(Kept()).fingerprint != declaration_of(Articles()).fingerprint
    assert declaration_of(Kept()).reads == declaration_of(Articles()).reads


# Dead letters


@pytest.mark.shows("newest")
def test_a_dead_letter_is_superseded_by_a_later_record_of_its_key(articles: Driver) -> None:
    articles.given(article(name="old", unreadable=UNKNOWN), article("b", name="old", unreadable=UNKNOWN))
    assert statuses(articles) == ["scheduled"] * 2

    articles.given(article(name="new")).mend(UNKNOWN).advance(minutes=5)

    assert (named(articles), named(articles, "b")) == ("new", "old")
    assert statuses(articles) == ["superseded", "applied"]
    assert articles.letter_counts() == {f"{UNKNOWN}/superseded": 1, f"{UNKNOWN}/applied": 1}


def test_a_later_tombstone_supersedes_too_and_an_earlier_record_does_not(articles: Driver) -> None:
    articles.given(article(), article(name="lost", unreadable=UNKNOWN), tombstone("a"))
    articles.given(article("b"), article("b", name="late", unreadable=UNKNOWN))

    articles.mend(UNKNOWN).advance(minutes=5)

    assert (named(articles), named(articles, "b"), statuses(articles)) == (None, "late", ["superseded", "applied"])


def test_a_dead_letter_of_the_same_batch_is_superseded_by_a_later_record_only(articles: Driver) -> None:
    articles.given(
        article(name="one"),
        article(name="lost", unreadable=INCOMPATIBLE),
        article("b", name="lost", unreadable=INCOMPATIBLE),
        article(name="two"),
        article("b", name="one"),
        article("b", name="late", unreadable=INCOMPATIBLE),
    )

    assert statuses(articles) == ["superseded", "superseded", "waiting"]
    assert [letter.cause for letter in articles.dead_letters()] == [INCOMPATIBLE] * 3
    articles.mend(INCOMPATIBLE).redrive(5)
    assert (named(articles), named(articles, "b"), statuses(articles)[2]) == ("two", "late", "applied")


def test_later_records_do_not_wait_and_dead_letters_are_applied_in_order(articles: Driver) -> None:
    articles.given(article(name="one", unreadable=UNKNOWN), article(name="two", unreadable=UNKNOWN))
    articles.mend(UNKNOWN).advance(minutes=5)

    assert (named(articles), statuses(articles)) == ("two", ["applied", "applied"])


def test_an_earlier_dead_letter_is_superseded_by_the_retry_of_a_later_one(articles: Driver) -> None:
    articles.given(article(name="one", unreadable=INCOMPATIBLE), article(name="two", unreadable=UNKNOWN))
    articles.mend(UNKNOWN).advance(minutes=5)

    assert (named(articles), statuses(articles)) == ("two", ["superseded", "applied"])


def test_a_superseded_record_is_never_applied_also_by_a_rebuild(articles: Driver) -> None:
    articles.given(article("b"), article(name="old", unreadable=UNKNOWN)).given(article(name="new"))

    articles.mend(UNKNOWN).restart().rebuild().advance(minutes=500)

    assert (named(articles), named(articles, "b"), statuses(articles)) == ("new", "one", ["superseded"])


def test_a_rebuild_supersedes_an_open_dead_letter_by_later_records_of_its_batch_only(articles: Driver) -> None:
    articles.given(article(name="one"), article("b"), article(name="late", unreadable=INCOMPATIBLE))
    articles.given(article("b", name="late", unreadable=INCOMPATIBLE))

    articles.mend(INCOMPATIBLE).rebuild()

    assert (named(articles), statuses(articles)) == ("one", ["waiting", "waiting"])
    articles.redrive(2, 3)
    assert (named(articles), named(articles, "b")) == ("late", "late")


def test_closed_dead_letters_are_forgotten(articles: Driver) -> None:
    articles.given(article(name="old", unreadable=UNKNOWN)).given(article())

    assert articles.advance(minutes=8 * 24 * 60).restart().letter_counts() == {}


def test_dead_letters_of_a_version_that_kept_another_order_are_superseded_too() -> None:
    with Driver(Articles) as articles:
        task = articles.last_stage
        codec = task.processor.letters.codec
        object.__setattr__(task.processor, "letters", Letters(codec=codec, every_ms=300_000, keeps_order=True))
        articles.given(article(unreadable=INCOMPATIBLE), article(name="waits"), article("b", unreadable="value-null"))
        assert statuses(articles) == ["waiting", "behind", "waiting"]

        newest = Letters(codec=codec, every_ms=300_000, keeps_newest=True)
        object.__setattr__(task.processor, "letters", newest)
        changes = newest.on_open(task.store)
        assert [letter.status for letter in changes.after.values()] == [Status.SCHEDULED]
        task.store.write(changes.records, 99)
        assert not newest.on_open(task.store).records
        articles.given(article("b", name="new"), article(name="new"))

        assert statuses(articles) == ["superseded"] * 3


@pytest.mark.shows("key-order")
def test_a_version_that_keeps_order_again_waits_behind_the_records_that_block_and_no_others() -> None:
    with Driver(Articles) as articles:
        articles.given(article(unreadable=INCOMPATIBLE), article("b", unreadable="key-malformed"), article("c"))
        task = articles.last_stage
        codec = task.processor.letters.codec
        in_order = Letters(codec=codec, every_ms=300_000, keeps_order=True)
        object.__setattr__(task.processor, "letters", in_order)
        assert in_order.blocked_after(task.store, [b"a", b"b", b"c"], frozenset()) == {b"a": 0, b"b": 1}

        task.store.write(in_order.on_open(task.store).records, 99)

        assert in_order.blocked_after(task.store, [b"a", b"b", b"c"], frozenset()) == {b"a": 0}
        assert not in_order.on_open(task.store).records
        articles.given(article(name="waits"), article("b", name="applied"))
        assert (statuses(articles)[2], named(articles, "b")) == ("behind", "applied")


@pytest.mark.shows("newest")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from(["record", "tombstone", "letter"]), st.booleans()), max_size=14
    ),
    mends_at=st.integers(0, 14),
    combines=st.booleans(),
)
def test_the_newest_record_that_can_be_applied_is_the_state(
    steps: Sequence[tuple[str, str, bool]], mends_at: int, combines: bool
) -> None:
    """Records of two keys in some batches. Once dead letters are mended, the newest record of each key is its state."""
    with Driver(Articles, combines_few=combines) as driver:
        batch: list[InputEvent] = []
        newest: dict[str, str | None] = {}
        for number, (sku, kind, ends) in enumerate(steps):
            is_letter = kind == "letter" and number < mends_at
            newest[sku] = None if kind == "tombstone" else str(number)
            cause = UNKNOWN if is_letter else None
            batch.append(tombstone(sku) if kind == "tombstone" else article(sku, str(number), cause))
            if ends:
                driver.given(*batch)
                batch = []
            if number == mends_at:
                driver.mend(UNKNOWN).advance(minutes=5)
        driver.given(*batch).mend(UNKNOWN).advance(minutes=6_000)

        assert {sku: named(driver, sku) for sku in newest} == newest
        driver.rebuild().advance(minutes=6_000)
        assert {sku: named(driver, sku) for sku in newest} == newest


# Declarations


def refusal(**members: Any) -> str:
    attributes = {"name": "test-refused", "source": Articles.source, "key": "sku", "state": ARTICLE}
    with pytest.raises(ConfigurationError) as refused:
        type("Refused", (ReadModel,), {**attributes, "fold": Upsert(ARTICLE), **members})()
    return str(refused.value)


OTHER = ship("ArticleKept", {"sku": "string", "name": "string"})
ODD = ship("ArticleOdd", {"sku": "string", "weight": "long"})
SHORT = ship("ArticleShort", {"sku": "string", "price": {**MONEY, "precision": 6}})


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"source": Stream("articles", ARTICLE).by("name")}, "no step of its source"),
        ({"sources": (Articles.source,), "source": None}, "both `source` and `sources`"),
        ({"source": Stream("articles", ARTICLE, "FundsAdded")}, "must be of that record, and no other"),
        ({"fold": Upsert("FundsAdded")}, "has the fold Upsert of FundsAdded: its source must be"),
        ({"fold": Upsert(f"{ARTICLE}.name")}, "name the record without a column"),
        ({"fold": Upsert(ARTICLE, where=col("weight") > 1)}, "a condition on 'weight'"),
        ({"count": Count(ARTICLE)}, "and folds of its fields"),
        ({"fold": Articles.fold, "name_": Upsert(ARTICLE)}, "name Upsert as the model's `fold`"),
        ({"order": ANY}, "and an `order`"),
        ({"source": Kept.source, "emits": Emit("changed")}, "its source is compacted: a record that compaction"),
        ({"source": Kept.source.by("name")}, "compacted=True, and a step"),
        ({"source": Kept.source, "fold": lambda *_: None}, "and for no other"),
        ({"state": OTHER}, "the state has 'name': it may be null"),
        ({"state": ODD}, "the state has 'weight', and the record has no such column; it has sku, name, price"),
        ({"state": SHORT}, "keeps every digit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_declaration_is_refused(members: dict[str, Any], why: str) -> None:
    assert why in refusal(**members)


def test_a_fold_takes_the_dataclass_of_its_record_and_nothing_else() -> None:
    assert Upsert(Priced) == Upsert("Priced")
    with pytest.raises(TypeError, match="neither the simple name of a record nor a dataclass"):
        Upsert(3)  # type: ignore[arg-type]


def test_the_condition_is_part_of_the_declaration() -> None:
    other = type("Listed", (Listed,), {"fold": Upsert(ARTICLE, where=col("name") != "x")})

    assert declaration_of(Listed()).fingerprint != declaration_of(other()).fingerprint
