"""Mixtures of experts, token by token: tierstore against accelerate, with a quarter of the weights

    python tools/bench/experts.py [--small] [--rounds N] [--dir DIR] [--markdown FILE]

Two models with random weights in float32, of about 1.6 GB each: one in the shape of Qwen2-MoE (60
experts in each layer, 4 of them for each token, and a shared one), one in that of Mixtral (8
experts, 2 of them). They are given random tokens, one by one, with a cache of keys and values.
Embeddings are large beside what attention adds, so that the router goes by the token, and chooses
nearly at random. Models that were trained use experts again sooner than that.

A budget of 25 % of the weights, in a control group of RAM in which page cache counts. Compared are
`from_pretrained` of tierstore and accelerate's `disk_offload`. Each run is a process of its own
with a cold page cache; the contenders take turns. What both write before a model first runs (stacks
of the checkpoint's experts, accelerate's folder) is written before, without a limit.

In a run of its own, a hook before each module of experts looks at what the router chose and at
`store.snapshot()`: the bytes of experts that were chosen and not in RAM.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import accelerate
import torch
import transformers

import tierstore
from tierstore.model.sizes import parse_size
from tools.bench import machine
from tools.bench.anonymous import AnonymousPeak
from tools.bench.dispatch import CPU, FRUGAL, differences, disk_bytes
from tools.bench.memory_group import MemoryGroup
from tools.bench.report import Claim, Page

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

OURS, COUNTED, DISK = "tierstore", "tierstore, counted", "accelerate, disk_offload"
PREPARE = "prepare"
EMBEDDING = 50.0  # times what transformers begins with: a variance of 1
SHARE = 0.25  # of the weights: the budget


def qwen2_moe(hidden: int, intermediate: int, layers: int) -> Any:
    """60 experts and a shared one that is four times as large."""
    return transformers.Qwen2MoeConfig(
        **_common(hidden, layers),
        moe_intermediate_size=intermediate,
        shared_expert_intermediate_size=4 * intermediate,
        num_experts=60,
        num_experts_per_tok=4,
    )


def mixtral(hidden: int, intermediate: int, layers: int) -> Any:
    """8 experts."""
    return transformers.MixtralConfig(
        **_common(hidden, layers),
        intermediate_size=intermediate,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


def _common(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 2 * hidden,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


@dataclass(frozen=True)
class Case:
    """What is run: the models, rounds, the limit of RAM, tokens and those before the first that
    counts, by contender."""

    models: dict[str, Callable[[], Any]]
    rounds: int
    limit: str
    tokens: dict[str, tuple[int, int]]


FULL = Case(
    {"Qwen2-MoE": lambda: qwen2_moe(1024, 512, 4), "Mixtral": lambda: mixtral(1024, 1792, 8)},
    rounds=3,
    limit="1000MiB",
    tokens={OURS: (40, 16), COUNTED: (40, 16), DISK: (6, 2)},
)
SMALL = Case(
    {"Qwen2-MoE": lambda: qwen2_moe(128, 64, 2), "Mixtral": lambda: mixtral(128, 256, 2)},
    rounds=1,
    limit="2000MiB",
    tokens={OURS: (12, 4), COUNTED: (12, 4), DISK: (4, 2)},
)


# --- one run, in a process of its own -------------------------------------------------------------


@dataclass
class Decoded:
    """What came of each token: when it was there (seconds), bytes read by then, its logits."""

    times: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@torch.inference_mode()
def decode(model: Any, count: int, bytes_read: Callable[[], int]) -> Decoded:
    """Give a model so many random tokens, one by one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (count, 1, 1), generator=generator)
    cache = transformers.DynamicCache(config=model.config)
    done = Decoded([time.perf_counter()], [bytes_read()])
    for token in tokens:
        logits = model(token, past_key_values=cache, use_cache=True).logits
        done.times.append(time.perf_counter())
        done.read.append(bytes_read())
        done.logits.append(logits.flatten().float())
    return done


