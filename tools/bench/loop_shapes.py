"""Loops over models of well-known shapes, cut as their files would be, and the least they can take.

Nothing is downloaded: a shape is the names and sizes of a model's tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.model.groups import DTYPE_SIZES, Extent, FileTensor, GroupSpec
from tierstore.model.module_tree import cut_model
from tierstore.model.outline import tile_sizes
from tierstore.model.sizes import PAGE, round_up
from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import Loop, Step

TO_HOST = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)
H100 = {TO_HOST: 1.873e9, TO_DEVICE: 54.9e9}
"""Bytes per second, as measured beside an H100."""


class Shape:
    """The tensors of a model, of bfloat16 numbers, in one file."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self.seconds = seconds
        self.tensors: list[FileTensor] = []
        self.nbytes = 0

    def add(self, name: str, *shape: int) -> None:
        """One tensor."""
        nbytes = math.prod(shape) * DTYPE_SIZES["BF16"]
        extent = Extent(f"{self.name}.safetensors", self.nbytes, nbytes)
        self.tensors.append(FileTensor(name, "BF16", shape, extent))
        self.nbytes += nbytes

    def linear(self, name: str, inputs: int, outputs: int, *, bias: bool = True) -> None:
        """The weight of a matrix, and its bias."""
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)


FLUX_WIDTH = 3072
DOUBLE = [("modulation", 1, 6), ("qkv", 1, 3), ("out", 1, 1), ("wide", 1, 4), ("narrow", 4, 1)]
SINGLE = [("modulation", 1, 3), ("qkv", 1, 3), ("wide", 1, 4), ("out", 5, 1)]
"""Layers of a block: names, and how many times the width they take and give."""


def flux(width: int = FLUX_WIDTH, double: int = 19, single: int = 38) -> Shape:
    """FLUX.1-dev's transformer: 19 double and 38 single blocks."""
    shape = Shape("flux", 0.168)
    for block in range(double):
        for stream in ("image", "text"):
            prefix = f"transformer_blocks.{block}.{stream}"
            for name, inputs, outputs in DOUBLE:
                shape.linear(f"{prefix}.{name}", inputs * width, outputs * width)
    for block in range(single):
        prefix = f"single_transformer_blocks.{block}"
        for name, inputs, outputs in SINGLE:
            shape.linear(f"{prefix}.{name}", inputs * width, outputs * width)
    return shape


def sdxl() -> Shape:
    """SDXL's UNet, as far as it has many weights: residual blocks and transformers."""
    shape = Shape("sdxl", 0.045)
    before = 320
    for block, (width, layers) in enumerate([(320, 0), (640, 2), (1280, 10)]):
        for part in range(2):
            _resnet(shape, f"down_blocks.{block}.resnets.{part}", before, width)
            _attention(shape, f"down_blocks.{block}.attentions.{part}", width, layers)
            before = width
    _resnet(shape, "mid_block.resnets.0", 1280, 1280)
    _attention(shape, "mid_block.attentions.0", 1280, 10)
    _resnet(shape, "mid_block.resnets.1", 1280, 1280)
    for block, (width, layers) in enumerate([(1280, 10), (640, 2), (320, 0)]):
        for part in range(3):
            _resnet(shape, f"up_blocks.{block}.resnets.{part}", 2 * width, width)
            _attention(shape, f"up_blocks.{block}.attentions.{part}", width, layers)
    return shape


def _resnet(shape: Shape, prefix: str, inputs: int, outputs: int) -> None:
    shape.add(f"{prefix}.conv1.weight", outputs, inputs, 3, 3)
    shape.linear(f"{prefix}.time_emb_proj", 1280, outputs)
    shape.add(f"{prefix}.conv2.weight", outputs, outputs, 3, 3)


