"""A trace marks each call of a whole model, whichever adapter offloads it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests import pipelines
from tests.adapters.conftest import DEVICES, Checkpoints, a_third_of
from tests.adapters.models import BLOCK_BYTES, Tower, given
from tests.store import traces
from tests.store.helpers import open_store, wait_until_idle
from tierstore import (
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    disable_offload,
    dispatch_model,
    enable_group_offload,
)
from tierstore.trace import Recorded, TraceSlice, read_trace


def passes(store: TierStore, path: Path) -> list[TraceSlice]:
    """Return the passes in a trace of the store, in order."""
    if store.device.type != "cpu":
        torch.accelerator.synchronize()
    wait_until_idle(store)
    store.trace(path)
    traces.check(path, store.stats())
    return of_kind(read_trace(path), "pass")


def of_kind(recorded: Recorded, kind: str) -> list[TraceSlice]:
    return [one for one in recorded.slices if one.kind == kind]


def end(one: TraceSlice) -> float:
    return one.start + one.seconds


@pytest.mark.full("the device", keep="any device")
@pytest.mark.parametrize("device", DEVICES)
def test_passes_of_components_and_steps_are_marked(
    device: str, checkpoint: Checkpoints, disk_dir: Path, tmp_path: Path
) -> None:
    pipe = pipelines.load("flux", checkpoint("flux"))
    with a_third_of(pipe, disk_dir, device) as store:
        handle = enable_group_offload(pipe, store)
        pipelines.run("flux", pipe, steps=3, device=device)
        found = passes(store, tmp_path / "trace.json")
        disable_offload(handle)
    [prefix] = {str(one.args["model"]).partition("/")[0] for one in found}
    ran = Counter((str(one.args["model"]), str(one.args["does"])) for one in found)
    assert ran == {
        (f"{prefix}/text_encoder", "forward"): 1,
        (f"{prefix}/text_encoder_2", "forward"): 1,
        (f"{prefix}/transformer", "forward"): 3,
        (f"{prefix}/vae", "decode"): 1,
    }
    steps = [one for one in found if one.args["model"] == f"{prefix}/transformer"]
    assert [one.args["number"] for one in steps] == [1, 2, 3]
    assert [one.name for one in steps] == [f"{prefix}/transformer {n}" for n in (1, 2, 3)]
    order = [one.args["model"].rpartition("/")[2] for one in found]
    assert order[2:] == ["transformer"] * 3 + ["vae"]
    assert all(end(one) <= after.start for one, after in itertools.pairwise(found))
    # A group of the transformer is only used within one of its passes.
    computed = [
        one
        for one in of_kind(read_trace(tmp_path / "trace.json"), "compute")
        if one.name.startswith(f"{prefix}/transformer/")
    ]
    assert computed
    clocks = 1e-3 if device == "cpu" else 5e-3  # seconds
    for one in computed:
        assert any(s.start - clocks <= one.start <= end(s) + clocks for s in steps), one


def test_pass_that_raises_is_marked_as_failed(disk_dir: Path, tmp_path: Path) -> None:
    model = Tower()
    with torch.no_grad(), open_store(disk_dir, 4 * BLOCK_BYTES) as store:
        dispatch_model(model, store)
        model(given())
        with pytest.raises(RuntimeError):
            model(torch.zeros(3, 5))
        model(given())
        model.blocks[1](given())  # a part alone is not a pass
        found = passes(store, tmp_path / "trace.json")
        disable_offload(model)
    assert [one.args["number"] for one in found] == [1, 2, 3]
    assert [one.args.get("failed", False) for one in found] == [False, True, False]


def test_passes_of_a_nested_model_are_nested(disk_dir: Path, tmp_path: Path) -> None:
    inner, outer = Tower(), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    outer.add_module("inner", inner)
    with torch.no_grad(), open_store(disk_dir, 8 * BLOCK_BYTES) as store:
        dispatch_model(inner, store)
        dispatch_model(outer, store)
        outer(given())
        found = passes(store, tmp_path / "trace.json")
        disable_offload(outer)
        disable_offload(inner)
    around, inside = found
    assert around.name.startswith("Sequential-dispatched-")
    assert inside.name.startswith("Tower-dispatched-")
    assert around.start <= inside.start <= end(inside) <= end(around) + 1e-6
    assert around.track != inside.track


def test_training_step_is_marked_in_its_three_parts(disk_dir: Path, tmp_path: Path) -> None:
    module = Tower()
    with open_store(disk_dir, 40 * BLOCK_BYTES) as store:
        model = OffloadModel(module, store)
        optimizer = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1)
        for _ in range(2):
            model(given()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = passes(store, tmp_path / "trace.json")
        model.disable()
    assert [(one.args["does"], one.args["number"]) for one in found] == [
        (does, number) for number in (1, 2) for does in ("forward", "backward", "step")
    ]
    assert {one.args["model"].rpartition("/")[2] for one in found} == {"Tower", "SGD"}
    assert all(end(one) <= after.start for one, after in itertools.pairwise(found))


def test_trace_without_passes_is_read(disk_dir: Path, tmp_path: Path) -> None:
    model, path = Tower(), tmp_path / "trace.json"
    with torch.no_grad(), open_store(disk_dir, 4 * BLOCK_BYTES) as store:
        dispatch_model(model, store)
        model(given())
        assert passes(store, path)
        disable_offload(model)
    now = read_trace(path)
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    document["traceEvents"] = [e for e in events if e["cat"] != "tierstore,pass"]
    path.write_text(json.dumps(document))
    before = read_trace(path)
    assert not of_kind(before, "pass")
    assert before.uses == now.uses
    assert len(of_kind(before, "compute")) == len(of_kind(now, "compute")) > 0
