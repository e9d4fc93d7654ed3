"""Offloaded, every pipeline computes bit for bit the same as without a store.

Small pipelines, in the default lane tiny ones, under budgets below, around and above the size of
their weights. The first run learns the order of use; the second one follows it.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests import pipelines
from tests.accelerator import ACCELERATOR, pretend
from tests.adapters.conftest import (
    OFFLOAD_TYPES,
    Checkpoints,
    Reference,
    References,
    start_measuring,
)
from tests.lanes import by_lane
from tierstore import TierStore, enable_group_offload
from tierstore.observe.stats import Stats

pytestmark = [
    pytest.mark.full(
        "partition and budget are independent",
        keep="values",
    ),
    pytest.mark.parametrize("share", (0.15, 0.4, 1.5)),
    pytest.mark.parametrize("offload_type", OFFLOAD_TYPES),
    pytest.mark.parametrize("kind", pipelines.KINDS),
]

SIZE = by_lane("tiny", "small")

# transformers takes an offloaded model for one on the CPU, and sends each step's token ids and
# positions there: int64, for 2 x 12 prompt tokens and 2 x 7 of the 8 that are generated.
TOKENS_READ_BACK = {"llama": 2 * 8 * (2 * 12 + 2 * 7)}


def assert_bytes_moved(stats: Stats, expected: Reference, runs: int, memory: int) -> None:
    """Check that needed weights were read, again where they cannot have stayed, and none written.

    No run begins with more than `memory` bytes in RAM and on the device together, so it reads the
    rest of its weights, however well the store chose those to keep.
    """
    again = max(0, expected.needed - memory)
    assert stats.bytes_read >= expected.needed + (runs - 1) * again
    assert (again > 0) == (memory < expected.weights)
    assert stats.bytes_written == 0
    assert stats.bytes_offloaded == 0


def test_pipeline_on_the_cpu_equals_plain(
    kind: str,
    offload_type: str,
    share: float,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    expected = reference(kind, SIZE)
    budget = int(expected.weights * share)
    pipe = pipelines.load(kind, checkpoint(kind, SIZE))
    with (
        TierStore(budget, disk_dir, device="cpu") as store,
        enable_group_offload(pipe, store, offload_type=offload_type) as handle,
    ):
        for runs in (1, 2):
            assert torch.equal(pipelines.run(kind, pipe), expected.output)
            assert_bytes_moved(handle.stats(), expected, runs, memory=budget)
        assert handle.stats().peak_bytes["HOST"] <= budget


@pytest.mark.pretend_only("counts")
def test_pipeline_on_an_accelerator_equals_plain(
    kind: str,
    offload_type: str,
    share: float,
    checkpoint: Checkpoints,
    reference: References,
    disk_dir: Path,
) -> None:
    expected = reference(kind, SIZE, ACCELERATOR)
    budget = int(expected.weights * share)
    pipe = pipelines.load(kind, checkpoint(kind, SIZE))
    start_measuring()
    device_before, pinned_before = pretend.memory_allocated(), pretend.pinned_bytes()
    with (
        TierStore(budget, disk_dir, device=ACCELERATOR, device_budget=budget) as store,
        enable_group_offload(pipe, store, offload_type=offload_type) as handle,
    ):
        for runs in (1, 2):
            assert torch.equal(pipelines.run(kind, pipe, device=ACCELERATOR), expected.output)
            gc.collect()
            assert_bytes_moved(handle.stats(), expected, runs, memory=2 * budget)
            # No clean weight went back: the only bytes copied from the device are those that the
            # pipeline itself reads.
            read_back = pretend.copied("d2h") - runs * expected.read_back
            assert 0 <= read_back <= runs * TOKENS_READ_BACK.get(kind, 0)
        assert pretend.copied("h2d") >= expected.needed
        assert pretend.stale_copies() == 0
        assert pretend.peak_pinned_bytes() - pinned_before <= budget
        device_peak = pretend.max_memory_allocated() - device_before
        assert device_peak <= budget + expected.activations