class Counter:
    """Counts, before each module of experts runs, the bytes that it will use, and of these those
    that are not in RAM. `key[expert]` is how the store calls one expert's weights."""

    def __init__(self, model: Any, store: tierstore.TierStore) -> None:
        self.routed = self.missing = 0
        self._store = store
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(self._before(name))

    def _before(self, name: str) -> Callable[..., None]:
        def count(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            chosen = {f"[{expert}]" for expert in args[1].unique().tolist()}
            for group in self._store.snapshot().groups:
                _, found, attribute = group.key.rpartition(f"/{name}.")
                if found and attribute[attribute.find("[") :] in chosen:
                    self.routed += group.nbytes
                    if "HOST" not in group.tiers:
                        self.missing += group.nbytes

        return count


def run_here(name: str, place: Path, budget: int, tokens: int) -> dict[str, Any]:
    """Decode as contender `name`. Gives what it took."""
    warm_up()
    found: dict[str, Any] = {}
    with AnonymousPeak() as peak:
        started = time.perf_counter()
        if name == DISK:
            model = accelerate.disk_offload(empty(place), place / "folder", execution_device=CPU)
            found["load"] = time.perf_counter() - started
            done = decode(model, tokens, lambda: disk_bytes()[0])
        else:
            with tierstore.TierStore(budget, place / "store", device=CPU) as store:
                model = ours(place, store)
                found["load"] = time.perf_counter() - started
                if name == COUNTED:
                    done = counted(model, store, tokens, found)
                else:
                    done = decode(model, tokens, lambda: disk_bytes()[0])
                found["written"] = store.stats().bytes_written
    return found | {
        "seconds": differences(done.times),
        "read": differences(done.read),
        "gained": peak.gained,
        "logits": torch.stack(done.logits),
    }


def counted(model: Any, store: tierstore.TierStore, tokens: int, found: dict[str, Any]) -> Decoded:
    """Decode, and note what the hooks and the store count at each token."""
    counter = Counter(model, store)
    notes: list[tuple[int, int, int, int]] = []

    def bytes_read() -> int:
        stats = store.stats()
        notes.append(
            (counter.routed, counter.missing, stats.routed_bytes_used, stats.routed_bytes_read)
        )
        return stats.bytes_read

    done = decode(model, tokens, bytes_read)
    columns = ("routed", "missing", "routed_bytes_used", "routed_bytes_read")
    for column, values in zip(columns, zip(*notes, strict=True), strict=True):
        found[column] = differences(list(values))
    return done


def ours(place: Path, store: tierstore.TierStore) -> Any:
    """The model on a store."""
    cls = transformers.AutoModelForCausalLM
    return tierstore.from_pretrained(
        cls, place / "checkpoint", store, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def empty(place: Path) -> Any:
    """The model with its weights on meta; its buffers are there."""
    config = transformers.AutoConfig.from_pretrained(place / "checkpoint")
    with accelerate.init_empty_weights():
        return transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager"
        ).eval()


def warm_up() -> None:
    """Import what is imported late, and start the threads: no part of any model's cost."""
    for config in (qwen2_moe(64, 64, 1), mixtral(64, 64, 1)):
        model = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager"
        )
        decode(model.eval(), 2, lambda: 0)


@torch.no_grad()
def prepare(config: Any, place: Path, tokens: int) -> dict[str, Any]:
    """Write the checkpoint, accelerate's folder and the store. Gives the plain model's logits."""
    torch.manual_seed(0)
    cls = transformers.AutoModelForCausalLM
    model = cls.from_config(config)
    model.model.embed_tokens.weight.mul_(EMBEDDING)
    model.save_pretrained(place / "checkpoint", max_shard_size="200MB")
    del model
    model = cls.from_pretrained(
        place / "checkpoint", dtype=torch.float32, experts_implementation="eager"
    ).eval()
    accelerate.utils.offload_state_dict(place / "folder", model.state_dict())
    logits = torch.stack(decode(model, tokens, lambda: 0).logits)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    del model
    started = time.perf_counter()
    with tierstore.TierStore(int(SHARE * weights), place / "store", device=CPU) as store:
        ours(place, store)
        load, written = time.perf_counter() - started, store.stats().bytes_written
    return {
        "recipe": config.to_json_string(),
        "weights": weights,
        "experts": experts,
        "load": load,
        "written": written,
        "logits": logits,
    }


# --- all runs -------------------------------------------------------------------------------------