def _attention(shape: Shape, prefix: str, width: int, layers: int) -> None:
    if not layers:
        return
    shape.linear(f"{prefix}.proj_in", width, width)
    for layer in range(layers):
        block = f"{prefix}.transformer_blocks.{layer}"
        for name, inputs in (("attn1", width), ("attn2", 2048)):
            for part, ins in (("q", width), ("k", inputs), ("v", inputs)):
                shape.linear(f"{block}.{name}.to_{part}", ins, width, bias=False)
            shape.linear(f"{block}.{name}.to_out.0", width, width)
        shape.linear(f"{block}.ff.net.0.proj", width, 8 * width)
        shape.linear(f"{block}.ff.net.2", 4 * width, width)
    shape.linear(f"{prefix}.proj_out", width, width)


def wan(name: str = "wan", seconds: float = 1.2) -> Shape:
    """One expert of Wan with 14 billion parameters."""
    shape, width = Shape(name, seconds), 5120
    shape.linear("condition_embedder.time_proj", width, 6 * width)
    for block in range(40):
        for attention in ("attn1", "attn2"):
            for part in ("to_q", "to_k", "to_v", "to_out.0"):
                shape.linear(f"blocks.{block}.{attention}.{part}", width, width)
        shape.linear(f"blocks.{block}.ffn.net.0.proj", width, 13824)
        shape.linear(f"blocks.{block}.ffn.net.2", 13824, width)
    return shape


def llama() -> Shape:
    """Llama with 70 billion parameters, writing one token after the other."""
    shape, width = Shape("llama", 0.047), 8192
    shape.add("model.embed_tokens.weight", 128256, width)
    for layer in range(80):
        prefix = f"model.layers.{layer}"
        for part, outputs in (("q", width), ("k", 1024), ("v", 1024), ("o", width)):
            shape.linear(f"{prefix}.self_attn.{part}_proj", width, outputs, bias=False)
        for part in ("gate_proj", "up_proj"):
            shape.linear(f"{prefix}.mlp.{part}", width, 28672, bias=False)
        shape.linear(f"{prefix}.mlp.down_proj", 28672, width, bias=False)
    shape.linear("lm_head", width, 128256, bias=False)
    return shape


def t5() -> Shape:
    """The text encoder of FLUX.1-dev, T5-XXL."""
    shape, width = Shape("t5", 0.02), 4096
    for layer in range(24):
        prefix = f"encoder.block.{layer}.layer"
        for part in ("q", "k", "v", "o"):
            shape.linear(f"{prefix}.0.SelfAttention.{part}", width, width, bias=False)
        for part in ("wi_0", "wi_1"):
            shape.linear(f"{prefix}.1.DenseReluDense.{part}", width, 10240, bias=False)
        shape.linear(f"{prefix}.1.DenseReluDense.wo", 10240, width, bias=False)
    return shape


SHAPES: dict[str, Callable[[], Shape]] = {"flux": flux, "sdxl": sdxl, "wan": wan, "llama": llama}

Budgets = Mapping[Tier, int | None]


def budgets(device: float, host: float) -> dict[Tier, int | None]:
    """Of a device and of host memory, in bytes."""
    return {Tier.DEVICE: int(device), Tier.HOST: int(host), Tier.DISK: None}


def loop_of(shape: Shape, of: Budgets, *, whole_blocks: bool = False) -> Loop:
    """One pass of a model, cut for these budgets; or with its blocks as units, however large.

    Computing takes as long as there are bytes.
    """
    sizes = tile_sizes(of)
    cutting = cut_model(
        shape.tensors,
        "block_level",
        sizes.group,
        largest_block=shape.nbytes if whole_blocks else sizes.block,
    )
    nbytes = [packed_bytes(group) for group, _ in cutting.groups]
    steps = []
    charged: set[int] = set()
    for name, groups in cutting.units:
        spent = sum(nbytes[group] for group in groups if group not in charged)
        charged.update(groups)
        steps.append(Step(name, groups, shape.seconds * spent / sum(nbytes)))
    return Loop(tuple(steps), tuple(nbytes))


