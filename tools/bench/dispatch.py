"""Text generation with a dispatched model: tierstore against accelerate, with little and ample RAM

A Llama of 2.1 GB (float32, 18 layers, a sharded safetensors checkpoint) generates text greedily,
with a KV cache. The contenders are `load_checkpoint_and_dispatch` of tierstore and of accelerate
(`device_map="auto"`, with the same RAM for weights), accelerate's `disk_offload`, the `device_map`
of transformers' `from_pretrained` (accelerate's hooks with an index into the checkpoint), and the
plain model, whose weights are maps of the files. Everything on disk, `device_map={"": "disk"}`, is
an error in accelerate with safetensors; `disk_offload` does that.

Below the working set: a control group of 900 MiB of RAM including page cache, of which the process
itself takes a third. If accelerate is killed there because glibc keeps freed memory, it runs again
with a glibc setting that returns it at once, and the page says so. Above the working set: no limit,
and a budget that holds the model; then accelerate's `device_map` puts everything on the CPU.

Each run is a separate process with a cold page cache and an empty folder; the contenders take
turns. Figures are medians over the tokens after the third; the first token, which reads everything,
is listed separately. Bytes are those that the process made the disk read and write.
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
FIRST_COUNTED = 3  # earlier tokens learn the order of use and fill caches
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
    """Use accelerate: as many first layers in RAM as fit, the rest in files of its format."""
    return accelerate.load_checkpoint_and_dispatch(
        llama.empty_for(checkpoint),
        checkpoint,
        device_map="auto",
        max_memory={"cpu": budget},
        no_split_module_classes=["LlamaDecoderLayer"],
        offload_folder=folder,
    )


def by_transformers(checkpoint: Path, folder: Path, budget: int, stack: ExitStack) -> Any:
    """Use transformers with the same device map; layers on disk are read from the checkpoint."""
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
    """Generated text, with the bytes read at each token."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.read.append(machine.disk_bytes()[0])


def differences(values: list[Any]) -> list[Any]:
    return [after - before for before, after in itertools.pairwise(values)]


def written(name: str, checkpoint: Path, folder: Path, budget: int, tokens: int) -> Run:
    """Generate text with a contender. Seconds and bytes read are medians per token."""
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
        "seconds": median(seconds[FIRST_COUNTED:]),
        "read": median(read[FIRST_COUNTED:]),
        "written": machine.disk_bytes()[1] - before,
        "start": peak.start,
        "gained": peak.gained,
        "weights": weights,
        "tokens": text.tokens,
        "logits": text.logits,
    }


def likeness(runs: list[Run], reference: Run) -> str:
    """Compare text and logits to those of the plain model without a memory limit."""
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
        """Return the ratios of two contenders' seconds per token, round by round."""
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
                "set, because glibc keeps freed memory. It then ran with "
                f"`{'='.join(*FRUGAL.items())}`."
            )
    start = max(run["start"] for runs in found.values() for run in runs)
    bench.page.text(
        "The peak is anonymous memory above that of the process before it built a model "
        f"({start / 2**20:,.0f} MiB). MB written include loading and all {tokens} tokens. "
        f"Above the working set, tierstore / plain model: {spread(to(ABOVE, OURS, PLAIN))}. "
        f"{bench.rounds} rounds; medians, and ranges in parentheses."
    )
    for peer in (each for each in (DISK, SPLIT) if (BELOW, each) in found):
        slower = median(to(BELOW, peer))
        yield Claim(f"below: time of {peer} / time of tierstore", slower, at_least=1.8)
    slower = median(to(ABOVE, OURS, DISK))
    yield Claim(f"above: time / time of {DISK}", slower, at_most=1.0)
    mine = found[BELOW, OURS] + found[ABOVE, OURS]
    same = all(run["tokens"] == reference["tokens"] for run in mine)
    yield Claim("the text equals that of the plain model", float(same), at_least=1)
    yield Claim(
        "tierstore writes next to nothing, MB", max(column(mine, "written")) / 1e6, at_most=0.1
    )
    over = (max(column(found[BELOW, OURS], "gained")) - budgets[BELOW]) / 2**20
    yield Claim("below: MiB of its peak over the budget", over, at_most=64)
