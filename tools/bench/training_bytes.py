"""What a step of training moves: a Llama that is fine-tuned by a LoRA, or trained as a whole

    python tools/bench/training_bytes.py --dir DIR [--small] [--only NAME] [--markdown FILE]

A Llama of about 47 MB in float32 with random weights, loaded from its checkpoint, with budgets from
10 to 100 % of its weights: in an `OffloadModel` with a frozen base and a LoRA (peft, rank 8), in an
`OffloadModel` all trained, and by `dispatch_model` with the same LoRA; each with and without
checkpointing of its blocks. Counted are the bytes that the store reads in the forward and in the
backward pass, and what it writes in the whole step, on the average of the steps that count.

What is to be read: the parameters that find no room, once in each pass, and three groups. Room is,
for what is frozen, what trained state leaves of the budget; for what is trained, what stays in RAM
for good (see `state_buffers`), since the rest of the budget is for what the optimizer works on.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import peft
import torch
import transformers

from tierstore import OffloadModel, OffloadOptimizer, TierStore, dispatch_model
from tierstore.model.tiers import Tier
from tools.bench.report import Claim, Page

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

LAYERS, SMALL_LAYERS = 26, 4
WIDTH, INNER, VOCABULARY = 192, 512, 256
WARM_UP, COUNTED = 2, 2
MOST = 1.05
MOST_WRITTEN = 1.1
GROUPS = 3
COPIES = 4
"""Of each trained parameter: its value, its gradient, two states of AdamW."""
FROZEN_KEY = "/frozen"
FROZEN, FULL, DISPATCH = "OffloadModel, frozen", "OffloadModel, all trained", "dispatch_model"


def save(layers: int, directory: Path) -> Path:
    """A checkpoint of a Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def load(checkpoint: Path, *, lora: bool) -> Any:
    """The model of a checkpoint, in training."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype="auto")
    if lora:
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, config)
    return model.train()


@dataclass(frozen=True)
class Moved:
    """Bytes of one step, and what they may be."""

    weights: int
    forward: float
    backward: float
    step: float
    written: float
    base_written: int  # before the first step
    most: float
    most_written: float

    @property
    def read(self) -> float:
        """By both passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Way:
    """A way to train."""

    name: str
    recompute: bool

    def __str__(self) -> str:
        return f"{self.name}, checkpointed" if self.recompute else self.name

    @property
    def lora(self) -> bool:
        """Whether the base is frozen."""
        return self.name != FULL

    def offloaded(self, model: Any, store: TierStore) -> tuple[Any, Any]:
        """A model on a store, and its optimizer."""
        if self.name == DISPATCH:
            if self.recompute:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.enable_input_require_grads()
            dispatch_model(model, store)
            trained = [p for p in model.parameters() if p.requires_grad]
            return model, torch.optim.AdamW(trained, lr=1e-3)
        offloaded = OffloadModel(model, store, checkpoint_activation=self.recompute)
        return offloaded, OffloadOptimizer(offloaded, store, torch.optim.AdamW, lr=1e-3)


def measured(way: Way, checkpoint: Path, place: Path, share: float) -> Moved:
    """What a step moves with a budget of so many of the weights' bytes."""
    shutil.rmtree(place, ignore_errors=True)
    model = load(checkpoint, lora=way.lora)
    weights = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    budget = int(share * weights)
    tokens = torch.arange(2 * 16).reshape(2, 16)
    with TierStore(budget, place, device="cpu") as store:
        begun = store.stats().bytes_written
        ours, optimizer = way.offloaded(model, store)
        base_written = store.stats().bytes_written - begun
        counts: list[list[int]] = []
        for _ in range(WARM_UP + COUNTED):
            marks = [store.stats()]
            loss = ours(input_ids=tokens, labels=tokens).loss
            marks.append(store.stats())
            loss.backward()
            marks.append(store.stats())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(store.stats())
            reads = [b.bytes_read - a.bytes_read for a, b in itertools.pairwise(marks)]
            counts.append([*reads, marks[-1].bytes_written - marks[0].bytes_written])
        forward, backward, step, written = (
            sum(column) / COUNTED for column in zip(*counts[WARM_UP:], strict=True)
        )
        group = max(g.nbytes for g in store.snapshot().groups)
        missed, not_kept = _missed(way, store, weights, trained, budget)
    return Moved(
        weights,
        forward,
        backward,
        step,
        written,
        base_written,
        MOST * (2 * missed + GROUPS * group),
        MOST_WRITTEN * not_kept,
    )


