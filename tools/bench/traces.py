"""Orders in which models use their groups, and lower bounds for any policy on them.

The sizes of the groups are those of real models, in bytes. Random traces are seeded, so every run
of the benchmark uses the same ones.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

try:
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix
except ImportError:
    linprog = None

MB = 1_000_000

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Trace:
    """Keys in the order of use, and the bytes of each key's group, in order of registration."""

    name: str
    keys: tuple[str, ...]
    groups: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(self.groups.values())

    @property
    def largest(self) -> int:
        return max(self.groups.values())

    @cached_property
    def sizes(self) -> Numbers:
        """Return the bytes of the group of each use."""
        return np.array([self.groups[key] for key in self.keys], dtype=np.int64)

    @cached_property
    def next_use(self) -> Numbers:
        """Return the index of the next use of each use's key; the number of uses if none."""
        found = np.full(len(self.keys), len(self.keys), dtype=np.int64)
        seen: dict[str, int] = {}
        for position in range(len(self.keys) - 1, -1, -1):
            key = self.keys[position]
            found[position] = seen.get(key, len(self.keys))
            seen[key] = position
        return found


def trace_of(name: str, keys: Iterable[str], size_of: Callable[[str], int]) -> Trace:
    """Return a trace whose groups are registered in order of first use. Sizes are in MB."""
    keys = tuple(keys)
    return Trace(name, keys, {key: MB * size_of(key) for key in dict.fromkeys(keys)})


def _layers(prefix: str, count: int) -> list[str]:
    return [f"{prefix}/{number}" for number in range(count)]


def _by_component(sizes: Mapping[str, int]) -> Callable[[str], int]:
    return lambda key: sizes[key.partition("/")[0]]


# --- orders that can be learned -------------------------------------------------------------------


def cyclic(groups: int = 57, steps: int = 30) -> Trace:
    """Return a denoising loop over equal blocks."""
    return trace_of(f"cyclic, {groups} groups", _layers("block", groups) * steps, lambda key: 400)


_FLUX = {"clip": 246, "t5": 397, "embed": 40, "double": 680, "single": 283, "vae": 168}


def _flux_prompt(steps: int) -> list[str]:
    step = ["embed", *_layers("double", 19), *_layers("single", 38)]
    return ["clip", *_layers("t5", 24), *step * steps, "vae"]


def flux(prompts: int = 4, steps: int = 28) -> Trace:
    """Return text encoders, transformer and VAE in sequence for each prompt."""
    name = f"Flux, {prompts} prompts"
    return trace_of(name, _flux_prompt(steps) * prompts, _by_component(_FLUX))


def flux_with_varying_steps() -> Trace:
    """Return the same, with a different number of steps for each prompt."""
    keys = [key for steps in (28, 28, 12, 40, 40, 20) for key in _flux_prompt(steps)]
    return trace_of("Flux, steps vary", keys, _by_component(_FLUX))


def two_experts(prompts: int = 3, steps: int = 40, switch: int = 20) -> Trace:
    """Return Wan 2.2: one expert denoises first, then the other; each runs twice per step."""
    prompt = [
        *_layers("t5", 24),
        *_layers("high", 40) * (2 * switch),
        *_layers("low", 40) * (2 * (steps - switch)),
        "vae",
    ]
    sizes = {"t5": 470, "high": 700, "low": 700, "vae": 508}
    return trace_of(f"Wan 2.2, {prompts} prompts", prompt * prompts, _by_component(sizes))


def training(layers: int = 40, steps: int = 20) -> Trace:
    """Return training steps: forward, then backward in reverse order."""
    up = _layers("layer", layers)
    step = ["embed", *up, "head", *reversed(up), "embed"]
    sizes = {"embed": 1000, "layer": 400, "head": 1000}
    return trace_of("training", step * steps, _by_component(sizes))


def cut_blocks(groups: int = 40, steps: int = 20) -> Trace:
    """Return split blocks: modules of two neighbouring groups alternate."""
    step = []
    for number in range(groups - 1):
        step += [f"part/{number}", f"part/{number + 1}"] * 2
    return trace_of(f"cut blocks, {groups} groups", step * steps, lambda key: 150)


def deterministic() -> list[Trace]:
    return [
        cyclic(),
        flux(),
        flux_with_varying_steps(),
        two_experts(),
        training(),
        cut_blocks(),
    ]


# --- orders that can be learned in part -----------------------------------------------------------


def skipped_steps(groups: int = 57, steps: int = 50, share: float = 0.35) -> Trace:
    """Return a loop with caching: some steps run only the first block."""
    chance = random.Random(1)
    keys = []
    for step in range(steps):
        skipped = step > 2 and chance.random() < share
        keys += _layers("block", 1 if skipped else groups)
    return trace_of("skipped steps", keys, lambda key: 400 if int(key[6:]) < 19 else 200)


def two_pipelines(groups: int = 57) -> Trace:
    """Return a base model and a refiner in turns, with varying numbers of steps."""
    chance = random.Random(3)
    keys = []
    for _ in range(6):
        keys += _layers("base", groups) * chance.choice([10, 14, 20])
        keys += _layers("refiner", 30) * chance.choice([4, 6, 8])
    return trace_of("two pipelines", keys, _by_component({"base": 400, "refiner": 300}))


def irregular() -> list[Trace]:
    return [skipped_steps(), two_pipelines()]


