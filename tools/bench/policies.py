"""Bytes read and stalls of the planner, against lower bounds

Everything is simulated: the real planner, policy and schedule run with a simulated clock and mover.
So the figures are exact and equal on every machine, except for the last part, the cost of planning.
Traces are orders in which models use their groups, generated or recorded. *Belady* knows the future
and evicts the group whose next use is farthest away. The *bound* is the minimum of missed bytes if
parts of groups could be kept: a linear program, if scipy is installed.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tierstore.model.events import Event, Leased, Released
from tierstore.model.moves import Instruction
from tierstore.model.tiers import Tier
from tierstore.plan.planner import Planner
from tierstore.progress import bar
from tierstore.simulation import Clock, Outcome, Use, planner_with_groups, play, simulate
from tools.bench import traces
from tools.bench.page import Claim, Page
from tools.bench.runner import Bench
from tools.bench.traces import Trace, belady, least_missed

PACKAGES = ("numpy",)
POLICIES = ("next-use", "lru")
DISK_BANDWIDTH = 3e9  # bytes per second; only the ratio to compute times matters

TO_HOST = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)


@dataclass
class Limit:
    """An upper limit of a figure, and the figures found so far."""

    text: str
    at_most: float
    found: list[tuple[float, str]] = field(default_factory=list)

    def add(self, value: float, where: str) -> str:
        """Record a figure. Return it as a table cell, marked if it exceeds the limit."""
        self.found.append((value, where))
        return f"{value:.3f}{'' if value <= self.at_most else ' !'}"

    def claim(self) -> Claim:
        """Return the claim that the worst figure is within the limit."""
        worst, where = max(self.found)
        missed = sum(value > self.at_most for value, _ in self.found)
        count = f"; {missed} of {len(self.found)} are above" if missed else ""
        text = f"{self.text}, worst for {where}{count}"
        return Claim(text, worst, at_most=self.at_most)


@dataclass(frozen=True)
class Scope:
    """The extent of the simulation, the recorded traces, and the page."""

    size: Size
    recorded: list[Trace]
    page: Page

    def table(self, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Add a table to the page while its rows are computed."""
        self.page.text(f"## {title}")
        self.page.table(head, bar(rows, title, "rows"))


def on_demand(trace: Trace, budget: int, policy: str) -> int:
    """Return the bytes read from disk without prefetching."""
    uses = [Use(key, 0.0) for key in trace.keys]
    budgets = {Tier.HOST: budget, Tier.DISK: None}
    outcome = simulate(trace.groups, uses, budgets, policy=policy, prefetch=False)
    return outcome.bytes_moved.get(TO_HOST, 0)


def budgets_of(trace: Trace, shares: Iterable[float]) -> list[tuple[float, int]]:
    """Return the budgets that hold two of the largest groups."""
    sized = [(share, int(trace.nbytes * share)) for share in shares]
    return [(share, budget) for share, budget in sized if budget >= 2 * trace.largest]


# --- without prefetch -----------------------------------------------------------------------------


def missed_bytes(scope: Scope) -> list[Limit]:
    learned = Limit("deterministic traces: bytes missed / Belady's", 1.05)
    recordings = Limit("recorded traces: bytes missed / Belady's", 1.05)
    against_lru = Limit("random and Zipf traces: bytes missed / LRU's", 1.02)
    kinds = [
        *((trace, learned) for trace in scope.size.deterministic()),
        *((trace, recordings) for trace in scope.recorded),
        *((trace, None) for trace in scope.size.irregular()),
        *((trace, against_lru) for trace in scope.size.by_chance()),
    ]

    def rows() -> Iterator[Sequence[str]]:
        for trace, claim in kinds:
            for share, budget in budgets_of(trace, scope.size.shares):
                best = belady(trace, budget)
                ours, lru = (on_demand(trace, budget, policy) for policy in POLICIES)
                where = f"{trace.name} at {share:.0%}"
                to_best, to_lru = f"{ours / best:.3f}", f"{ours / lru:.3f}"
                if claim is against_lru:
                    to_lru = claim.add(ours / lru, where)
                elif claim is not None:
                    to_best = claim.add(ours / best, where)
                yield (
                    trace.name,
                    f"{share:.0%}",
                    f"{best / 1e9:.1f}",
                    to_best,
                    f"{lru / best:.3f}",
                    to_lru,
                    f"{least_missed(trace, budget) / best:.3f}",
                )

    head = ("trace", "budget", "Belady, GB", "ours / Belady", "LRU / Belady", "ours / LRU")
    scope.table("Without prefetch: bytes missed", (*head, "bound / Belady"), rows())
    return [claim for claim in (learned, recordings, against_lru) if claim.found]


