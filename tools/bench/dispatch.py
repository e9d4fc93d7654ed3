"""Text from a model that is dispatched: tierstore against accelerate, with little RAM and with much

A Llama of 2.1 GB (float32, 18 layers, a sharded safetensors checkpoint) writes text, the likeliest
token each time, with a cache of keys and values. Compared are `load_checkpoint_and_dispatch` of
tierstore and of accelerate (`device_map="auto"`, with the same RAM for weights), accelerate's
`disk_offload`, the `device_map` of transformers' `from_pretrained` (accelerate's hooks, and an
index into the checkpoint), and the plain model, whose weights are maps of the files. All on disk,
`device_map={"": "disk"}`, is an error in accelerate with safetensors, and what `disk_offload` does.

Below the working set: a control group of 900 MiB of RAM, where page cache counts and the process
itself takes a third. Where accelerate is killed there, because glibc keeps freed memory, it runs
again with a setting of glibc that gives it back at once, and the page says so. Above it: no limit,
and a budget in which the model fits; then accelerate's `device_map` puts all on the CPU.

Each run is a process of its own with a cold page cache and an empty folder; the contenders take
turns. The tokens of a run after the third count, by their median; the first, which reads all, is
apart. Bytes are those that the process made the disk read and write.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

import tierstore
from tools.bench import llama, machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.apart import FRUGAL, limited, unlimited
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, middle, most, ranged, ratios, spread

PACKAGES = ("torch", "transformers", "accelerate")
ROUNDS = 3
FULL = llama.Shape(hidden=1536, intermediate=4096, layers=18)
SMALL = llama.Shape(hidden=256, intermediate=512, layers=6, shard="5MB")
FIRST_THAT_COUNTS = 3  # tokens before it: the order of use is learned, caches fill
CPU = torch.device("cpu")
BELOW, ABOVE = "below", "above"
OURS, PLAIN, DISK = "tierstore", "plain maps", "accelerate, disk_offload"
SPLIT, INDEXED = "accelerate, load and dispatch", "transformers, device_map"


def plain(checkpoint: Path, **options: Any) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, **options
    ).eval()


def by_tierstore(checkpoint: Path, folder: Path, budget: int, stack: ExitStack) -> Any:
    store = stack.enter_context(tierstore.TierStore(budget, folder, device=CPU))
    return tierstore.load_checkpoint_and_dispatch(llama.empty_for(checkpoint), checkpoint, store)


def by_disk_offload(checkpoint: Path, folder: Path, budget: int, stack: ExitStack) -> Any:
    return accelerate.disk_offload(plain(checkpoint), folder, execution_device=CPU)


def by_loading_and_dispatching(
    checkpoint: Path, folder: Path, budget: int, stack: ExitStack
) -> Any:
    """The first layers in RAM, as many as fit, and the others in files of accelerate's format."""
    return accelerate.load_checkpoint_and_dispatch(
        llama.empty_for(checkpoint),
        checkpoint,
        device_map="auto",
        max_memory={"cpu": budget},
        no_split_module_classes=["LlamaDecoderLayer"],
        offload_folder=folder,
    )


def by_transformers(checkpoint: Path, folder: Path, budget: int, stack: ExitStack) -> Any:
    """The same device map, but layers on disk are read from the checkpoint."""
    memory = {"cpu": budget}
    return plain(checkpoint, device_map="auto", max_memory=memory, offload_folder=folder)


CONTENDERS: dict[str, Callable[[Path, Path, int, ExitStack], Any]] = {
    OURS: by_tierstore,
    DISK: by_disk_offload,
    SPLIT: by_loading_and_dispatching,
    INDEXED: by_transformers,
    PLAIN: lambda checkpoint, *_: plain(checkpoint),
}


