"""Trainings on 1 to 4 ranks that save, and resume from saves of any other number of ranks.

    python -m tests.training.saving_ranks PLACE

Four processes are forked, and form one process group after another. With FSDP2, each group of 1 to
4 ranks trains and saves, by `torch.distributed.checkpoint` alone and by `save_training`; one
process does the same on a store, and one plainly. Then each number of ranks loads each of these
checkpoints, in both ways. Prints a line of JSON for each load: the ranks that saved, the way it was
loaded, the number of ranks that loaded, and whether the combined state equals the saved one.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.helpers.files import flip_bit, largest_file
from tests.helpers.processes import Tell, forked
from tierstore import OffloadModel, OffloadOptimizer, TierStore, load_training, save_training

RANKS = 4
WORLDS = range(1, RANKS + 1)
STEPS = 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ON_ONE = ["store", "alone by torch", "alone by name"]
"""Ways to save in one process, without a process group."""
ON_RANKS = [f"{world} by {how}" for world in WORLDS for how in ("torch", "tierstore")]
WAYS = ["torch", "tierstore"]
DATA = ["__0_0.distcp", "__1_0.distcp"]
"""Files of the first save of two ranks."""

Pair = tuple[nn.Module, torch.optim.Optimizer]


# Trainings ----------------------------------------------------------------------------------------


def build(seed: int) -> nn.Module:
    """Sizes that no number of ranks divides, and fewer rows than there are ranks."""
    torch.manual_seed(seed)
    sizes = [(24, 131), (131, 67), (67, 2)]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh()) for a, b in sizes]
    return nn.Sequential(*blocks)


def groups_of(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "lr": lr},
        {"params": [p for p in parameters if p.dim() < 2], "lr": lr / 2, "weight_decay": 0.0},
    ]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, first + STEPS):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def alone(seed: int, lr: float = 1e-2) -> Pair:
    model = build(seed)
    return model, torch.optim.AdamW(groups_of(model, lr))


def on_ranks(seed: int, lr: float = 1e-2) -> Pair:
    model = build(seed)
    for block in model.children():
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(groups_of(model, lr))


@contextmanager
def on_store(place: Path, seed: int, lr: float = 1e-2) -> Iterator[Pair]:
    with TierStore(24 * 4096, place, device="cpu") as store:
        model = OffloadModel(build(seed), store)
        groups = groups_of(model, lr)
        yield model, OffloadOptimizer(groups, store, torch.optim.AdamW, fused=False)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT),
    }


def whole_state(pair: Pair) -> dict[str, Any]:
    """Return the whole state, on every rank, by the names that torch gives it."""
    found = {f"{of}.{name}": v for of, each in by_name(*pair).items() for name, v in each.items()}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return one.keys() == other.keys() and all(equal(v, other[name]) for name, v in one.items())


# Saving and loading -------------------------------------------------------------------------------


def save(how: str, path: Path, pair: Pair) -> None:
    if how == "torch":
        dcp.save(by_name(*pair), checkpoint_id=path)
    else:
        save_training(path, *pair, extra={"saved": path.name})


def load(how: str, path: Path, pair: Pair) -> Any:
    if how == "tierstore":
        return load_training(path, *pair)
    state = by_name(*pair)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(pair[0], state["model"])
    set_optimizer_state_dict(*pair, state["optimizer"], options=FLAT)
    return None


def without_a_group(place: Path, tell: Tell) -> None:
    """Save the state of one process; load saves of others, with and without a store."""
    pair = alone(0)
    steps(*pair)
    torch.save(whole_state(pair), place / "alone by torch.pt")
    save("torch", place / "alone by torch", pair)
    torch.save(whole_state(pair), place / "alone by name.pt")
    dcp.save(
        {"model": get_model_state_dict(pair[0]), "optim": get_optimizer_state_dict(*pair)},
        checkpoint_id=place / "alone by name",
    )
    with on_store(place / "disk", 0) as offloaded:
        steps(*offloaded)
        save("tierstore", place / "store", offloaded)
    steps(*pair)
    model, optimizer = on_store_state(place, place / "store")
    torch.save({**model, **optimizer}, place / "store.pt")
    tell("store goes on", "", 0, goes_on(place, pair))
    for name in [*ON_RANKS, *ON_ONE]:
        expected = torch.load(place / f"{name}.pt")
        model, optimizer = on_store_state(place, place / name)
        tell(name, "store", 1, same({**model, **optimizer}, expected))
        for how in WAYS:
            if (name, how) != ("alone by name", "torch"):  # its optimizer has another name
                pair = alone(1, 0.5)
                load(how, place / name, pair)
                tell(name, f"{how} alone", 1, same(whole_state(pair), expected))


def on_store_state(place: Path, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a training on a store after loading."""
    with on_store(place / "disk", 1, 0.5) as pair:
        load_training(path, *pair)
        moved = pair[0].store.stats().bytes_read + pair[0].store.stats().bytes_written
        assert moved > 0
        plain = alone(2)
        plain[0].load_state_dict(pair[0].state_dict())
        plain[1].load_state_dict(pair[1].state_dict())
        state = whole_state(plain)
    model = {name: value for name, value in state.items() if name.startswith("model.")}
    return model, {name: value for name, value in state.items() if name not in model}


