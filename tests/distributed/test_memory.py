"""RAM of a rank: the budget of its store, and the units that FSDP2 has gathered."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.ranks import Ranks
from tests.distributed.training import local
from tierstore import OffloadModel, OffloadOptimizer, TierStore

pytestmark = pytest.mark.full("processes take seconds to start")

WIDTH, UNITS = 1000, 20
UNIT_BYTES = WIDTH * WIDTH * 4
BUDGET = 24 << 20


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Ranks]]:
    """Two ranks whose freed memory returns to the system."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    made = [Ranks(2, tmp_path) for _ in range(1)]
    yield lambda: made[0]
    made[0].kill()


def resident(what: str) -> int:
    """Return the bytes of this process that are in RAM (`VmRSS`), or were at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(what))
    return int(line.split()[1]) << 10


def sharded_units(width: int) -> nn.Module:
    """Return units, of which at most one is whole at a time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    units: list[nn.Module] = []
    for number in range(UNITS):
        torch.manual_seed(number)
        units.append(nn.Linear(width, width, bias=False))
        fully_shard(units[-1], mesh=mesh)
    model = nn.Sequential(*units)
    fully_shard(model, mesh=mesh)
    return model


def peak(place: str, stored: bool) -> dict[str, int]:
    """Return the peak of a few steps, less the peak of the same steps with a very small model."""
    small = trained(place, stored, 16)["peak"]
    found = trained(place, stored, WIDTH)
    return {**found, "peak": found["peak"] - small}


def trained(place: str, stored: bool, width: int) -> dict[str, int]:
    gc.collect()
    module = sharded_units(width)
    state = 4 * sum(local(p).nbytes for p in module.parameters())
    directory = Path(place) / str(dist.get_rank())
    with TierStore(BUDGET, directory, device="cpu") as store:
        model: nn.Module = module
        if stored:
            model = OffloadModel(module, store)
            optimizer: torch.optim.Optimizer = OffloadOptimizer(
                model, store, torch.optim.AdamW, lr=1e-3
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        for step in range(3):
            model(torch.full((4, width), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        held = store.stats().peak_bytes["HOST"]
    return {"peak": resident("VmHWM"), "state": state, "held": held}


def test_rank_ram_is_the_budget_and_a_few_units(ranks: Callable[[], Ranks], tmp_path: Path) -> None:
    """FSDP2 holds the units that it gathers and reduces in RAM, with a store or without.

    Besides these and the budget there is hardly anything; without a store, there is all of the
    state.
    """
    on_store = ranks().call(peak, str(tmp_path), True)
    plain = ranks().call(peak, str(tmp_path), False)
    for found, without in zip(on_store, plain, strict=True):
        gathered = without["peak"] - without["state"]
        assert 0 < gathered < 5 * UNIT_BYTES
        assert 0 < found["held"] <= BUDGET
        assert found["peak"] <= BUDGET + gathered + 3 * UNIT_BYTES
        assert BUDGET + gathered + 3 * UNIT_BYTES < without["peak"] / 2
