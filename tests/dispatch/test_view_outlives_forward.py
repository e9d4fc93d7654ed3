"""A view of a weight that outlives the forward in which it was taken still shows that weight.

Each way is a place where a forward leaves a view: an attribute, a cache, a closure, an array. All
other blocks run afterwards, so that their weights pass through the same memory.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import operator
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.accelerator import pretend
from tests.dispatch.conftest import DEVICES
from tests.helpers.engine import core_of
from tests.store.helpers import open_store
from tierstore import Access, TierStore, dispatch_model, enable_group_offload
from tierstore.tiers.slot_views import SlotViews

SIZES = {"weights": (32, 40), "buffers": (512, 8)}
"""Width and number of blocks. Buffers below 1 MiB stay on the device."""

Keep = Callable[["Block", Any], Any]
"""Keeps a view of a block's weight somewhere; returns a function that returns the view."""


@dataclasses.dataclass
class Record:
    row: torch.Tensor
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    row: torch.Tensor


class Named(NamedTuple):
    row: torch.Tensor


class Plain:
    def __init__(self, row: Any) -> None:
        self.row = row


class Slotted:
    __slots__ = ("row",)

    def __init__(self, row: Any) -> None:
        self.row = row


class Cache:
    """Keys of each layer, as in caches of language models."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []

    def update(self, row: torch.Tensor) -> None:
        self.layers.append(row)


def _attribute(block: Block, view: Any) -> Any:
    block.kept = view
    return lambda: block.kept


def _closure(block: Block, view: Any) -> Any:
    return lambda: view


def _default(block: Block, view: Any) -> Any:
    def give(view: Any = view) -> Any:
        return view

    return give


def _generator(block: Block, view: Any) -> Any:
    def give() -> Iterator[Any]:
        yield None
        yield view

    running = give()
    next(running)
    return lambda: next(running)


def _queue(block: Block, view: Any) -> Any:
    waiting: queue.Queue[Any] = queue.Queue()
    waiting.put(view)
    return waiting.get


def _thread(block: Block, view: Any) -> Any:
    go, found = threading.Event(), []

    def look() -> None:
        go.wait(60)
        found.append(view.clone())

    thread = threading.Thread(target=look)
    thread.start()

    def give() -> Any:
        go.set()
        thread.join(60)
        return found[0]

    return give


def _local(block: Block, view: Any) -> Any:
    here = threading.local()
    here.view = view
    return lambda: here.view


def _exception(block: Block, view: Any) -> Any:
    error = ValueError("kept")
    error.view = view  # type: ignore[attr-defined]
    return lambda: error.view  # type: ignore[attr-defined]


def _traceback(block: Block, view: Any) -> Any:
    def fail(kept: Any) -> None:
        raise ValueError

    try:
        fail(view)
    except ValueError as error:
        kept = error

    def give() -> Any:
        trace = kept.__traceback__
        while trace is not None:
            if "kept" in trace.tb_frame.f_locals and trace.tb_frame.f_code.co_name == "fail":
                return trace.tb_frame.f_locals["kept"]
            trace = trace.tb_next
        raise AssertionError

    return give


def _cycle(block: Block, view: Any) -> Any:
    kept: dict[str, Any] = {"view": view}
    kept["self"] = kept
    return lambda: kept["view"]


def _finalizer(block: Block, view: Any) -> Any:
    target, found = Plain(None), []
    weakref.finalize(target, found.append, view)

    def give() -> Any:
        nonlocal target
        del target
        gc.collect()
        return found[0]

    return give


def _lru_cache(block: Block, view: Any) -> Any:
    @functools.lru_cache
    def make(number: int) -> Any:
        return view

    make(0)
    return lambda: make(0)


def _numpy(block: Block, view: Any) -> Any:
    array = view.detach().numpy() if view.device.type == "cpu" else None
    return lambda: view if array is None else torch.from_numpy(array)


def _memoryview(block: Block, view: Any) -> Any:
    if view.device.type != "cpu":
        return lambda: view
    found = memoryview(view.detach().numpy())
    return lambda: torch.frombuffer(found.tobytes(), dtype=view.dtype).reshape(view.shape)


def _dlpack(block: Block, view: Any) -> Any:
    if view.device.type != "cpu":
        return lambda: view
    capsule = torch.utils.dlpack.to_dlpack(view.detach())
    return lambda: torch.utils.dlpack.from_dlpack(capsule)


def _storage(block: Block, view: Any) -> Any:
    storage, geometry = view.untyped_storage(), (view.storage_offset(), view.shape, view.stride())
    return lambda: torch.empty(0, device=view.device).set_(storage, *geometry)


def _property(block: Block, view: Any) -> Any:
    vars(block)["cached"] = view
    return lambda: vars(block)["cached"]


def _buffer(block: Block, view: Any) -> Any:
    holder = nn.Module()
    holder.register_buffer("view", view.detach())
    return lambda: holder.view


def _parameter(block: Block, view: Any) -> Any:
    kept = nn.Parameter(view.detach(), requires_grad=False)
    return lambda: kept


def _heap(make: Callable[[Any], Any], get: Callable[[Any], Any]) -> Keep:
    def keep(block: Block, view: Any) -> Any:
        made = make(view)
        del view
        return lambda: get(made)

    return keep


def _cache(view: torch.Tensor) -> Cache:
    made = Cache()
    made.update(view)
    return made


WAYS: dict[str, Keep] = {
    "attribute": _attribute,
    "closure": _closure,
    "default": _default,
    "generator": _generator,
    "queue": _queue,
    "thread": _thread,
    "thread's own": _local,
    "exception": _exception,
    "traceback": _traceback,
    "cycle": _cycle,
    "finalizer": _finalizer,
    "lru_cache": _lru_cache,
    "numpy": _numpy,
    "memoryview": _memoryview,
    "dlpack": _dlpack,
    "storage": _storage,
    "instance dict": _property,
    "another's buffer": _buffer,
    "another's parameter": _parameter,
    "list": _heap(lambda v: [v], operator.itemgetter(0)),
    "nested list": _heap(lambda v: [[v]], lambda made: made[0][0]),
    "tuple": _heap(lambda v: (v,), operator.itemgetter(0)),
    "dict": _heap(lambda v: {"v": v}, operator.itemgetter("v")),
    "key of a dict": _heap(lambda v: {v: 1}, lambda made: next(iter(made))),
    "set": _heap(lambda v: {v}, lambda made: next(iter(made))),
    "frozenset": _heap(lambda v: frozenset([v]), lambda made: next(iter(made))),
    "deque": _heap(lambda v: collections.deque([v]), operator.itemgetter(0)),
    "ordered dict": _heap(lambda v: collections.OrderedDict(v=v), operator.itemgetter("v")),
    "named tuple": _heap(Named, operator.attrgetter("row")),
    "dataclass": _heap(Record, operator.attrgetter("row")),
    "frozen dataclass": _heap(Frozen, operator.attrgetter("row")),
    "object": _heap(Plain, operator.attrgetter("row")),
    "object with slots": _heap(Slotted, operator.attrgetter("row")),
    "namespace": _heap(lambda v: types.SimpleNamespace(row=v), operator.attrgetter("row")),
    "partial": _heap(lambda v: functools.partial(operator.pos, v), lambda made: made.args[0]),
    "map": _heap(lambda v: map(operator.itemgetter(0), [[v]]), next),
    "bound method": _heap(lambda v: v.clone, lambda made: made()),
    "cache of layers": _heap(_cache, lambda made: made.layers[0]),
    "context variable": _heap(lambda v: contextlib.nullcontext(v), lambda made: made.__enter__()),
}

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.t(),
    "row": lambda t: t[3],
    "expanded": lambda t: t[:1].expand(4, -1),
    "data": lambda t: t.data,
    "detached": lambda t: t.detach(),
    "chunk": lambda t: t.chunk(4)[2],
}
MODES = {
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "inference": torch.inference_mode,
}


class Block(nn.Module):
    """Multiplies by a weight, or by a buffer, and passes a view of it to `keep` in one run."""

    kept: Any = None
    keep: Keep | None = None
    view: Callable[[torch.Tensor], torch.Tensor]
    give: Any = None

    def __init__(self, kind: str) -> None:
        super().__init__()
        width, _ = SIZES[kind]
        value = torch.randn(width, width) / width**0.5
        if kind == "weights":
            self.tensor = nn.Parameter(value, requires_grad=False)
        else:
            self.register_buffer("tensor", value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keep is not None:
            self.give = self.keep(self, self.view(self.tensor))
            self.keep = None
        return torch.tanh(x @ self.tensor)


def blocks(kind: str = "weights") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kind) for _ in range(SIZES[kind][1])))


def nbytes_of(model: nn.Module) -> int:
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def inputs(kind: str, device: str) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, SIZES[kind][0]).to(device)


@contextlib.contextmanager
def offloaded(
    model: nn.Module, disk_dir: Path, device: str, dispatch: Callable[..., Any] = dispatch_model
) -> Iterator[TierStore]:
    """Put the model on a store whose fastest tier holds three eighths of it."""
    small = nbytes_of(model) * 3 // 8 // 4096 * 4096
    ram = small if device == "cpu" else 4 * nbytes_of(model)
    options = {} if device == "cpu" else {"device_budget": small}
    with open_store(disk_dir, ram, device, **options) as store:
        dispatch(model, store)
        yield store


def passed_through(store: TierStore, device: str) -> int:
    """Return the bytes that have arrived on the fastest tier."""
    stats = store.stats()
    return stats.bytes_read if device == "cpu" else stats.bytes_onloaded


def kept_after_other_runs(
    way: Keep, view: str, device: str, disk_dir: Path, *, kind: str, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the views that two blocks have kept of one run, and their expected values."""
    model, x = blocks(kind), inputs(kind, device)
    chosen = [model[2], model[-2]]
    expected = [VIEWS[view](block.tensor.detach()).clone() for block in chosen]
    with offloaded(model, disk_dir, device) as store, MODES[mode]():
        for block in chosen:
            block.keep, block.view = way, VIEWS[view]
        model(x)
        for _ in range(2):
            model(x)
        found = [block.give().detach().cpu() for block in chosen]
        assert passed_through(store, device) > 1.5 * nbytes_of(model)
    return torch.stack(found), torch.stack(expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["weights", "buffers"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.full("every way in every mode", keep="a third")
def test_kept_view_shows_its_weight(
    way: str, kind: str, mode: str, device: str, disk_dir: Path
) -> None:
    number = list(WAYS).index(way) + list(MODES).index(mode)
    view = list(VIEWS)[number % len(VIEWS)]
    found, expected = kept_after_other_runs(WAYS[way], view, device, disk_dir, kind=kind, mode=mode)
    assert torch.equal(found, expected)


@pytest.mark.full("runs until the missing check shows", keep="a third")
@pytest.mark.pretend_only("late")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("without", [None, "end", "are_in_use"])
def test_kept_or_returned_view_needs_each_check(
    without: str | None, device: str, disk_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: without `end` a kept view shows another weight.

    Without `are_in_use`, queued device work that uses a view, which is dropped by then, reads a
    later weight.
    """
    if without is not None:
        monkeypatch.setattr(SlotViews, without, without_checks)
    kept, expected = kept_after_other_runs(
        _attribute, "transposed", device, disk_dir / "kept", kind="weights", mode="no_grad"
    )
    assert torch.equal(kept, expected) == (without != "end")
    model, x = WithHeads(), inputs("weights", device)
    wanted = plain(model, x)
    with offloaded(model, disk_dir / "returned", device) as store, torch.no_grad():
        right = []
        for seed in range(8):
            if device != "cpu":  # queued work runs when it is waited for
                pretend.seed(seed)
                pretend.set_slowness(None if seed % 2 else 8)
            # Head by head: a run of the whole model ends a lease when the next one begins.
            right.append(torch.equal(model.through_heads(x).cpu(), wanted))
        assert passed_through(store, device) > nbytes_of(model)
    if without is None:
        assert all(right)
    elif without == "are_in_use" and device != "cpu":  # there, it depends on a race
        assert not all(right)


def without_checks(views: SlotViews) -> None:
    """Replaces both checks: no view is ever found."""
    if sys._getframe(1).f_code.co_name == "_drop":
        views.tensors = {}


@dataclasses.dataclass
class LeftMemory:
    """Memory of a tier that is left to views."""

    store: TierStore

    def nbytes(self) -> int:
        core = core_of(self.store)
        for number in range(8):  # the tier looks for returned slots as space is taken
            self.store.put(f"room/{number}", torch.zeros(1024), durable=False)
            self.store.acquire(f"room/{number}").release()
            self.store.discard(f"room/{number}")
        core.mover.drain()
        return sum(slot.nbytes for slot in core.tiers.top.detached)


@pytest.mark.parametrize("device", DEVICES)
def test_view_kept_in_every_run_keeps_memory_once(
    device: str, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = blocks(), inputs("weights", device)
    block = model[2]
    expected, kept = block.tensor.t().clone(), []
    with offloaded(model, disk_dir, device) as store, torch.no_grad():
        for _ in range(10):
            block.keep, block.view = _heap(lambda v: [v], operator.itemgetter(0)), VIEWS["row"]
            model(x)
            kept.append(block.give())
        assert 0 < LeftMemory(store).nbytes() < 3 * nbytes_of(model) / 8
        assert len({view.data_ptr() for view in kept}) <= 2, "the first is shown again"
        for view in kept:
            assert torch.equal(view.cpu(), expected.t()[3])
        logged = [r.getMessage() for r in caplog.records if r.name == "tierstore.tiers"]
        assert len(logged) == 1
        assert "2.tensor" in logged[0]
        del view
        kept.clear()
        block.give = None
        model(x)
        assert not LeftMemory(store).nbytes()


def test_update_beside_a_kept_view_reaches_the_group(disk_dir: Path) -> None:
    with open_store(disk_dir, 4 * 4096) as store:
        for number in range(6):
            store.put(f"{number}", torch.full((1024,), float(number)))
        with store.acquire("0") as lease:
            kept = lease.tensor[:8]
        for number in range(1, 6):
            store.get(f"{number}")
        with store.acquire("0") as lease:
            again = lease.tensor
        assert again.data_ptr() == kept.data_ptr(), "the kept memory is shown again"
        with store.acquire("0", Access.UPDATE) as lease:
            lease.tensor.fill_(7)
        assert torch.equal(store.get("0"), torch.full((1024,), 7.0))
        for number in range(1, 6):
            store.get(f"{number}")
        assert torch.equal(store.get("0"), torch.full((1024,), 7.0))
        assert torch.equal(kept, torch.zeros(8)), "it was left before the change"


@pytest.mark.full("the way to offload, the device", keep="a third")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload", [dispatch_model, enable_group_offload])
def test_cached_parametrizations_are_right(
    offload: Callable[..., Any], device: str, disk_dir: Path
) -> None:
    class Transpose(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.t()

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)))
    for layer in model:
        parametrize.register_parametrization(layer, "weight", Transpose())
    x = inputs("weights", device)
    wanted = plain(model, x)
    with offloaded(model, disk_dir, device, offload) as store, torch.no_grad():
        for _ in range(3):
            with parametrize.cached():
                assert torch.equal(model(x).cpu(), wanted)
                assert torch.equal(model(x).cpu(), wanted)
        assert passed_through(store, device) > nbytes_of(model)


class Head(nn.Module):
    """Returns its weight, which other modules multiply by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self) -> torch.Tensor:
        return self.weight.t()


class WithHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.heads = nn.ModuleList(Head() for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through_heads(x)

    def through_heads(self, x: torch.Tensor) -> torch.Tensor:
        for head in self.heads:
            x = torch.tanh(x @ head())
        return x


@torch.no_grad()
def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the output of the plain model, on the device of `x`."""
    return copy.deepcopy(model).to(x.device)(x).cpu()


@pytest.mark.full("kept or not", keep="a third")
@pytest.mark.parametrize("kept", [True, False])
def test_host_memory_kept_by_a_view_is_logged_once(
    kept: bool, disk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = blocks()
    if kept:
        for block in model[3:]:
            block.kept = block.tensor.t()
    with offloaded(model, disk_dir, "cpu"), torch.no_grad():
        model(inputs("weights", "cpu"))
        logged = [r.getMessage() for r in caplog.records if r.name == "tierstore.adapters"]
    assert len(logged) == kept
    if kept:
        assert "148.0 KiB of 37 weights (first: 3.tensor)" in logged[0]