def goes_on(place: Path, expected: Pair) -> bool:
    """Return whether further steps on a store equal those of a training that was never saved."""
    with on_store(place / "disk", 1, 0.5) as pair:
        load_training(place / "store", *pair)
        steps(*pair)
        for name, value in pair[0].state_dict().items():
            if not torch.equal(value, expected[0].state_dict()[name]):
                return False
    return True


def serve(rank: int, place: Path, tell: Tell) -> None:
    """Run one of the processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for world in WORLDS:
        with group(place / f"saving-{world}", rank, world) as here:
            if here:
                save_on_ranks(place, world)
    if rank == 0:
        without_a_group(place, tell)
        tell("nothing", "control", 0, same(whole_state(alone(1)), torch.load(place / "store.pt")))
    with group(place / "failing", rank, 2) as here:
        if here:
            fail_together(rank, place, tell)
    for world in WORLDS:
        with group(place / f"loading-{world}", rank, world) as here:
            if here:
                load_on_ranks(place, world, tell if rank == 0 else lambda *_: None)


def save_on_ranks(place: Path, world: int) -> None:
    for how in WAYS:
        pair = on_ranks(0)
        steps(*pair)
        state = whole_state(pair)
        save(how, place / f"{world} by {how}", pair)
        if dist.get_rank() == 0:
            torch.save(state, place / f"{world} by {how}.pt")


def load_on_ranks(place: Path, world: int, tell: Tell) -> None:
    for name, how in itertools.product([*ON_RANKS, *ON_ONE], WAYS):
        if (name, how) == ("alone by name", "torch"):
            continue
        pair = on_ranks(1, 0.5)
        extra = load(how, place / name, pair)
        if how == "tierstore" and name.endswith("tierstore"):
            assert extra == {"saved": name}
        expected = torch.load(place / f"{name}.pt")
        right = torch.tensor(same(whole_state(pair), expected), dtype=torch.int)
        dist.all_reduce(right, dist.ReduceOp.MIN)
        tell(name, how, world, bool(right))


def fail_together(rank: int, place: Path, tell: Tell) -> None:
    """Check that one rank's error is raised on all, and that nothing changes."""
    pair = on_ranks(1, 0.5)
    before = whole_state(pair)
    whole, damaged = place / "2 by tierstore", place / "damaged"
    if rank == 0:
        shutil.copytree(whole, damaged)
        flip_bit(damaged / "__1_0.distcp", 1000, 3)  # which only one rank reads
    dist.barrier()
    wrong = outcome(lambda: load_training(damaged, *pair))
    tell("damaged", wrong, rank, same(whole_state(pair), before))
    with largest_file(1000) if rank == 1 else nullcontext():
        wrong = outcome(lambda: save_training(whole, *pair))
    dist.barrier()  # the first rank cleans up
    left = sorted(each.name for each in whole.iterdir())
    load_training(whole, *pair)
    right = same(whole_state(pair), torch.load(place / "2 by tierstore.pt"))
    tell("full disk", wrong, rank, right and left == [".metadata", *DATA])


def outcome(do: Callable[[], Any]) -> str:
    try:
        do()
    except Exception as error:
        return type(error).__name__
    return "done"


@contextmanager
def group(meeting: Path, rank: int, world: int) -> Iterator[bool]:
    """Make the first ranks one group. Yields whether this rank belongs to it."""
    if rank >= world:
        yield False
        return
    timeout = datetime.timedelta(seconds=600)  # the first rank works alone for a while
    method = f"file://{meeting}"
    dist.init_process_group("gloo", method, timeout, world_size=world, rank=rank)
    yield True
    dist.barrier()
    dist.destroy_process_group()


def main(place: Path) -> None:
    ranks = [forked(lambda tell, rank=rank: serve(rank, place, tell)) for rank in range(RANKS)]
    wrong = []
    for rank, (child, source) in enumerate(ranks):
        with os.fdopen(source) as lines:
            for line in map(json.loads, lines):
                if line[0] == "wrong":
                    wrong.append(f"rank {rank}: {line[1]}")
                else:
                    print("RESULT " + json.dumps(line), flush=True)
        os.waitpid(child, 0)
    assert not wrong, "\n".join(wrong)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
