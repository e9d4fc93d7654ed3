"""Errors: a sentence that names the key and the numbers, and ends with a remedy."""

from __future__ import annotations

import pickle
import re

import pytest

from tierstore import errors
from tierstore.errors import (
    BudgetError,
    CorruptDataError,
    DuplicateKeyError,
    InvalidHeaderError,
    TierStoreError,
    TransferError,
    UnknownKeyError,
)
from tierstore.model.header import Header, header_length, parse_header
from tierstore.model.objects import decode_object

# The last clause of a message is the remedy.
ADVICE = re.compile(
    r"(;|:|,)[^;:]*\b(discard|raise|put|register|use|download|save|list|pass|write|remove|move|check|retry|start)\b[^;:]*$"
)


def raised_by(act: object, *args: object) -> TierStoreError:
    with pytest.raises(TierStoreError) as caught:
        act(*args)  # type: ignore[operator]
    return caught.value


MESSAGES = {
    "unknown": (UnknownKeyError("blocks.7"), ["'blocks.7'"]),
    "duplicate": (DuplicateKeyError("blocks.7"), ["'blocks.7'"]),
    "budget": (
        BudgetError("blocks.7", "HOST", 12345678, 1000, "raise ram_budget to at least 12,345,678"),
        ["'blocks.7'", "12,345,678 bytes in RAM (tier HOST)", "in whole pages, is 1,000 bytes"],
    ),
    "too short": (raised_by(header_length, b"abc", 3, "m.st"), ["m.st", "3 bytes"]),
    "length": (
        raised_by(header_length, b"\xff" * 8, 99, "m.st"),
        ["m.st", "99 bytes", str(2**64 - 1)],
    ),
    "malformed": (raised_by(parse_header, b"[]", 10, "m.st"), ["m.st", "begin with '{'"]),
    "foreign": (
        raised_by(decode_object, Header((), {"tierstore.format": "9"}, 10, ""), "m.st"),
        ["m.st", "format 1", "'9'"],
    ),
    "damaged": (
        raised_by(
            decode_object,
            Header(
                (),
                {"tierstore.format": "1", "tierstore.key": "k", "tierstore.views": "["},
                10,
                "",
            ),
            "m.st",
        ),
        ["m.st", "'k'"],
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message_names_its_subject_and_ends_with_advice(name: str) -> None:
    error, parts = MESSAGES[name]
    message = str(error)
    assert all(part in message for part in parts), message
    assert ADVICE.search(message), message


def test_advice_pattern_can_fail() -> None:
    assert not ADVICE.search("group 'a' is 12 bytes too large")
    assert not ADVICE.search("pass an int: it was 12 bytes too large")


def test_budget_error_carries_its_numbers() -> None:
    error = BudgetError("k", "HOST", 5, 3, "raise it")
    assert (error.key, error.tier, error.nbytes, error.budget) == ("k", "HOST", 5, 3)


def test_corrupt_data_error_says_expected_and_found() -> None:
    error = CorruptDataError("m", key="k", path="p", expected="1", found="2")
    assert (error.key, error.path, error.expected, error.found) == ("k", "p", "1", "2")


def test_unknown_key_error_is_a_readable_key_error() -> None:
    error = UnknownKeyError("k")
    assert isinstance(error, KeyError)
    assert error.key == "k"
    assert not str(error).startswith("'"), "KeyError shows the repr of its argument"


def test_every_error_has_one_base_class() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert len(classes) > 10
    assert all(issubclass(c, TierStoreError) for c in classes)
    assert issubclass(InvalidHeaderError, CorruptDataError)
    assert issubclass(CorruptDataError, TransferError)


@pytest.mark.parametrize("name", MESSAGES)
def test_errors_survive_pickling(name: str) -> None:
    """Check this because errors cross processes: data loaders, test runners and ranks."""
    error, _ = MESSAGES[name]
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