# --- host and device as one hierarchy -------------------------------------------------------------

SPLITS = ((0.1, 0.3), (0.2, 0.4), (0.3, 0.6), (0.5, 0.4))
"""Shares of the working set: on the device, and in host memory."""


def hierarchy(scope: Scope) -> list[Limit]:
    link = Limit("bytes over the link / the bound for the device", 1.15)
    disk = Limit("bytes from disk / the bound for device and host together", 1.35)

    def rows() -> Iterator[Sequence[str]]:
        for trace, (device, host) in itertools.product(scope.size.hierarchies(), scope.size.splits):
            on_device, in_host = int(trace.nbytes * device), int(trace.nbytes * host)
            if on_device < 2 * trace.largest:
                continue
            budgets = {Tier.DEVICE: on_device, Tier.HOST: in_host, Tier.DISK: None}
            uses = [Use(key, 0.0) for key in trace.keys]
            moved = simulate(trace.groups, uses, budgets, prefetch=False).bytes_moved
            where = f"{trace.name}, device {device:.0%}, host {host:.0%}"
            to_device = moved.get(TO_DEVICE, 0) / least_missed(trace, on_device)
            to_host = moved.get(TO_HOST, 0) / least_missed(trace, on_device + in_host)
            back = moved.get((Tier.DEVICE, Tier.HOST), 0) / max(moved.get(TO_DEVICE, 0), 1)
            yield (
                trace.name,
                f"{device:.0%}",
                f"{host:.0%}",
                link.add(to_device, where),
                disk.add(to_host, where),
                f"{back:.3f}",
            )

    head = ("trace", "device", "host", "link / bound", "disk / bound", "back / over the link")
    scope.table("Host and device, without prefetch", head, rows())
    return [link, disk]


# --- with prefetch --------------------------------------------------------------------------------


def overlap(scope: Scope) -> list[Limit]:
    loops = Limit("loops: time / the bound", 1.18), Limit("loops: bytes read / the bound", 1.4)
    cut = Limit("cut blocks: time / the bound", 1.18), Limit("cut blocks: bytes / the bound", 1.4)

    def rows() -> Iterator[Sequence[str]]:
        kinds = [(trace, loops) for trace in scope.size.loops()]
        kinds += [(trace, cut) for trace in scope.size.cut_loops()]
        for trace, (seconds, nbytes) in kinds:
            for share, budget in budgets_of(trace, scope.size.loop_shares):
                least = least_missed(trace, budget)
                for ratio in scope.size.ratios:
                    outcome = with_compute(trace, budget, ratio)
                    limit = max(outcome.computed_seconds, least / DISK_BANDWIDTH)
                    where = f"{trace.name} at {share:.0%}, F = {ratio:g}"
                    slower = seconds.add(outcome.seconds / limit, where)
                    more = nbytes.add(outcome.bytes_moved.get(TO_HOST, 0) / least, where)
                    stalled = outcome.stalled_seconds / outcome.seconds
                    acquires = f"{outcome.hits} / {outcome.late} / {outcome.misses}"
                    cells = (f"{ratio:g}", f"{limit:.1f}", slower, more, f"{stalled:.0%}", acquires)
                    yield (trace.name, f"{share:.0%}", *cells)

    head = ("trace", "budget", "F", "bound, s", "time / bound", "bytes / bound", "stalled")
    scope.table(
        "With prefetch (F: seconds to fetch a group / seconds of its compute)",
        (*head, "hits / late / misses"),
        rows(),
    )
    return [claim for claim in (*loops, *cut) if claim.found]


