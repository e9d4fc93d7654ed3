"""Mixtures of experts, token by token: tierstore against accelerate, with a quarter of the weights

Two models with random float32 weights of about 1.6 GB: one with the shape of Qwen2-MoE (60 experts
per layer, 4 of them per token, and a shared one), one with that of Mixtral (8 experts, 2 per
token). Each decodes random tokens, one by one, with a KV cache. Embeddings are large compared to
the output of attention, so the router depends on the token and selects almost at random. Trained
models reuse experts sooner.

The budget is 25 % of the weights, in a control group of RAM including page cache. The contenders
are `from_pretrained` of tierstore and accelerate's `disk_offload`. Each run is a separate process
with a cold page cache; the contenders take turns. The files that they need (stacks of the
checkpoint's experts, accelerate's folder) are written before the first run, without a limit.

In a separate run, a hook before each experts module compares the router's selection to
`store.snapshot()`, to count the bytes of selected experts that are not in RAM.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

import tierstore
from tools.bench.anonymous import AnonymousPeak
from tools.bench.apart import FRUGAL, apart, limited, unlimited
from tools.bench.dispatch import CPU, differences
from tools.bench.machine import disk_bytes
from tools.bench.page import Claim
from tools.bench.runner import Bench, Run, column, median, middle, most, ranged, ratios, spread

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

PACKAGES = ("torch", "transformers", "accelerate")
ROUNDS = 3
OURS, COUNTED, DISK = "tierstore", "tierstore, counted", "accelerate, disk_offload"
EMBEDDING = 50.0  # scales transformers' initial embeddings to a variance of 1
SHARE = 0.25  # of the weights: the budget
LIMIT = 1000 << 20
MODEL = transformers.AutoModelForCausalLM
EAGER = {"experts_implementation": "eager"}


@dataclass(frozen=True)
class Shape:
    """Elements per token and in an expert, and layers; 60 experts and a shared one, or 8."""

    qwen: bool
    hidden: int
    inner: int
    layers: int

    def config(self) -> Any:
        """Return the configuration of transformers."""
        common: dict[str, Any] = {
            "vocab_size": 2 * self.hidden,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.hidden // 64,
            "bos_token_id": None,
            "eos_token_id": None,
            "dtype": "float32",
        }
        if self.qwen:
            sizes = {"moe_intermediate_size": self.inner, "num_experts": 60}
            sizes["shared_expert_intermediate_size"] = 4 * self.inner
            return transformers.Qwen2MoeConfig(**common, **sizes, num_experts_per_tok=4)
        sizes = {"intermediate_size": self.inner, "num_local_experts": 8}
        return transformers.MixtralConfig(**common, **sizes, num_experts_per_tok=2)


FULL = {"Qwen2-MoE": Shape(True, 1024, 512, 4), "Mixtral": Shape(False, 1024, 1792, 8)}
SMALL = {"Qwen2-MoE": Shape(True, 128, 64, 2), "Mixtral": Shape(False, 128, 256, 2)}


@dataclass
class Decoded:
    """For each token: its time (seconds), the bytes read until then, and its logits."""

    times: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@torch.inference_mode()
def decode(model: Any, count: int, bytes_read: Callable[[], int] = lambda: 0) -> Decoded:
    """Decode `count` random tokens, one by one."""
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
    """Counts the bytes that each experts module is about to use, and those of them not in RAM.

    The store's key of an expert's weights ends in `[expert]`.
    """

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


def decoded(name: str, place: Path, budget: int, tokens: int) -> Run:
    """Decode with a contender. Return figures per token."""
    for shape in SMALL.values():  # imports modules and starts threads before the measurement
        decode(MODEL.from_config(shape.config(), **EAGER).eval(), 2)
    found: Run = {}
    with AnonymousPeak() as peak:
        started = time.perf_counter()
        if name == DISK:
            config = transformers.AutoConfig.from_pretrained(place / "checkpoint")
            with accelerate.init_empty_weights():
                model = MODEL.from_config(config, **EAGER).eval()
            model = accelerate.disk_offload(model, place / "folder", execution_device=CPU)
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
    found |= {"seconds": differences(done.times), "read": differences(done.read)}
    return found | {"gained": peak.gained, "logits": torch.stack(done.logits)}


def counted(model: Any, store: tierstore.TierStore, tokens: int, found: Run) -> Decoded:
    """Decode, and record the counts of the hooks and of the store at each token."""
    counter = Counter(model, store)
    notes: list[tuple[int, int, int, int]] = []

    def bytes_read() -> int:
        stats = store.stats()
        routed = stats.routed_bytes_used, stats.routed_bytes_read
        notes.append((counter.routed, counter.missing, *routed))
        return stats.bytes_read

    done = decode(model, tokens, bytes_read)
    columns = ("routed", "missing", "routed_bytes_used", "routed_bytes_read")
    for figure, values in zip(columns, zip(*notes, strict=True), strict=True):
        found[figure] = differences(list(values))
    return done


def ours(place: Path, store: tierstore.TierStore) -> Any:
    """Load the model on a store."""
    return tierstore.from_pretrained(
        MODEL, place / "checkpoint", store, dtype=torch.float32, **EAGER
    ).eval()


@torch.no_grad()
def prepare(shape: Shape, place: Path, tokens: int) -> Run:
    """Write the checkpoint, accelerate's folder and the store. Return the plain logits."""
    torch.manual_seed(0)
    model = MODEL.from_config(shape.config())
    model.model.embed_tokens.weight.mul_(EMBEDDING)
    model.save_pretrained(place / "checkpoint", max_shard_size="200MB")
    del model
    model = MODEL.from_pretrained(place / "checkpoint", dtype=torch.float32, **EAGER).eval()
    accelerate.utils.offload_state_dict(place / "folder", model.state_dict())
    logits = torch.stack(decode(model, tokens).logits)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    del model
    started = time.perf_counter()
    with tierstore.TierStore(int(SHARE * weights), place / "store", device=CPU) as store:
        ours(place, store)
        load, stacked = time.perf_counter() - started, store.stats().bytes_written
    found = {"shape": shape, "weights": weights, "experts": experts, "logits": logits}
    return found | {"load": load, "written": stacked}


