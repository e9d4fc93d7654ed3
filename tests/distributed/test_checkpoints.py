"""A checkpoint of ranks with stores loads on any number of ranks, and in torch alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.distributed import training
from tests.distributed.ranks import Ranks
from tests.distributed.training import Case, Run, assert_equal, on_store, plain_run
from tests.lanes import by_lane
from tierstore import load_training, save_training

pytestmark = pytest.mark.full("processes take seconds to start")

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WORLDS = [(2, 4), (4, 2), (2, 1), (1, 3)]


def torch_loads(run: Run, path: Path) -> None:
    """Load as a training without a store does."""
    state = torch_state(run)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=FLAT)


def torch_state(run: Run) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=FLAT),
    }


def save_both(place: str) -> None:
    """Train in both ways, and save in both ways."""
    case = Case()
    expected = plain_run(case)
    with on_store(case, f"{place}/saving") as (run, _):
        for step in range(2):
            for each in (run, expected):
                each.losses(step)
                each.step()
        save_training(f"{place}/ours", run.model, run.optimizer, extra={"step": 2})
    dcp.save(torch_state(expected), checkpoint_id=f"{place}/theirs")


def load_both(place: str) -> int:
    """Load each checkpoint in each way, and continue.

    Return the bytes that the stores have moved.
    """
    case, moved = Case(share=0.3), 0
    for name in ("ours", "theirs"):
        expected = plain_run(case)
        with on_store(case, f"{place}/loading-{name}") as (run, store):
            for each in (run, expected):  # existing parameters have their own states
                each.losses(7)
                each.step()
            torch_loads(expected, Path(place) / name)
            extra = load_training(f"{place}/{name}", run.model, run.optimizer)
            assert extra == ({"step": 2} if name == "ours" else None)
            assert_equal(run, expected)
            for step in (2, 3):
                assert training.local(run.losses(step)).equal(expected.losses(step)), (name, step)
                for each in (run, expected):
                    each.step()
            assert_equal(run, expected)
            moved += store.stats().bytes_read + store.stats().bytes_written
    return moved


@pytest.mark.parametrize(("savers", "loaders"), by_lane(WORLDS[:1], WORLDS[:2], WORLDS))
def test_checkpoint_loads_on_any_number_of_ranks(
    savers: int, loaders: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(savers).call(save_both, str(tmp_path))
    assert min(ranks(loaders).call(load_both, str(tmp_path))) > 0
