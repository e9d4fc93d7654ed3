"""Loops over models of well-known shapes, partitioned as their files would be, and lower bounds.

Nothing is downloaded: a shape consists of the names and sizes of a model's tensors.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.model.groups import DTYPE_SIZES, Extent, FileTensor, GroupSpec
from tierstore.model.module_tree import partition_model
from tierstore.model.outline import tile_sizes
from tierstore.model.sizes import PAGE, round_up
from tierstore.model.tiers import Tier
from tierstore.plan.loop_plan import Loop, Step

TO_HOST = (Tier.DISK, Tier.HOST)
TO_DEVICE = (Tier.HOST, Tier.DEVICE)
H100 = {TO_HOST: 1.873e9, TO_DEVICE: 54.9e9}
"""Bytes per second, as measured on an H100 machine."""


class Shape:
    """The bfloat16 tensors of a model, in one file."""

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
        """Add the weight and the bias of a linear layer."""
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)


FLUX_WIDTH = 3072
DOUBLE = [("modulation", 1, 6), ("qkv", 1, 3), ("out", 1, 1), ("wide", 1, 4), ("narrow", 4, 1)]
SINGLE = [("modulation", 1, 3), ("qkv", 1, 3), ("wide", 1, 4), ("out", 5, 1)]
"""Layers of a block: names, and their inputs and outputs in multiples of the width."""


def flux(width: int = FLUX_WIDTH, double: int = 19, single: int = 38) -> Shape:
    """Return FLUX.1-dev's transformer: 19 double and 38 single blocks."""
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
    """Return the large parts of SDXL's UNet: residual blocks and transformers."""
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
    """Return one expert of Wan with 14 billion parameters."""
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
    """Return Llama with 70 billion parameters, decoding token by token."""
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
    """Return the text encoder of FLUX.1-dev, T5-XXL."""
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
    """Return the budgets of a device and of host memory, in bytes."""
    return {Tier.DEVICE: int(device), Tier.HOST: int(host), Tier.DISK: None}


def loop_of(shape: Shape, of: Budgets, *, whole_blocks: bool = False) -> Loop:
    """Return one pass of a model, partitioned for these budgets or with `whole_blocks` as units.

    Compute times are proportional to bytes.
    """
    sizes = tile_sizes(of)
    cutting = partition_model(
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
    """Return the bytes of a group's tensors in whole pages, on the host or a device."""
    ends = [tensor.offset + tensor.nbytes for tensor in group.tensors]
    ends += [run.device_offset + run.nbytes for run in group.runs]
    return round_up(max(ends), PAGE)


def joined(loops: Sequence[Loop], order: Sequence[int]) -> Loop:
    """Join passes over several models, in an `order`, into one loop."""
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
    """Return a training step: the backward pass takes twice as long, in reverse order."""
    back = [Step(step.unit, step.groups, 2 * step.seconds) for step in reversed(loop.steps)]
    return Loop((*loop.steps, *back), loop.sizes)


# Lower bounds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Lower bounds of a pass: seconds, bytes to the device, and bytes read."""

    seconds: float
    uploaded: float
    read: float


def simple_bound(loop: Loop, of: Budgets, speed: Mapping[tuple[Tier, Tier], float]) -> Bound:
    """Return the bound if all memory holds resident groups and all transfers overlap."""
    return _bound(loop, of, speed, 0, 0)


def bound(loop: Loop, of: Budgets, speed: Mapping[tuple[Tier, Tier], float], tile: int) -> Bound:
    """Return the bound besides the largest unit, in use, and two tiles in transit on each tier."""
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
    """Return the minimum bytes to fetch per pass with `room` bytes of memory, by Belady's rule.

    Parts of groups may stay. The result is exact for groups that are used once per pass; for
    others, passes are simulated.
    """
    uses = [group for step in loop.steps for group in step.groups]
    if len(set(uses)) == len(uses):
        return max(0.0, float(loop.nbytes(uses) - max(room, 0)))
    missed = list(_simulated_misses(loop, uses, max(room, 0), passes=4))
    return min(missed[1:])


def _simulated_misses(loop: Loop, uses: Sequence[int], room: int, passes: int) -> list[int]:
    """Simulate passes, and return the bytes missed in each. Evicts the farthest next use first."""
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
