"""Memory that weights took before they were on a store returns to the system.

The allocator is as users have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import output_of, results_in, with_the_usual_allocator

MB = 1_000_000
BUDGET = 32 * MB
MARGIN = 16 * MB
"""Bytes: the working memory of Python and torch, and a portion that is not returned yet."""
KEPT = 2 * 32 * MB
"""Bytes that may be freed but not returned while weights leave: a portion, and the next group."""

WAYS = ("as is", "cast", "in memory", "dispatched", "dispatched, cast")

pytestmark = [
    pytest.mark.full("processes with models of diffusers"),
    pytest.mark.long("models and ways to load do not depend on each other", keep="values"),
]


@pytest.fixture(scope="module", params=["flux", "sd3", "sdxl", "wan", "llama"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    checkpoint = tmp_path_factory.mktemp(request.param) / "checkpoint"
    output_of("-m", "tests.budget.enabled", "save", request.param, checkpoint)
    return request.param, checkpoint


@pytest.mark.parametrize("way", WAYS)
def test_model_on_a_store_takes_its_budget(
    saved: tuple[str, Path], way: str, tmp_path: Path
) -> None:
    name, checkpoint = saved
    words = ("-m", "tests.budget.enabled", name, way, checkpoint, tmp_path / "store", "32MB")
    result: dict[str, Any]
    (result,) = results_in(output_of(*words, environment=with_the_usual_allocator()))
    if way in ("cast", "in memory"):
        assert result["loaded"] > 120 * MB > BUDGET + MARGIN + KEPT
    if way in ("as is", "dispatched"):
        assert result["written"] == 0
    else:
        assert result["written"] > 120 * MB
    assert result["enabled"] <= BUDGET + MARGIN
    assert result["undone"] <= BUDGET + MARGIN
    if way in ("cast", "in memory"):
        assert result["excess"] <= BUDGET + MARGIN + KEPT
