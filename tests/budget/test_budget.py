"""A 500 MB pipeline under 128 MB: the budget holds, memory does not grow, and hits stay."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import pipelines
from tests.helpers.processes import results_in, run_python, with_the_usual_allocator

pytestmark = pytest.mark.full(
    "20 steps of 500 MB; tests/dispatch/test_memory.py has a small model, under a limit"
)

BUDGET = "128MB"


def denoise(checkpoint: Path, place: Path, budget: str, policy: str = "next-use") -> dict[str, Any]:
    arguments = [checkpoint, place / "store", budget, policy]
    environment = with_the_usual_allocator(threads=2)
    done = run_python(
        "-m", "tests.budget.denoise", *arguments, environment=environment, timeout=500
    )
    results = results_in(done.stdout)
    assert results, done.stderr[-3000:]
    return results[-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.build_flux(tmp_path_factory.mktemp("flux") / "checkpoint", size="medium")


@pytest.fixture(scope="module")
def result(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return denoise(checkpoint, tmp_path_factory.mktemp("budget"), BUDGET)


def per_step(result: dict[str, Any]) -> list[int]:
    """Return the bytes read in each step but the first."""
    read = [step["read"] for step in result["steps"]]
    return [after - before for before, after in pairwise(read)]


def test_model_is_several_times_the_budget(result: dict[str, Any]) -> None:
    assert result["weights"] > 500_000_000 > 3.5 * result["budget"]


def test_store_memory_stays_within_the_budget(result: dict[str, Any]) -> None:
    assert result["peak_of_store"] <= result["budget"]


def test_anonymous_memory_stays_below_the_budget_and_two_groups(result: dict[str, Any]) -> None:
    gained = result["peak"] - result["baseline"]
    assert gained < result["budget"] + 2 * result["largest_group"]


def test_memory_does_not_grow_with_the_steps(result: dict[str, Any]) -> None:
    anonymous = [step["anonymous"] for step in result["steps"]]
    assert anonymous[19] - anonymous[4] < 5_000_000


def test_steps_from_the_third_read_only_misses(result: dict[str, Any]) -> None:
    misses = result["transformer"] - result["budget"] + 3 * result["largest_group"]
    for step in per_step(result)[1:]:
        assert 0 < step <= 1.05 * misses


def test_lru_policy_reads_everything_in_every_step(
    checkpoint: Path, result: dict[str, Any], tmp_path: Path
) -> None:
    """The control: a denoising loop is a scan, and the usual policy has no hits in a scan."""
    scanned = denoise(checkpoint, tmp_path, BUDGET, "lru")
    steps = per_step(scanned)[1:]  # one step may read a group early that the next does not
    assert sum(steps) / len(steps) >= 0.99 * result["transformer"]


def test_denoising_writes_nothing(result: dict[str, Any]) -> None:
    assert result["bytes_written"] == 0


def test_larger_budget_uses_more_memory_and_reads_less(
    checkpoint: Path, result: dict[str, Any], tmp_path: Path
) -> None:
    """The control: the figures above depend on the weights, and would show an exceeded budget."""
    larger = denoise(checkpoint, tmp_path, "1GB")
    gained = larger["peak"] - larger["baseline"]
    assert gained > result["budget"] + 2 * result["largest_group"]
    assert max(per_step(larger)) == 0