class Runner:
    """Starts runs in processes of their own, with little RAM if it may."""

    def __init__(self, case: Case, small: bool, place: Path) -> None:
        self.case = case
        self.place = place
        self.frugal: set[str] = set()
        self.why_unlimited = ""
        self._small = ["--small"] * small
        try:
            with MemoryGroup(parse_size(case.limit)):
                pass
        except OSError as error:
            self.why_unlimited = f"RAM was not limited ({error})."

    def prepared(self, model: str) -> dict[str, Any]:
        """See `prepare`. What is there from an earlier run is kept."""
        place = self.place / model
        kept = place / "plain.pt"
        found: dict[str, Any] = torch.load(kept) if kept.exists() else {}
        if found.get("recipe") != self.case.models[model]().to_json_string():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            found = self._start(model, PREPARE, 0, self.case.tokens[OURS][0])
            torch.save(found, kept)
        return found

    def run(self, model: str, name: str, budget: int) -> dict[str, Any]:
        """One run. If it is killed for what glibc keeps of freed memory, once more without that."""
        tokens, _ = self.case.tokens[name]
        if self.why_unlimited:
            return self._start(model, name, budget, tokens)
        for more in ({}, FRUGAL) if name not in self.frugal else (FRUGAL,):
            with MemoryGroup(parse_size(self.case.limit)) as group:
                found = self._start(model, name, budget, tokens, group, more)
            if found:
                return found
            self.frugal.add(name)
            machine.drop_page_cache()
        raise SystemExit(f"{name} does not run in {self.case.limit}")

    def _start(
        self,
        model: str,
        name: str,
        budget: int,
        tokens: int,
        group: MemoryGroup | None = None,
        more: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Empty if the system ended it."""
        place = self.place / model
        words = [sys.executable, str(Path(__file__).resolve()), *self._small, "--run", name]
        words += ["--model", model, "--dir", str(place)]
        words += ["--budget", str(budget), "--tokens", str(tokens)]
        done = subprocess.run(
            group.command(words) if group else words,
            capture_output=True,
            text=True,
            env={**os.environ, **(more or {})},
            check=False,
        )
        if done.returncode in (-9, 137) and group:
            return {}
        if done.returncode:
            raise SystemExit(f"{model}, {name}: {done.returncode}\n{done.stderr[-4000:]}")
        found: dict[str, Any] = torch.load(place / "result.pt")
        return found


# --- the page -------------------------------------------------------------------------------------

Runs = dict[str, list[dict[str, Any]]]


def per_token(runner: Runner, name: str, runs: list[dict[str, Any]], what: str) -> list[float]:
    """The median over the tokens that count, of each run."""
    _, first = runner.case.tokens[name]
    return [machine.median(run[what][first:]) for run in runs]


def total(runner: Runner, runs: Runs, what: str) -> float:
    """Bytes per token in the counted run: the mean over the tokens that count."""
    _, first = runner.case.tokens[COUNTED]
    (run,) = runs[COUNTED]
    return float(statistics.mean(run[what][first:]))


def report(
    page: Page, runner: Runner, model: str, plain: dict[str, Any], runs: Runs
) -> Iterator[Claim]:
    page.text(
        f"{model}: {plain['weights'] / 1e6:,.0f} MB of weights, {plain['experts'] / 1e6:,.0f} MB "
        f"of them experts; a budget of {SHARE * plain['weights'] / 1e6:,.0f} MB, "
        f"in {runner.case.limit}. {runner.why_unlimited}"
    )
    seconds = {name: per_token(runner, name, runs[name], "seconds") for name in (OURS, DISK)}
    slower = machine.ratios(seconds[DISK], seconds[OURS])
    columns = (
        "",
        "seconds per token",
        "to tierstore",
        "loading, s",
        "MB read per token",
        "peak MiB",
        "logits",
    )
    rows = []
    for name in (OURS, DISK):
        read = per_token(runner, name, runs[name], "read")
        rows.append(
            [
                name,
                machine.spread(seconds[name], 3),
                machine.spread(slower, 1) if name == DISK else "1",
                f"{machine.median(run['load'] for run in runs[name]):.2f}",
                f"{machine.median(read) / 1e6:,.0f}",
                f"{max(run['gained'] for run in runs[name]) / 2**20:,.0f}",
                likeness(runs[name], plain["logits"]),
            ]
        )
    page.table(columns, rows)
    read, missing, routed = (total(runner, runs, what) for what in ("read", "missing", "routed"))
    used, routed_read = (
        total(runner, runs, what) for what in ("routed_bytes_used", "routed_bytes_read")
    )
    page.table(
        (
            f"{model}, MB per token",
            "chosen",
            "of these not in RAM",
            "read",
            "routed_bytes_used",
            "routed_bytes_read",
        ),
        [[COUNTED, *(f"{x / 1e6:,.1f}" for x in (routed, missing, read, used, routed_read))]],
    )
    page.text(
        f"The first load wrote {plain['written'] / 1e6:,.0f} MB in {plain['load']:.1f} s; "
        f"later ones wrote {max(run['written'] for run in runs[OURS]) / 1e6:,.0f} MB."
    )
    yield Claim(
        f"{model}: bytes read, to those of experts chosen and not in RAM",
        read / missing if missing else math.inf,
        at_most=1.1,
    )
    yield Claim(f"{model}: {DISK} takes at least 5 times as long", machine.median(slower), 5)
    same = all(equal(run["logits"], plain["logits"]) for run in runs[OURS] + runs[COUNTED])
    yield Claim(f"{model}: logits are those of the plain model", float(same), at_least=1)
    exact = used == routed
    yield Claim(f"{model}: the store counts as the hooks do", float(exact), at_least=1)


def equal(logits: torch.Tensor, plain: torch.Tensor) -> bool:
    """Whether all logits are those of the plain model, of as many tokens."""
    return torch.equal(logits, plain[: len(logits)])


def likeness(runs: list[dict[str, Any]], plain: torch.Tensor) -> str:
    """How logits compare with those of the plain model."""
    if all(equal(run["logits"], plain) for run in runs):
        return "equal"
    off = max((run["logits"] - plain[: len(run["logits"])]).abs().max().item() for run in runs)
    return f"differ by {off:.1e}"


def measure(case: Case, small: bool, place: Path, page: Page) -> Iterator[Claim]:
    runner = Runner(case, small, place)
    for model in case.models:
        plain = runner.prepared(model)
        budget = int(SHARE * plain["weights"])
        runs = {
            name: (lambda name=name: runner.run(model, name, budget))  # noqa: B023 - called here
            for name in (OURS, DISK)
        }
        before = (lambda: None) if small else machine.drop_page_cache
        found = machine.interleave(runs, case.rounds, before=before, doing=model)
        found[COUNTED] = [runner.run(model, COUNTED, budget)]
        yield from report(page, runner, model, plain, found)
    for name in runner.frugal:
        page.text(
            f"The system killed {name}, as glibc keeps what is freed. It then ran with "
            f"`{'='.join(*FRUGAL.items())}`."
        )
    ours_, first = case.tokens[OURS]
    peers, peers_first = case.tokens[DISK]
    page.text(
        f"{ours_} tokens, of which those after {first} count (accelerate: {peers}, after "
        f"{peers_first}). {case.rounds} rounds; medians over tokens and rounds, ranges over rounds "
        "in parentheses; the second table has means over tokens."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small models, once: does it run?")
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument("--dir", type=Path, help="where the models are kept")
    parser.add_argument("--markdown", type=Path, help="write the page here too")
    parser.add_argument("--run", choices=[PREPARE, OURS, COUNTED, DISK], help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = SMALL if options.small else FULL
    if options.run == PREPARE:
        found = prepare(case.models[options.model](), options.dir, options.tokens)
        torch.save(found, options.dir / "result.pt")
        return 0
    if options.run:
        found = run_here(options.run, options.dir, options.budget, options.tokens)
        torch.save(found, options.dir / "result.pt")
        return 0
    if options.rounds:
        case = dataclasses.replace(case, rounds=options.rounds)
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-") as scratch:
        place = (options.dir or Path(scratch)) / ("small" if options.small else "full")
        place.mkdir(parents=True, exist_ok=True)
        page = Page(__doc__, place, ("torch", "transformers", "accelerate"))
        page.claims(measure(case, options.small, place, page))
        page.write(options.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