# --- orders that cannot be learned ----------------------------------------------------------------


def experts_by_chance(layers: int = 48, tokens: int = 80, *, drift: bool = False) -> Trace:
    """Return a mixture of experts: each layer uses 4 of 64 experts, with unequal frequencies.

    With `drift`, other experts become the frequent ones after half of the tokens.
    """
    experts = 64
    chance = np.random.default_rng(0)
    shares = 1 / np.arange(1, experts + 1)
    shares /= shares.sum()

    def ranked() -> list[Numbers]:
        return [chance.permutation(experts) for _ in range(layers)]

    names = ranked()
    keys = []
    for token in range(tokens):
        if drift and token == tokens // 2:
            names = ranked()
        for layer in range(layers):
            keys.append(f"attention/{layer}")
            chosen = chance.choice(experts, 4, replace=False, p=shares)
            keys += [f"expert/{layer}/{names[layer][rank]}" for rank in chosen]
    name = "mixture of experts" + ", drifting" * drift
    return trace_of(name, keys, _by_component({"attention": 60, "expert": 20}))


def uniform(groups: int = 200, uses: int = 6000) -> Trace:
    """Return uniformly random uses."""
    drawn = np.random.default_rng(4).integers(groups, size=uses)
    return trace_of("uniform", (f"block/{number}" for number in drawn), lambda key: 100)


def zipf(groups: int = 400, uses: int = 8000) -> Trace:
    """Return random uses with Zipf-distributed frequencies."""
    shares = 1 / np.arange(1, groups + 1)
    drawn = np.random.default_rng(5).choice(groups, uses, p=shares / shares.sum())
    return trace_of("Zipf", (f"block/{number}" for number in drawn), lambda key: 100)


def by_chance() -> list[Trace]:
    return [uniform(), zipf(), experts_by_chance(), experts_by_chance(drift=True)]


# --- lower bounds ---------------------------------------------------------------------------------


def belady(trace: Trace, budget: int) -> int:
    """Return the bytes missed by Belady's policy, which evicts the farthest next use.

    The group in use occupies memory, as for every policy here.
    """
    number = {key: i for i, key in enumerate(trace.groups)}
    size = np.array(list(trace.groups.values()), dtype=np.int64)
    needed = np.full(len(size), -1, dtype=np.int64)  # next use if resident; -1 if not
    room, missed = budget, 0
    for position, key in enumerate(trace.keys):
        here = number[key]
        if needed[here] < 0:
            missed += int(size[here])
            while room < size[here]:
                victim = int(np.argmax(needed))
                needed[victim] = -1
                room += int(size[victim])
            room -= int(size[here])
        needed[here] = trace.next_use[position]
    return missed


def bound_method() -> str:
    return "room and time" if linprog is None else "a linear program"


@functools.cache
def least_missed(trace: Trace, budget: int) -> float:
    """Return the minimum of missed bytes if parts of groups could be kept.

    It is a linear program if scipy is installed; else a weaker (lower) bound.
    """
    if linprog is None:
        return _volume_bound(trace, budget)
    # A variable for each use: the share of the group that is kept until its next use.
    uses = len(trace.keys)
    kept = np.flatnonzero(trace.next_use < uses)
    shares = len(kept)
    entries: list[tuple[int, int, float]] = []
    for column, start in enumerate(kept):
        end = int(trace.next_use[start])
        if end > start + 1:
            entries.append((int(start) + 1, column, -float(trace.sizes[start]) / MB))
            entries.append((end, column, float(trace.sizes[start]) / MB))
    for position in range(uses):
        entries.append((position, shares + position, 1.0))
        if position:
            entries.append((position, shares + position - 1, -1.0))
    rows, columns, values = zip(*entries, strict=True)
    balance = csr_matrix((values, (rows, columns)), shape=(uses, shares + uses))
    saved = np.concatenate([-trace.sizes[kept] / MB, np.zeros(uses)])
    room = [(0.0, float(budget - size) / MB) for size in trace.sizes]
    bounds = [(0.0, 1.0)] * shares + room
    solved = linprog(saved, A_eq=balance, b_eq=np.zeros(uses), bounds=bounds, method="highs")
    if solved.status != 0:
        raise RuntimeError(f"the linear program was not solved: {solved.message}")
    return float(trace.sizes.sum()) + MB * float(solved.fun)


def _volume_bound(trace: Trace, budget: int) -> float:
    """Keep the groups with the least bytes x time, with total bytes x time as the only limit."""
    uses = len(trace.keys)
    kept = np.flatnonzero(trace.next_use < uses)
    length = trace.next_use[kept] - kept
    volume = trace.sizes[kept].astype(float) * length
    order = np.argsort(length, kind="stable")
    filled = np.cumsum(volume[order])
    whole = int(np.searchsorted(filled, float(budget) * uses, side="right"))
    hits = float(trace.sizes[kept][order][:whole].sum())
    if whole < len(order):
        left = float(budget) * uses - (filled[whole - 1] if whole else 0.0)
        hits += left / float(length[order][whole])
    return float(trace.sizes.sum()) - hits


def shortened(trace: Trace, uses: int) -> Trace:
    """Return the first uses of a trace, for a trial run."""
    keys = trace.keys[:uses]
    return Trace(trace.name, keys, {key: trace.groups[key] for key in dict.fromkeys(keys)})
