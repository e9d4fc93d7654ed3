"""A header holds exactly as much as it announces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tierstore.errors import InvalidHeaderError
from tierstore.model import header as header_module
from tierstore.model.header import (
    LENGTH_BYTES,
    LONGEST_SHOWN,
    MAX_HEADER_BYTES,
    MAX_METADATA,
    MAX_RANK,
    MAX_TENSORS,
    check_text,
    header_length,
    parse_header,
    shown,
)


def parsed(document: Any, data_bytes: int = 0, most: int = MAX_TENSORS) -> header_module.Header:
    body = json.dumps(document).encode()
    return parse_header(body, LENGTH_BYTES + len(body) + data_bytes, "m.st", most=most)


def empty(shape: list[int]) -> dict[str, Any]:
    return {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}


def test_tensors_at_the_limit_are_accepted() -> None:
    """Lower the limit: with the real one it takes seconds."""
    tensors = {name: empty([0]) for name in "abcd"}
    three = {name: tensors[name] for name in "abc"}
    assert len(parsed(three, most=3).entries) == 3
    assert len(parsed(three | {"__metadata__": {"by": "us"}}, most=3).entries) == 3
    with pytest.raises(InvalidHeaderError, match="more than 3 tensors"):
        parsed(tensors, most=3)


def test_metadata_at_the_limit_is_accepted() -> None:
    metadata = {str(number): "" for number in range(MAX_METADATA)}
    assert len(parsed({"__metadata__": metadata}).metadata) == MAX_METADATA
    with pytest.raises(InvalidHeaderError, match=f"more than {MAX_METADATA} members"):
        parsed({"__metadata__": metadata | {"one more": ""}})


def test_dimensions_at_torchs_limit_are_accepted() -> None:
    [entry] = parsed({"a": empty([0] * MAX_RANK)}).entries
    assert entry.shape == (0,) * MAX_RANK
    with pytest.raises(InvalidHeaderError, match="no valid shape"):
        parsed({"a": empty([0] * (MAX_RANK + 1))})


@pytest.mark.parametrize("length", [2, MAX_HEADER_BYTES])
def test_header_at_the_length_limit_is_accepted(length: int) -> None:
    prefix = length.to_bytes(LENGTH_BYTES, "little")
    assert header_length(prefix, LENGTH_BYTES + length, "m.st") == length
    with pytest.raises(InvalidHeaderError, match=f"declares a header of {length} bytes"):
        header_length(prefix, LENGTH_BYTES + length - 1, "m.st")


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES + 1])
def test_header_beyond_length_limits_raises(length: int) -> None:
    with pytest.raises(InvalidHeaderError, match=f"declares a header of {length} bytes"):
        header_length(length.to_bytes(LENGTH_BYTES, "little"), 1 << 40, "m.st")


def test_file_too_short_for_a_length_raises() -> None:
    with pytest.raises(InvalidHeaderError, match=r"too short \(7 bytes\)") as error:
        header_length(bytes(7), 7, "m.st")
    assert error.value.path == "m.st"


def test_largest_product_of_sizes_is_accepted() -> None:
    """Reject any overflowing product, also of the sizes before a zero, as safetensors does."""
    assert parsed({"a": empty([2**59, 1, 0])}).entries[0].shape == (2**59, 1, 0)
    for shape in ([2**60, 0], [2**30, 2**30, 0]):
        with pytest.raises(InvalidHeaderError, match="match its shape"):
            parsed({"a": empty(shape)})
    assert parsed({"a": empty([0, 2**60])}).entries[0].shape == (0, 2**60)


def test_tensor_entry_in_any_notation_is_read() -> None:
    usual = {"dtype": "I16", "shape": [2, 3], "data_offsets": [0, 12]}
    expected = parsed({"a": usual}, 12).entries
    assert expected[0] == header_module.Entry("a", "I16", (2, 3), 0, 12)
    for order in (["data_offsets", "shape", "dtype"], ["shape", "dtype", "data_offsets"]):
        assert parsed({"a": {name: usual[name] for name in order}}, 12).entries == expected
    for name in usual:
        with pytest.raises(InvalidHeaderError, match="must have exactly"):
            parsed({"a": {n: value for n, value in usual.items() if n != name}}, 12)
    with pytest.raises(InvalidHeaderError, match="more than 3 members"):
        parsed({"a": {**dict(reversed(usual.items())), "more": 1}}, 12)
    with pytest.raises(InvalidHeaderError, match="must have exactly"):
        parsed({"a": {"more": 1, "dtype": "I16"}}, 12)


def test_scalars_and_unsorted_tensors_are_sorted_by_offset() -> None:
    document = {
        "c": {"dtype": "F32", "shape": [], "data_offsets": [3, 7]},
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "a": {"dtype": "U8", "shape": [0], "data_offsets": [3, 3]},
    }
    header = parsed(document, 7)
    assert [entry.name for entry in header.entries] == ["b", "a", "c"]
    assert header.entries[2].shape == ()


def test_name_in_a_message_is_quoted_and_bounded() -> None:
    assert shown("a'b") == repr("a'b")
    assert shown("x" * LONGEST_SHOWN) == repr("x" * LONGEST_SHOWN)
    assert shown("x" * (LONGEST_SHOWN + 1)) == repr("x" * LONGEST_SHOWN + "\u2026")


def test_header_text_accepts_any_json_text() -> None:
    assert check_text("\u00e9\U0001f600", "a name") == "\u00e9\U0001f600"
    with pytest.raises(TypeError, match="a name must be a str, not int"):
        check_text(1, "a name")
    with pytest.raises(ValueError, match=r"a name, .* cannot be written as UTF-8"):
        check_text("\udc80", "a name")


@pytest.mark.parametrize("metadata", [1, [], "text", None, {"a": 1}, {"a": None}, {"a": {}}])
def test_metadata_maps_text_to_text(metadata: Any) -> None:
    with pytest.raises(InvalidHeaderError, match="must map strings to strings"):
        parsed({"__metadata__": metadata})


@pytest.mark.parametrize("claimed", [None, "", "0" * 15, "0" * 17, "0" * 15 + "-", "f" * 16])
def test_header_without_its_own_checksum_is_invalid(claimed: str | None) -> None:
    metadata = {} if claimed is None else {header_module.HEADER_SUM: claimed}
    body = json.dumps({"__metadata__": metadata}, separators=(",", ":")).encode()
    header = parse_header(body, LENGTH_BYTES + len(body), "m.st")
    assert not header_module.header_matches_checksum(body, header)