def with_compute(trace: Trace, budget: int, ratio: float) -> Outcome:
    """Simulate a trace whose groups take `ratio` times as long to fetch as to compute with."""
    uses = [
        Use(key, nbytes / DISK_BANDWIDTH / ratio)
        for key, nbytes in zip(trace.keys, trace.sizes.tolist(), strict=True)
    ]
    budgets = {Tier.HOST: budget, Tier.DISK: None}
    return simulate(trace.groups, uses, budgets, bandwidth={TO_HOST: DISK_BANDWIDTH})


# --- cost of planning -----------------------------------------------------------------------------

HISTORY = 8192
MEASURED = 2000


def cost(scope: Scope) -> list[Limit]:
    """Measure the time per use on this machine of all decisions, without any transfers."""
    claim = Limit("microseconds of planning for each acquire and release", 100)

    def rows() -> Iterator[Sequence[str]]:
        for groups, prefetch in itertools.product(scope.size.group_counts, (False, True)):
            for order, keys in orders(groups):
                micros = 1e6 * marginal_cost(groups, keys, prefetch, scope.size.repeats)
                where = f"{groups} groups, {order}, {'with' if prefetch else 'without'} prefetch"
                yield (
                    f"{groups:,}",
                    order,
                    "yes" if prefetch else "no",
                    claim.add(micros, where),
                )

    head = ("groups", "order", "prefetch", "microseconds")
    scope.table(f"Cost of one use after {HISTORY:,} others", head, rows())
    return [claim]


