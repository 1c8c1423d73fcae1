"""The properties file: Java's format, read as Java reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from balance_service.settings.kafka_properties import parse_json, read_file

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, text: str) -> dict[str, str]:
    file = folder / "kafka.properties"
    file.write_text(text, encoding="utf-8", newline="")
    return read_file(file)


@pytest.mark.parametrize(
    "line",
    ["sasl.password=a b", "sasl.password = a b", "  sasl.password: a b", "sasl.password a b", "sasl.password\ta b"],
)
def test_name_and_value_are_parted_as_in_java(tmp_path: Path, line: str) -> None:
    assert read(tmp_path, line) == {"sasl.password": "a b"}


def test_comments_and_empty_lines_say_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "# a=b\r\n\r\n  ! c=d\n   \na=1\rb=2") == {"a": "1", "b": "2"}


def test_a_value_may_hold_separators_and_comment_signs(tmp_path: Path) -> None:
    assert read(tmp_path, "a=x=y:z # w!\nb=\n") == {"a": "x=y:z # w!", "b": ""}


def test_a_backslash_escapes_and_continues(tmp_path: Path) -> None:
    text = r"""a=one\
      two
b=back\\slash
c=\u00e9\n\t\"
d=ends in \\
e=1"""

    assert read(tmp_path, text) == {"a": "onetwo", "b": "back\\slash", "c": 'é\n\t"', "d": "ends in \\", "e": "1"}


def test_a_separator_of_unicode_ends_no_line(tmp_path: Path) -> None:
    assert read(tmp_path, "a=x\u2028y\x0bz\n") == {"a": "x\u2028y\x0bz"}


@pytest.mark.parametrize("text", ["a=1\nhunter2\n", "a=1\n=hunter2\n", "a=1\nhunter2\\\n"])
def test_a_line_that_is_no_property_is_named_by_its_number_and_not_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"line 2 of .*kafka\.properties is not name=value") as caught:
        read(tmp_path, text)

    assert "hunter2" not in str(caught.value)


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a twice; keep one"):
        read(tmp_path, "a=1\na=2")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"a=\xff")

    with pytest.raises(ValueError, match="is not UTF-8"):
        read_file(tmp_path / "k")


def test_json_is_told_as_librdkafka_wants_it() -> None:
    assert parse_json('{"a": true, "b": 1.5, "c": "X"}') == {"a": "true", "b": "1.5", "c": "X"}