def packed_bytes(group: GroupSpec) -> int:
    """Whole pages that a group's tensors take, on the host and on a device."""
    ends = [tensor.offset + tensor.nbytes for tensor in group.tensors]
    ends += [run.device_offset + run.nbytes for run in group.runs]
    return round_up(max(ends), PAGE)


def joined(loops: Sequence[Loop], order: Sequence[int]) -> Loop:
    """Passes over several models in an `order`, as one loop."""
    firsts, sizes = [], list[int]()
    for loop in loops:
        firsts.append(len(sizes))
        sizes += loop.sizes
    steps = [
        Step(step.unit, tuple(firsts[number] + group for group in step.groups), step.seconds)
        for number in order
        for step in loops[number].steps
    ]
    return Loop(tuple(steps), tuple(sizes))


def forward_and_backward(loop: Loop) -> Loop:
    """A step of training: the backward pass takes twice as long, in the reverse order."""
    back = [Step(step.unit, step.groups, 2 * step.seconds) for step in reversed(loop.steps)]
    return Loop((*loop.steps, *back), loop.sizes)


# What nobody can do better ------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Seconds that a pass takes at least, and bytes that must be moved to the device and read."""

    seconds: float
    uploaded: float
    read: float


def simple_bound(loop: Loop, of: Budgets, speed: Mapping[tuple[Tier, Tier], float]) -> Bound:
    """All memory is full of what stays, and everything moves while the others compute."""
    return _bound(loop, of, speed, 0, 0)


def bound(loop: Loop, of: Budgets, speed: Mapping[tuple[Tier, Tier], float], tile: int) -> Bound:
    """The same beside the largest unit, which is in use, and two tiles in transit on each tier."""
    in_use = max(loop.nbytes(step.groups) for step in loop.steps)
    return _bound(loop, of, speed, in_use + 2 * tile, 2 * tile)


def _bound(
    loop: Loop, of: Budgets, speed: Mapping[tuple[Tier, Tier], float], busy: int, transit: int
) -> Bound:
    device = (of[Tier.DEVICE] or 0) - busy
    host = (of[Tier.HOST] or 0) - transit
    uploaded = least_missed(loop, device)
    read = least_missed(loop, device + host)
    seconds = max(loop.seconds, uploaded / speed[TO_DEVICE], read / speed[TO_HOST])
    return Bound(seconds, uploaded, read)


def least_missed(loop: Loop, room: int) -> float:
    """Bytes that each pass over a loop has to fetch beside `room` bytes of what stays, by Belady's
    rule; parts of groups may stay.

    Of a group that is used once in a pass, that is exact. For others the passes are played.
    """
    uses = [group for step in loop.steps for group in step.groups]
    if len(set(uses)) == len(uses):
        return max(0.0, float(loop.nbytes(uses) - max(room, 0)))
    missed = list(_played(loop, uses, max(room, 0), passes=4))
    return min(missed[1:])


def _played(loop: Loop, uses: Sequence[int], room: int, passes: int) -> list[int]:
    """Bytes missed in each pass. What is needed last goes first, or a part of it."""
    count = len(uses)
    following: list[int] = [0] * count
    seen: dict[int, int] = {}
    for position in range(2 * count - 1, -1, -1):
        group = uses[position % count]
        if position < count:
            following[position] = seen[group] - position
        seen[group] = position
    there: dict[int, int] = {}  # bytes of each group
    needed: dict[int, int] = {}
    queue: list[tuple[int, int]] = []
    free = room
    found = []
    for passed in range(passes):
        missed = 0
        for position, group in enumerate(uses):
            missed += loop.sizes[group] - there.get(group, 0)
            free += there.pop(group, 0)
            needed[group] = passed * count + position + following[position]
            heapq.heappush(queue, (-needed[group], group))
            there[group] = loop.sizes[group]
            free -= loop.sizes[group]
            while free < 0:
                when, victim = queue[0]
                if -when != needed[victim] or not there.get(victim):
                    heapq.heappop(queue)
                    continue
                given = min(-free, there[victim])
                there[victim] -= given
                free += given
        found.append(missed)
    return found