def prepared(shape: Shape, place: Path, tokens: int) -> Run:
    """Prepare a model in a separate process, or reuse one of an earlier run."""
    kept = place / "plain.pt"
    found: Run = torch.load(kept, weights_only=False) if kept.exists() else {}
    if found.get("shape") != shape:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        found = apart(prepare, shape, place, tokens)
        torch.save(found, kept)
    return found


def measure(bench: Bench) -> Iterator[Claim]:
    limit = 2000 << 20 if bench.small else LIMIT
    tokens, peer_tokens = ((12, 4), (4, 2)) if bench.small else ((40, 16), (6, 2))
    counts = {OURS: tokens, COUNTED: tokens, DISK: peer_tokens}
    for model, shape in (SMALL if bench.small else FULL).items():
        place = bench.kept / model
        plain = prepared(shape, place, tokens[0])
        budget = int(SHARE * plain["weights"])

        def run(name: str, place: Path = place, budget: int = budget) -> Run:
            count, first = counts[name]
            run, _ = limited(limit, decoded, name, place, budget, count)
            counted = {n: v[first:] for n, v in run.items() if isinstance(v, list)}
            middles = {n: median(counted[n]) for n in ("seconds", "read")}
            return run | middles | {"by token": counted}

        found = bench.turns({n: lambda n=n: run(n) for n in (OURS, DISK)}, cold=True)
        found[COUNTED] = [run(COUNTED)]
        yield from claims(bench, model, plain, found, limit)
    for name, (count, first) in {OURS: tokens, DISK: peer_tokens}.items():
        bench.page.text(f"{name}: {count} tokens; the first {first} are not counted.")
    bench.page.text(
        f"{bench.rounds} rounds; medians over tokens and rounds, ranges over rounds in "
        "parentheses; the second table has means over tokens."
    )


def claims(bench: Bench, model: str, plain: Run, found: Any, limit: int) -> Iterator[Claim]:
    """Add the figures of a model to the page, and yield its claims."""
    bench.page.text(
        f"{model}: {plain['weights'] / 1e6:,.0f} MB of weights, {plain['experts'] / 1e6:,.0f} MB "
        f"of them experts; a budget of {SHARE * plain['weights'] / 1e6:,.0f} MB, "
        f"in {limit >> 20} MiB. {unlimited(limit)}"
    )
    seconds = column(found[OURS], "seconds")
    slower = ratios(column(found[DISK], "seconds"), seconds)
    columns: dict[str, Callable[[Any], object]] = {
        "seconds per token": ranged("seconds", 3),
        "to tierstore": lambda runs: spread(ratios(column(runs, "seconds"), seconds), 1),
        "loading, s": middle("load"),
        "MB read per token": middle("read", 0, 1e-6),
        "peak MiB": most("gained", 2**-20),
        "logits": lambda runs: likeness(runs, plain["logits"]),
    }
    bench.page.compare("", {name: found[name] for name in (OURS, DISK)}, columns)
    names = ("routed", "missing", "read", "routed_bytes_used", "routed_bytes_read")
    each = {name: statistics.mean(found[COUNTED][0]["by token"][name]) for name in names}
    titles = ("selected", "selected, not in RAM", "read", "routed_bytes_used", "routed_bytes_read")
    cells = [f"{nbytes / 1e6:,.1f}" for nbytes in each.values()]
    bench.page.table((f"{model}, MB per token", *titles), [[COUNTED, *cells]])
    bench.page.text(
        f"The first load wrote {plain['written'] / 1e6:,.0f} MB in {plain['load']:.1f} s; "
        f"later ones wrote {max(column(found[OURS], 'written')) / 1e6:,.0f} MB."
    )
    for name in (OURS, DISK):
        if any(run.get("frugal") for run in found[name]):
            setting = "=".join(*FRUGAL.items())
            bench.page.text(
                f"{name} was killed because glibc keeps freed memory; then it ran with `{setting}`."
            )
    read = each["read"] / each["missing"] if each["missing"] else math.inf
    text = "bytes read / bytes of selected experts not in RAM"
    yield Claim(f"{model}: {text}", read, at_most=1.1)
    yield Claim(f"{model}: time of {DISK} / time of tierstore", median(slower), 5)
    same = likeness(found[OURS] + found[COUNTED], plain["logits"]) == "equal"
    yield Claim(f"{model}: logits equal those of the plain model", float(same), at_least=1)
    exact = each["routed_bytes_used"] == each["routed"]
    yield Claim(
        f"{model}: the counts of the store and the hooks are equal", float(exact), at_least=1
    )


def likeness(runs: list[Run], plain: torch.Tensor) -> str:
    """Compare logits to those of the plain model, for the same tokens."""
    pairs = [(run["logits"], plain[: len(run["logits"])]) for run in runs]
    if all(torch.equal(one, other) for one, other in pairs):
        return "equal"
    return f"differ by {max((a - b).abs().max().item() for a, b in pairs):.1e}"