class Watched(llama.Written):
    """Text, with the bytes read at each token."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.read.append(machine.disk_bytes()[0])


def differences(values: list[Any]) -> list[Any]:
    return [after - before for before, after in itertools.pairwise(values)]


def written(name: str, checkpoint: Path, folder: Path, budget: int, tokens: int) -> Run:
    """Write text as a contender does. Seconds and bytes read are medians by token."""
    llama.warm_up()
    _, before = machine.disk_bytes()
    folder.mkdir()
    with AnonymousPeak() as peak, ExitStack() as stack:
        started = time.perf_counter()
        model = CONTENDERS[name](checkpoint, folder, budget, stack)
        load = time.perf_counter() - started
        text = llama.write(model, tokens, watched := Watched())
        weights = llama.weight_bytes(model)
    seconds, read = differences(text.times), differences(watched.read)
    return {
        "load": load,
        "first": seconds[0],
        "seconds": median(seconds[FIRST_THAT_COUNTS:]),
        "read": median(read[FIRST_THAT_COUNTS:]),
        "written": machine.disk_bytes()[1] - before,
        "start": peak.start,
        "gained": peak.gained,
        "weights": weights,
        "tokens": text.tokens,
        "logits": text.logits,
    }


def likeness(runs: list[Run], reference: Run) -> str:
    """Compare text and logits with those of the plain model that has all the RAM it wants."""
    if any(run["tokens"] != reference["tokens"] for run in runs):
        return "DIFFERENT TEXT"
    differs = max((run["logits"] - reference["logits"]).abs().max().item() for run in runs)
    return f"same, logits differ by {differs:.1e}" if differs else "same, logits equal"


def measure(bench: Bench) -> Iterator[Claim]:
    checkpoint = llama.save(SMALL if bench.small else FULL, bench.kept / "checkpoint")
    tokens, limit = (6, 2000 << 20) if bench.small else (16, 900 << 20)
    budgets = {BELOW: 8 << 20, ABOVE: 64 << 20}
    contenders: dict[str, Any] = {BELOW: (OURS, DISK), ABOVE: (OURS, DISK, PLAIN)}
    if not bench.small:
        budgets, contenders = {BELOW: 400 << 20, ABOVE: 3 << 30}, dict.fromkeys(budgets, CONTENDERS)

    def run(regime: str, name: str) -> Run:
        folder = bench.scratch / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        nbytes = limit if regime == BELOW else None
        return dict(limited(nbytes, written, name, checkpoint, folder, budgets[regime], tokens)[0])

    found = bench.turns(
        {(r, n): lambda r=r, n=n: run(r, n) for r in contenders for n in contenders[r]}, cold=True
    )

    def to(regime: str, name: str, other: str = OURS) -> list[float]:
        """Seconds per token of a contender to those of another, round by round."""
        return ratios(*(column(found[regime, each], "seconds") for each in (name, other)))

    weights = found[BELOW, OURS][0]["weights"]
    reference = found[ABOVE, PLAIN][0]
    for regime in (BELOW, ABOVE):
        where = f"in {limit >> 20} MiB" if regime == BELOW else "RAM without a limit"
        bench.page.text(
            f"{regime.capitalize()} the working set: {weights / 1e6:,.0f} MB of weights, {where}, "
            f"a budget of {budgets[regime] >> 20} MiB. {unlimited(limit) * (regime == BELOW)}"
        )
        ours = column(found[regime, OURS], "seconds")
        columns: dict[str, Callable[[Any], object]] = {
            "seconds per token": ranged("seconds", 3),
            "to tierstore": lambda runs, ours=ours: spread(ratios(column(runs, "seconds"), ours)),
            "first token, s": middle("first"),
            "loading, s": middle("load"),
            "MB read per token": middle("read", 0, 1e-6),
            "MB written": most("written", 1e-6),
            "peak MiB": most("gained", 2**-20),
            "text": lambda runs: likeness(runs, reference),
        }
        bench.page.compare("", {n: found[regime, n] for n in contenders[regime]}, columns)
    for name in contenders[BELOW]:
        if killed := sum(run.get("frugal", False) for run in found[BELOW, name]):
            bench.page.text(
                f"The system killed {name} in {killed} of {bench.rounds} runs below the working "
                f"set, as glibc keeps freed memory. It then ran with `{'='.join(*FRUGAL.items())}`."
            )
    start = max(run["start"] for runs in found.values() for run in runs)
    bench.page.text(
        "The peak is anonymous memory over that of the process before there was a model "
        f"({start / 2**20:,.0f} MiB). MB written are those of loading and of all {tokens} tokens. "
        f"Above the working set, tierstore to the plain model: {spread(to(ABOVE, OURS, PLAIN))}. "
        f"{bench.rounds} rounds; medians, and ranges in parentheses."
    )
    for peer in (each for each in (DISK, SPLIT) if (BELOW, each) in found):
        slower = median(to(BELOW, peer))
        yield Claim(f"below, {peer} takes at least 1.8 times as long", slower, at_least=1.8)
    slower = median(to(ABOVE, OURS, DISK))
    yield Claim(f"above, no slower than {DISK} (time to time)", slower, at_most=1.0)
    mine = found[BELOW, OURS] + found[ABOVE, OURS]
    same = all(run["tokens"] == reference["tokens"] for run in mine)
    yield Claim("the text is that of the plain model", float(same), at_least=1)
    yield Claim(
        "tierstore writes next to nothing, MB", max(column(mine, "written")) / 1e6, at_most=0.1
    )
    over = (max(column(found[BELOW, OURS], "gained")) - budgets[BELOW]) / 2**20
    yield Claim("below, its peak is at most 64 MiB over the budget", over, at_most=64)
