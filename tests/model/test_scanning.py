"""Reading JSON without building it: valid and malformed texts, lists and objects."""

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
def test_text_in_any_notation_is_read(text: str, ascii_only: bool) -> None:
    try:
        raw = json.dumps(text, ensure_ascii=ascii_only).encode()
        text.encode()
    except UnicodeEncodeError:
        return  # half of a surrogate pair is not text
    found = scanner(b" \n" + raw)
    assert found.text() == text
    found.end()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "no complete string at byte 0"),
        (b"  1", "no complete string at byte 0"),
        (b'"open', "no complete string"),
        (b'"a\nb"', "no complete string"),
        (b'"ends with\\"', "no complete string"),
        (b'"\xff"', "not valid UTF-8"),
        (b'"\xed\xa0\x80"', "not valid UTF-8"),
        (b'"\\ud800"', "not valid UTF-8"),
        (b'"\\x41"', "unknown escape"),
        (b'"\\u12"', "unknown escape"),
    ],
)
def test_malformed_text_raises(raw: bytes, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        scanner(raw).text()


def test_sign_is_taken_only_when_next() -> None:
    found = scanner(" \t\r\n [ {")
    assert found.peek(b"[") and not found.peek(b"{")
    assert not found.accept(b"{")
    assert found.accept(b"[")
    found.expect(b"{")
    found.end()
    with pytest.raises(RefusedError, match="} is missing at byte 8"):
        found.expect(b"}")


def test_trailing_data_raises() -> None:
    scanner(" \n ").end()
    with pytest.raises(RefusedError, match="extra data at byte 2"):
        scanner("  x").end()


# Objects -----------------------------------------------------------------------------------------


def members(raw: str | bytes, most: int = 9) -> dict[str, tuple[int, ...] | None]:
    found = scanner(raw)
    read = {name: found.numbers(9) for name in found.members(most)}
    found.end()
    return read


def test_object_members_come_in_order() -> None:
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
        ("{", "no complete string"),
        ("{1:[]}", "no complete string"),
        ('{"a"[]}', ": is missing"),
        ('{"a":[]', "',' or '}' is missing"),
        ('{"a":[] "b":[]}', "',' or '}' is missing"),
        ('{"a":[],}', "no complete string"),
        ('{"a":[],"a":[]}', "a name occurs twice"),
        ('{"a":[],"\\u0061":[]}', "a name occurs twice"),
    ],
)
def test_malformed_object_raises(raw: str, why: str) -> None:
    with pytest.raises(RefusedError, match=why):
        members(raw)


def test_object_with_the_most_members_is_read() -> None:
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
def test_list_of_sizes_alone_is_read(raw: str, expected: tuple[int, ...] | None) -> None:
    assert scanner(raw).numbers(9) == expected


def test_list_with_the_most_numbers_is_read() -> None:
    assert scanner("[1,2,3]").numbers(3) == (1, 2, 3)
    assert scanner("[1,2,3]").numbers(2) is None


# Skipping ----------------------------------------------------------------------------------------


@given(ANY_JSON)
def test_any_value_is_skipped_to_its_end(value: Any) -> None:
    raw = json.dumps(value)
    try:
        raw = json.dumps(value, ensure_ascii=False)
        raw.encode()
    except UnicodeEncodeError:
        return
    found = scanner(f" {raw} ,")
    found.skip()
    assert found.accept(b",")
    found.end()


@pytest.mark.parametrize("raw", ["", "]", "}", "[", "[1", '["open]', "{]x", ",", ":"])
def test_unterminated_value_raises(raw: str) -> None:
    found = scanner(raw)
    with pytest.raises(RefusedError):
        found.skip()
        found.end()


def test_nesting_is_skipped_up_to_its_limit() -> None:
    deep: Callable[[int], str] = lambda depth: "[" * depth + "]" * depth  # noqa: E731
    found = scanner(deep(MOST_SKIPPED // 2))
    found.skip()
    found.end()
    with pytest.raises(RefusedError, match="is too large"):
        scanner(deep(MOST_SKIPPED // 2 + 1)).skip()


@pytest.mark.parametrize("number", [0, 17, 2**63 - 1])
def test_scanner_number_is_read(number: int) -> None:
    assert scanner(str(number)).number() == number


@pytest.mark.parametrize("raw", ["-1", '"1"', str(2**63), ""])
def test_scanner_malformed_number_raises(raw: str) -> None:
    with pytest.raises(RefusedError, match="no integer at byte"):
        scanner(raw).number()


# Objects of texts, read at once -------------------------------------------------------------------


def one_by_one(raw: bytes) -> dict[str, str]:
    """Read an object of texts member by member."""
    read = scanner(raw)
    found = {name: read.text() for name in read.members(100)}
    read.end()
    return found


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=9), st.booleans())
def test_texts_read_at_once_equal_those_read_singly(
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
        assert read.peek(b"{"), "no text was read"
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
def test_texts_with_escapes_are_not_read_at_once(raw: bytes) -> None:
    read = scanner(raw)
    assert read.texts(1000) is None
    assert read.peek(b"{"), "no text was read"


def test_texts_are_bounded_in_number() -> None:
    assert scanner(b'{"a":"1","b":"2"}').texts(2) == {"a": "1", "b": "2"}
    assert scanner(b'{"a":"1","b":"2"}').texts(1) is None


@pytest.mark.parametrize("spaces", [0, 1, 4096, 4097, 10_000])
@pytest.mark.parametrize("rest", [b"", b"x", b"\n"])
def test_end_follows_spaces_only(spaces: int, rest: bytes) -> None:
    read = scanner(b"[]" + b" " * spaces + rest)
    assert read.numbers(1) == ()
    if rest == b"x":
        with pytest.raises(RefusedError, match="extra data at byte"):
            read.end()
    else:
        read.end()