def _missed(way: Way, store: TierStore, weights: int, trained: int, budget: int) -> tuple[int, int]:
    """Bytes of parameters that find no room, and of trained state that finds none. Between steps,
    what is in RAM of the trained state is there for good."""
    state = [g for g in store.snapshot().groups if g.key.startswith(("training/", "optimizer/"))]
    away = [g for g in state if Tier.HOST.name not in g.tiers and FROZEN_KEY not in g.key]
    written = sum(g.nbytes for g in away)
    if way.name == FULL:
        values = [g for g in away if g.key.startswith("training/") and "gradient" not in g.key]
        return sum(g.nbytes for g in values), written
    copies = COPIES if way.name == FROZEN else 1
    room = max(budget - copies * trained, 0)
    return max(weights - trained - room, 0), min(written, copies * trained)


WAYS = [Way(name, recompute) for name in (FROZEN, FULL, DISPATCH) for recompute in (False, True)]
SHARES = [n / 10 for n in range(1, 11)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="for the model and the store")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--only", help="ways of this name")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the weights")
    parser.add_argument("--markdown", type=Path, help="a page of Markdown to write")
    given = parser.parse_args()
    checkpoint = save(SMALL_LAYERS if given.small else LAYERS, given.dir / "checkpoint")
    page = Page(__doc__ or "", given.dir, ["torch", "transformers", "peft"])
    claims: list[Claim] = []
    for way in WAYS:
        if given.only in (None, way.name):
            found = {s: measured(way, checkpoint, given.dir / "store", s) for s in given.shares}
            page.text(f"## {way}")
            page.table(COLUMNS, [_row(share, moved) for share, moved in found.items()])
            claims += _claims(way, found)
    page.claims(claims)
    page.write(given.markdown)
    return 0 if all(claim.held for claim in claims) or given.small else 1


COLUMNS = (
    "budget, of the weights",
    "read: forward, MB",
    "backward, MB",
    "both",
    "limit",
    "optimizer, MB",
    "written in a step, MB",
    "limit",
    "written at first, MB",
)


def _row(share: float, moved: Moved) -> list[str]:
    sizes = (
        moved.forward,
        moved.backward,
        moved.read,
        moved.most,
        moved.step,
        moved.written,
        moved.most_written,
        moved.base_written,
    )
    return [f"{share:.0%}", *(f"{nbytes / 1e6:,.1f}" for nbytes in sizes)]


def _claims(way: Way, found: dict[float, Moved]) -> list[Claim]:
    """The worst of all budgets."""
    over = max(moved.read / moved.most for moved in found.values())
    rising = max((b.read - a.read) / a.weights for a, b in itertools.pairwise(list(found.values())))
    written = max(
        moved.written / moved.most_written if moved.most_written else moved.written
        for moved in found.values()
    )
    claims = [
        Claim(f"{way}: parameters read in a step, of the limit", over, at_most=1),
        Claim(f"{way}: more is read with a larger budget, of the weights", rising, at_most=0.01),
        Claim(f"{way}: written in a step, of the limit", written, at_most=1),
    ]
    if way.lora:
        base = max(moved.base_written for moved in found.values())
        claims.append(Claim(f"{way}: MB written before the first step", base / 1e6, at_most=1))
    return claims


if __name__ == "__main__":
    sys.exit(main())
