"""Weights that are edited on a store are stored as they are edited, within the process's budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.budget.edited import BUDGET, EDITS, LAYERS, MB, WIDTH
from tests.helpers.processes import output_of, results_in, with_the_usual_allocator

WEIGHTS = LAYERS * WIDTH * WIDTH * 4
MARGIN = 2 * 4 * MB + 8 * MB
"""Bytes: two groups, and the working memory of Python and torch."""

pytestmark = pytest.mark.full("a process for each way, which imports torch and measures itself")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edited") / "model.safetensors"
    output_of("-m", "tests.budget.edited", "save", path, "-")
    return path


def run(how: str, checkpoint: Path, place: Path) -> dict[str, Any]:
    words = ("-m", "tests.budget.edited", how, checkpoint, place / "store")
    result: dict[str, Any]
    (result,) = results_in(output_of(*words, environment=with_the_usual_allocator(threads=1)))
    return result


@pytest.mark.parametrize("how", [how for how in EDITS if how != "at once"])
def test_all_weights_are_edited_within_the_budget(
    how: str, checkpoint: Path, tmp_path: Path
) -> None:
    result = run(how, checkpoint, tmp_path)
    assert result["right"], "the weights do not have the edited values"
    assert result["gained"] <= BUDGET + MARGIN < WEIGHTS / 2


def test_undetected_edits_take_memory_until_the_next_run(checkpoint: Path, tmp_path: Path) -> None:
    """The control: the edits take this much memory, and the measurement shows it."""
    result = run("at once", checkpoint, tmp_path)
    assert result["right"]
    assert result["gained"] >= WEIGHTS


def test_model_made_in_memory_takes_its_budget(checkpoint: Path, tmp_path: Path) -> None:
    result = run("in memory", checkpoint, tmp_path)
    assert result["made"] > 2 * (BUDGET + MARGIN)
    assert result["dispatched"] <= BUDGET + MARGIN < WEIGHTS / 2
