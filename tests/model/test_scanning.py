"""Reading JSON without building it: what a text, a list and an object are, and what is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.model.scanning import MOST_SKIPPED, Scanner


class RefusedError(Exception):
    """The scanner found something wrong."""


def refuse(why: str) -> NoReturn:
    raise RefusedError(why)


def scanner(text: str | bytes) -> Scanner:
    return Scanner(text.encode() if isinstance(text, str) else text, refuse)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.text(), st.booleans())
def test_any_text_is_read_however_it_is_written(text: str, ascii_only: bool) -> None:
    try:
        raw = json.dumps(text, ensure_ascii=ascii_only).encode()
        text.encode()
    except UnicodeEncodeError:
        return  # half of a pair of surrogates is none
    found = scanner(b" \n" + raw)
    assert found.text() == text
    found.end()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no whole text at byte 0"),
        (b"  1", "no whole text at byte 0"),
        (b'"open', "no whole text"),
        (b'"a\nb"', "no whole text"),
        (b'"ends with\\"', "no whole text"),
        (b'"\xff"', "no UTF-8"),
        (b'"\xed\xa0\x80"', "no UTF-8"),
        (b'"\\ud800"', "no UTF-8"),
        (b'"\\x41"', "unknown escape"),
        (b'"\\u12"', "unknown escape"),
    ],
)
def test_what_is_no_text_is_refused(raw: bytes, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        scanner(raw).text()


def test_a_sign_is_taken_only_where_it_is_next() -> None:
    found = scanner(" \t\r\n [ {")
    assert found.sees(b"[") and not found.sees(b"{")
    assert not found.finds(b"{")
    assert found.finds(b"[")
    found.take(b"{")
    found.end()
    with pytest.raises(RefusedError, match="} is missing at byte 8"):
        found.take(b"}")


def test_nothing_may_follow_the_end() -> None:
    scanner(" \n ").end()
    with pytest.raises(RefusedError, match="follows its end, at byte 2"):
        scanner("  x").end()


# Objects -----------------------------------------------------------------------------------------


def members(raw: str | bytes, most: int = 9) -> dict[str, tuple[int, ...] | None]:
    found = scanner(raw)
    read = {name: found.numbers(9) for name in found.members(most)}
    found.end()
    return read


def test_the_members_of_an_object_come_in_their_order() -> None:
    assert members("{}") == members(" { } ") == {}
    assert list(members('{"b": [1], "a" : [] , "c":[2,3]}').items()) == [
        ("b", (1,)),
        ("a", ()),
        ("c", (2, 3)),
    ]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ("[]", "{ is missing at byte 0"),
        ("{", "no whole text"),
        ("{1:[]}", "no whole text"),
        ('{"a"[]}', ": is missing"),
        ('{"a":[]', "',' or '}' is missing"),
        ('{"a":[] "b":[]}', "',' or '}' is missing"),
        ('{"a":[],}', "no whole text"),
        ('{"a":[],"a":[]}', "a name occurs twice"),
        ('{"a":[],"\\u0061":[]}', "a name occurs twice"),
    ],
)
def test_what_is_no_object_is_refused(raw: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        members(raw)


def test_an_object_has_as_many_members_as_it_may() -> None:
    assert len(members('{"a":[],"b":[]}', most=2)) == 2
    with pytest.raises(RefusedError, match="more than 1 members"):
        members('{"a":[],"b":[]}', most=1)


# Numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("[]", ()),
        (" [ \n ] ", ()),
        ("[0]", (0,)),
        ("[ 1 ,\t20,3 ]", (1, 20, 3)),
        (f"[{2**63 - 1}]", (2**63 - 1,)),
        (f"[{2**63}]", None),
        ("[01]", None),
        ("[-1]", None),
        ("[1.0]", None),
        ("[1e3]", None),
        ("[1,]", None),
        ("[,1]", None),
        ("[1 2]", None),
        ("[[1]]", None),
        ("[true]", None),
        ("[9999999999999999999]", None),
        ("[99999999999999999999]", None),
        ('"[1]"', None),
        ("{}", None),
        ("[1", None),
        ("", None),
    ],
)
def test_a_list_of_sizes_and_nothing_else(raw: str, expected: tuple[int, ...] | None) -> None:
    assert scanner(raw).numbers(9) == expected


def test_a_list_has_as_many_numbers_as_it_may() -> None:
    assert scanner("[1,2,3]").numbers(3) == (1, 2, 3)
    assert scanner("[1,2,3]").numbers(2) is None


# Passing over ------------------------------------------------------------------------------------


@given(ANY_JSON)
def test_any_value_is_passed_over_to_its_end(value: Any) -> None:
    raw = json.dumps(value)
    try:
        raw = json.dumps(value, ensure_ascii=False)
        raw.encode()
    except UnicodeEncodeError:
        return
    found = scanner(f" {raw} ,")
    found.skip()
    assert found.finds(b",")
    found.end()


@pytest.mark.parametrize("raw", ["", "]", "}", "[", "[1", '["open]', "{]x", ",", ":"])
def test_what_has_no_end_is_not_passed_over(raw: str) -> None:
    found = scanner(raw)
    with pytest.raises(RefusedError):
        found.skip()
        found.end()


def test_no_nesting_is_too_deep_and_none_is_without_end() -> None:
    deep: Callable[[int], str] = lambda depth: "[" * depth + "]" * depth  # noqa: E731
    found = scanner(deep(MOST_SKIPPED // 2))
    found.skip()
    found.end()
    with pytest.raises(RefusedError, match="too much to read"):
        scanner(deep(MOST_SKIPPED // 2 + 1)).skip()


@pytest.mark.parametrize("number", [0, 17, 2**63 - 1])
def test_scanner_number_is_read(number: int) -> None:
    assert scanner(str(number)).number() == number


@pytest.mark.parametrize("raw", ["-1", '"1"', str(2**63), ""])
def test_scanner_other_number_is_refused(raw: str) -> None:
    with pytest.raises(RefusedError, match="no whole number at byte"):
        scanner(raw).number()


# Objects of texts, read at once -------------------------------------------------------------------


def one_by_one(raw: bytes) -> dict[str, str]:
    """An object of texts, as it is read where it is not read at once."""
    read = scanner(raw)
    found = {name: read.text() for name in read.members(100)}
    read.end()
    return found


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=9), st.booleans())
def test_texts_read_at_once_are_those_read_one_by_one(
    texts: dict[str, str], ascii_only: bool
) -> None:
    try:
        raw = json.dumps(texts, ensure_ascii=ascii_only, separators=(",", ":")).encode()
        json.dumps(texts, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert one_by_one(raw) == texts
    read = scanner(raw)
    found = read.texts(100)
    assert found == texts or (found is None and b"\\" in raw)
    if found is None:
        assert read.sees(b"{"), "nothing was read"
    else:
        read.end()


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":"1","a":"2"}',
        b'{"a":1}',
        b'{"a":"1"',
        b'{"a":"1",}',
        rb'{"a":"\ud83d"}',
        rb'{"a":"\x41"}',
        b'{"a":"\xff"}',
        b'{"a" : "1"}',
        b'{"a":"' + b"b" * 70_000 + b'"}',
        b"{" + b",".join(b'"%d":""' % i for i in range(70)) + b"}",
    ],
)
def test_texts_that_need_a_closer_look_are_not_read_at_once(raw: bytes) -> None:
    read = scanner(raw)
    assert read.texts(1000) is None
    assert read.sees(b"{"), "nothing was read"


def test_texts_are_no_more_than_may_be() -> None:
    assert scanner(b'{"a":"1","b":"2"}').texts(2) == {"a": "1", "b": "2"}
    assert scanner(b'{"a":"1","b":"2"}').texts(1) is None


@pytest.mark.parametrize("spaces", [0, 1, 4096, 4097, 10_000])
@pytest.mark.parametrize("rest", [b"", b"x", b"\n"])
def test_end_is_after_spaces_only(spaces: int, rest: bytes) -> None:
    read = scanner(b"[]" + b" " * spaces + rest)
    assert read.numbers(1) == ()
    if rest == b"x":
        with pytest.raises(RefusedError, match="something follows its end"):
            read.end()
    else:
        read.end()
