"""Dead letters in the console: they are listed, redriven and discarded, and the history has each decision."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.e2e.dead_letters import PoisonWriter, customer_in, decide, letter, wait_for
from tests.support.service import (
    amount_of,
    ask_again,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from balance_service.devtools.local.stack import LocalInstance
    from tests.browser.chromium import View

    Pair = tuple[LocalInstance, LocalInstance]


def show_letters(page: Page, *, cause: str) -> None:
    page.locator("nav").get_by_role("link", name="Dead letters", exact=True).click()
    page.locator("#letters-model").select_option("balance")
    page.locator("#letters-cause").select_option(cause)


def test_dead_letters_are_discarded_after_a_preview_a_reason_and_a_confirmation(
    view: View, pair: Pair, garbage: list[str]
) -> None:
    page = view.page
    view.wait_for_text("needs", "8 dead letters need you")
    show_letters(page, cause="magic-byte-unknown")
    expect(page.locator("#letters-list tbody tr")).to_have_count(4)

    page.get_by_role("button", name=garbage[0], exact=True).click()
    shown = page.locator("#letter")
    expect(shown).to_contain_text("garbage 0")
    expect(shown).to_contain_text("till-7")
    expect(shown).to_contain_text("What to do: The record has fewer than 5 bytes, or does not begin with 0.")
    expect(shown).to_contain_text("Redrive is refused. Discard it and produce a correct event.")
    expect(shown).to_contain_text(re.compile(r"Record's time\s*\d+ s ago|Record's time\s*[\d.]+ (s|min)"))
    # The page does not offer a decision that would be refused.
    expect(shown.get_by_role("button", name="Redrive …")).to_have_count(0)
    expect(page.get_by_role("button", name="Redrive all that match …")).to_be_hidden()
    expect(shown.locator("pre.bytes")).to_contain_text("67 61 72 62 61 67 65 20 30")

    page.get_by_role("button", name="Discard all that match …").click()
    dialog = page.get_by_role("dialog", name="Discard dead letters")
    expect(dialog).to_contain_text("4 dead letters that match. Records will never be applied")
    expect(dialog).to_contain_text("balance: magic-byte-unknown, waiting: 4")
    do = dialog.get_by_role("button", name="Discard 4 dead letters")
    expect(do).to_be_disabled()
    dialog.get_by_label("Reason, which is stored").fill("a broken till")
    expect(do).to_be_disabled()
    dialog.get_by_label("I know that discarded records").check()
    expect(dialog.locator(".command code")).to_have_text(
        "balance-service dead-letters discard --model balance --cause magic-byte-unknown "
        f"--reason 'a broken till' --url {pair[0].url}"
    )
    do.click()
    expect(dialog).to_contain_text("4 discarded.")
    dialog.get_by_role("button", name="Close").click()
    wait_for(pair[0], "discarded", *garbage[:4])
    view.wait_for_text("needs", "4 dead letters need you")
    expect(page.locator("#letters-list tbody tr").first).to_contain_text("discarded")


@pytest.mark.parametrize(
    ("verb", "listed", "more", "is_offered"),
    [
        ("redrive", [("a", "waiting", "never")], [("a", "waiting")], False),
        ("redrive", [("a", "waiting", "never")], [("a", "waiting"), ("b", "waiting")], True),
        ("redrive", [("a", "waiting", "never")], [("b", "behind")], False),
        ("redrive", [("a", "waiting", "never"), ("b", "parked", "")], [], True),
        ("redrive", [("b", "applied", "it is applied already")], [("b", "parked")], True),
        ("discard", [("a", "waiting", "never")], [], True),
        ("discard", [("a", "discarded", "it is discarded already")], [("a", "behind")], True),
        ("discard", [("a", "discarded", "it is discarded already")], [], False),
        ("discard", [("a", "waiting", "never", "a rebuild applies it")], [("a", "waiting")], False),
        ("discard", [("a", "waiting", "never", "a rebuild applies it")], [("b", "waiting")], True),
    ],
)
def test_what_would_be_refused_or_is_warned_of_is_not_offered_for_those_beyond_the_list_either(
    view: View, verb: str, listed: list[tuple[str, ...]], more: list[tuple[str, str]], *, is_offered: bool
) -> None:
    given = [
        verb,
        [dict(zip(("cause", "status", "redriveRefused", "discardWarning"), one, strict=False)) for one in listed],
        [dict(zip(("cause", "status"), one, strict=True)) for one in more],
    ]
    offered = "async (given) => (await import('/console/decide.js')).isOffered(...given)"

    assert view.page.evaluate(offered, given) is is_offered


def test_dead_letters_that_can_be_applied_are_redriven(view: View, pair: Pair, poison: PoisonWriter) -> None:
    customer, schema_id = customer_in(0), poison.unknown_id()
    unknown = poison.put_unknown(schema_id, customer, "5.00")
    letter(pair[0], unknown)
    show_letters(view.page, cause="schema-id-unknown")
    row = view.page.locator("#letters-list tbody tr").filter(has_text=unknown)
    expect(row).to_contain_text("scheduled")
    expect(view.page.locator("#causes tr").filter(has_text="schema-id-unknown").first).to_contain_text("1")

    poison.make_known(schema_id)
    row.get_by_role("checkbox").check()
    view.page.get_by_role("button", name="Redrive selected …").click()
    dialog = view.page.get_by_role("dialog", name="Redrive dead letters")
    expect(dialog).to_contain_text("1 dead letter. Records are applied again")
    dialog.get_by_label("Reason, which is stored").fill("the schema is registered")
    dialog.get_by_role("button", name="Redrive 1 dead letter").click()
    expect(dialog).to_contain_text("1 tried again")
    dialog.get_by_role("button", name="Close").click()
    expect(row).to_contain_text("applied")
    assert str(amount_of(ask_again(pair[0].url, customer))) == "5.00"


def test_the_history_shows_who_decided_what_and_why(view: View, pair: Pair, garbage: list[str]) -> None:
    answered = decide(pair[0], "discard", garbage[0], reason="a broken till of the history")
    assert answered.status_code == 202

    view.open("History")
    row = view.page.locator("#history-list tbody tr").filter(has_text=garbage[0])
    expect(row).to_contain_text("a broken till of the history")
    expect(row).to_contain_text("127.0.0.1")
    expect(row).to_contain_text("its cause was magic-byte-unknown")
