"""A rank is killed in the middle of a step.

The others end with torch's own error, and leave the files that the next start needs.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import Ranks
from tests.distributed.training import Case, local, on_store, plain_run
from tierstore import load_training, save_training

pytestmark = pytest.mark.full("processes take seconds to start")

TIMEOUT = 40
STEPS, SAVED = 4, 2


def trained(place: str, killed: int | None, first: int = 0) -> dict[str, torch.Tensor]:
    """Run steps from `first` on, or from the checkpoint saved before step `SAVED`.

    In the step after that one, the rank `killed` dies while gradients move.
    """
    case, checkpoint = Case(share=0.2), Path(place) / "checkpoint"
    with on_store(case, place) as (run, store):
        if first:
            assert load_training(checkpoint, run.model, run.optimizer) == first
        for step in range(first, STEPS):
            if step == SAVED and not first:
                save_training(checkpoint, run.model, run.optimizer, extra=step)
            if step == SAVED + 1 and killed == dist.get_rank():
                model: Any = run.model
                model.blocks[1].register_full_backward_hook(_die)
            run.losses(step)
            run.step()
        assert store.stats().bytes_written > 0
        return {name: local(p).clone() for name, p in run.model.named_parameters()}


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def expected() -> dict[str, torch.Tensor]:
    run = plain_run(Case())
    for step in range(STEPS):
        run.losses(step)
        run.step()
    return {name: local(p).clone() for name, p in run.model.named_parameters()}


def test_killed_rank_ends_the_others_and_next_start_resumes(tmp_path: Path) -> None:
    killed = Ranks(2, tmp_path, timeout=TIMEOUT)
    try:
        killed.call(os.getpid)  # they are running
        killed.start(trained, str(tmp_path), 1)
        begun = time.monotonic()
        with pytest.raises(AssertionError) as failed:
            killed.results(timeout=TIMEOUT * 3)
        assert time.monotonic() - begun < TIMEOUT * 2
        assert "rank 1 has not answered" in str(failed.value)
        assert "rank 0: Traceback" in str(failed.value)
        assert "gloo" in str(failed.value), "the error is not torch's own"
    finally:
        killed.kill()
    again = Ranks(2, tmp_path)
    try:
        found = again.call(trained, str(tmp_path), None, SAVED)
        for ours, theirs in zip(found, again.call(expected), strict=True):
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                assert torch.equal(value, theirs[name]), name
        assert not list(tmp_path.glob("*/*.tmp"))
    finally:
        again.kill()


def test_no_rank_killed_all_ranks_finish(tmp_path: Path) -> None:
    """The control of the test above."""
    whole = Ranks(2, tmp_path, timeout=TIMEOUT)
    try:
        found = whole.call(trained, str(tmp_path), None)
        for ours, theirs in zip(found, whole.call(expected), strict=True):
            for name, value in ours.items():
                assert torch.equal(value, theirs[name]), name
    finally:
        whole.kill()