def orders(groups: int) -> list[tuple[str, list[str]]]:
    """Return a loop over all groups, one that the history holds twice, and a random order."""
    uses = HISTORY + MEASURED
    few = min(groups, HISTORY // 3)
    return [
        ("loop", [f"g{i % groups}" for i in range(uses)]),
        ("inner loop", [f"g{i % few}" for i in range(uses)]),
        ("Zipf", [f"g{key[6:]}" for key in traces.zipf(groups, uses).keys]),
    ]


def marginal_cost(groups: int, keys: list[str], prefetch: bool, repeats: int) -> float:
    """Return the seconds that planner, policy and schedule take for each of the last uses.

    The events of a simulated run are recorded and replayed without the simulated mover. The fastest
    of several replays counts.
    """
    sizes = {f"g{i}": 1 << 20 for i in range(groups)}
    budgets = {Tier.HOST: (groups << 20) // 2, Tier.DISK: None}
    bandwidth = {TO_HOST: DISK_BANDWIDTH} if prefetch else {}
    seconds = 2 * (1 << 20) / DISK_BANDWIDTH if prefetch else 0.0

    clock = Clock()
    noted = RecordingPlanner(planner_with_groups(sizes, budgets, clock, prefetch=prefetch))
    play(cast(Planner, noted), clock, [Use(key, seconds) for key in keys], bandwidth)
    ends = [at for at, (_, event) in enumerate(noted.log, 1) if isinstance(event, Released)]

    def run() -> float:
        planner, began = planner_with_groups(sizes, budgets, Clock(), prefetch=prefetch), 0.0
        for part in (noted.log[: ends[HISTORY - 1]], noted.log[ends[HISTORY - 1] :]):
            began = time.process_time()
            for now, event in part:
                if isinstance(event, Leased):  # queries that precede a lease
                    planner.error_of(event.group)
                    planner.leasable(event.group, event.access)
                planner.handle(event, now)
        return (time.process_time() - began) / (len(keys) - HISTORY)

    return min(run() for _ in range(repeats))


class RecordingPlanner:
    """A planner that records all events that it handles."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.log: list[tuple[float, Event]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        self.log.append((now, event))
        return self.planner.handle(event, now)


# --- all of it ------------------------------------------------------------------------------------

Part = Callable[[Scope], list[Limit]]
PARTS: dict[str, Part] = {
    "missed": missed_bytes,
    "hierarchy": hierarchy,
    "prefetch": overlap,
    "cost": cost,
}


@dataclass(frozen=True)
class Size:
    """The extent of a run."""

    deterministic: Callable[[], list[Trace]] = traces.deterministic
    irregular: Callable[[], list[Trace]] = traces.irregular
    by_chance: Callable[[], list[Trace]] = traces.by_chance
    hierarchies: Callable[[], list[Trace]] = lambda: [
        traces.cyclic(),
        traces.flux(),
        traces.two_experts(),
        traces.training(),
        traces.two_pipelines(),
    ]
    loops: Callable[[], list[Trace]] = lambda: [
        traces.cyclic(57, 20),
        traces.flux(3, 20),
        traces.two_experts(1, 24, 12),
    ]
    cut_loops: Callable[[], list[Trace]] = lambda: [traces.cut_blocks()]
    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    loop_shares: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    splits: tuple[tuple[float, float], ...] = SPLITS
    ratios: tuple[float, ...] = (0.25, 0.5, 1, 2, 4)
    group_counts: tuple[int, ...] = (60, 1000, 10_000)
    repeats: int = 3


SMALL = Size(
    deterministic=lambda: [traces.cyclic(), traces.training()],
    irregular=lambda: [],
    by_chance=lambda: [traces.uniform(uses=2000), traces.zipf(uses=2000)],
    hierarchies=lambda: [traces.cyclic()],
    loops=lambda: [traces.cyclic(57, 20)],
    cut_loops=lambda: [],
    shares=(0.3, 0.7),
    loop_shares=(0.5,),
    splits=((0.2, 0.4),),
    ratios=(0.5, 2),
    group_counts=(60,),
    repeats=1,
)


def recorded_trace(path: str | Path) -> Trace:
    from tierstore.trace import read_trace

    recorded = read_trace(path)
    return Trace(Path(path).stem, tuple(key for key, _ in recorded.uses), dict(recorded.groups))


def record(steps: int = 15) -> Trace:
    """Record a tiny FluxPipeline for two prompts, with a third of its weights in memory."""
    from tests import pipelines
    from tierstore import TierStore, enable_group_offload

    with tempfile.TemporaryDirectory() as directory:
        pipe = pipelines.load("flux", pipelines.build_flux(Path(directory, "flux"), "tiny"))
        budget = pipelines.weight_bytes(pipe) // 3
        path = Path(directory, "recorded, tiny Flux.json")
        with TierStore(budget, Path(directory, "store"), device="cpu") as store:
            with enable_group_offload(pipe, store):
                for seed in range(2):
                    pipelines.run("flux", pipe, steps=steps, seed=seed)
            store.trace(path)
        return recorded_trace(path)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part")
    parser.add_argument("--trace", action="append", default=[], help="file of a recorded trace")


def measure(bench: Bench) -> Iterator[Claim]:
    parts = bench.options.only or list(PARTS)
    recorded = [recorded_trace(path) for path in bench.options.trace]
    if "missed" in parts and not recorded:
        recorded.append(record())
    bound = traces.bound_method()
    bench.page.text(f"Bounds by {bound}. Figures with a `!` miss a claim.")
    scope = Scope(SMALL if bench.small else Size(), recorded, bench.page)
    limits = [limit for name in parts for limit in PARTS[name](scope)]
    bench.page.text("## Claims")
    yield from (limit.claim() for limit in limits)
