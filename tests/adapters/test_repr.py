"""Display of leases, snapshots and training objects: an informative line, and tables."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.adapters.models import BLOCK_BYTES, Tower, given
from tests.store.helpers import PAGE, open_store, pages
from tierstore import (
    Access,
    Lease,
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    disable_offload,
    dispatch_model,
    offload_activations,
)
from tierstore.model.formatting import size
from tierstore.types import ActivationOffload


def drawn(look: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=100).print(look)
    return file.getvalue()


def html_rows(look: Any) -> list[list[str]]:
    """Return the cells of each row of an HTML fragment, without markup."""
    rows = re.findall(r"<tr>(.*?)</tr>", look._repr_html_())
    return [re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", row) for row in rows]


def one_line(look: Any) -> str:
    """Return its `repr`, which must be one line without addresses."""
    shown = repr(look)
    assert "\n" not in shown
    assert re.fullmatch(r"<[^<]*>", shown.replace("DISK>HOST", "").replace("HOST>DISK", ""))
    assert " at 0x" not in shown
    return shown


def test_lease_repr_names_its_group_and_size(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("blocks.0", {"weight": torch.zeros(1024, 4), "bias": torch.zeros(1024)})
        with store.acquire("blocks.0") as lease:
            assert one_line(lease) == "<Lease of 'blocks.0': 2 tensors, 20.0 KiB on cpu>"
            assert re.search(r"weight +float32 \[1024, 4\]", drawn(lease))
            assert ["weight", "float32 [1024, 4]"] in html_rows(lease)
        assert one_line(lease) == "<Lease of 'blocks.0', released>"
        with store.acquire("blocks.0", Access.UPDATE) as lease:
            assert one_line(lease).startswith("<Lease of 'blocks.0' to update: ")


def test_lease_repr_is_no_use_of_the_lease(disk_dir: Path) -> None:
    """Otherwise a lease lost in an interrupt would be reported as lost by its caller."""
    with open_store(disk_dir) as store:
        store.put("key", pages(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "1 tensor" in repr(store.acquire("key"))


def test_unfinished_lease_has_a_repr() -> None:
    assert one_line(Lease.__new__(Lease)) == "<Lease of '?', released>"


def test_snapshot_repr_counts_groups_by_tier(disk_dir: Path) -> None:
    with open_store(disk_dir, 8 * PAGE) as store:
        for i in range(3):
            store.put(f"key/{i}", pages(i))
        store.flush()
        snapshot = store.snapshot()
    assert "3 groups, 12.0 KiB: HOST 12.0 KiB of 32.0 KiB, DISK 12.0 KiB" in one_line(snapshot)
    first, *others = snapshot.groups
    away = replace(first, tiers=("DISK",))
    snapshot = replace(snapshot, groups=(away, *others), used_bytes={"HOST": 8192, "DISK": 12288})
    assert one_line(snapshot) == (
        "<Snapshot of 3 groups, 12.0 KiB: HOST 8.0 KiB of 32.0 KiB, DISK 12.0 KiB>"
    )
    assert re.search(r"on DISK +1 group, 4.0 KiB", drawn(snapshot))
    assert re.search(r"on HOST, DISK +2 groups, 8.0 KiB", drawn(snapshot))
    assert ["on DISK", "1 group, 4.0 KiB"] in html_rows(snapshot)


@contextmanager
def training(disk_dir: Path) -> Iterator[tuple[TierStore, OffloadModel, OffloadOptimizer]]:
    with open_store(disk_dir, 100 * BLOCK_BYTES) as store:
        model = OffloadModel(Tower(), store)
        optimizer = OffloadOptimizer(model, store, torch.optim.AdamW, lr=0.125)
        yield store, model, optimizer
        model.disable()


def test_optimizer_repr_names_its_class_and_state_bytes(disk_dir: Path) -> None:
    with training(disk_dir) as (store, model, optimizer):
        assert one_line(optimizer).startswith(
            "<OffloadOptimizer of AdamW, 12 parameters in 1 group, 0 B of states; TierStore on cpu"
        )
        model(given()).sum().backward()
        optimizer.step()
        states = int(re.findall(r"group, (\d+)\.\d KiB of states", one_line(optimizer))[0])
        assert states >= 2 * 6 * BLOCK_BYTES >> 10, "two numbers for each parameter"
        assert "lr=0.125" in drawn(optimizer)
        assert f"{store.stats().hits:,} hit" in one_line(optimizer)
    assert one_line(OffloadOptimizer.__new__(OffloadOptimizer)).endswith("not initialised yet>")


def test_training_model_repr_is_a_tree_with_its_bytes(disk_dir: Path) -> None:
    plain = repr(Tower(40)).splitlines()
    with open_store(disk_dir, 200 * BLOCK_BYTES) as store:
        model = OffloadModel(Tower(40), store)
        shown = repr(model).splitlines()
        model.disable()
    assert shown[0] == "OffloadModel("
    found = re.fullmatch(r"  slices=(\d+), groups=(\d+), in_store='(\d+)\.\d KiB'", shown[1])
    assert found is not None
    assert int(found[3]) >= 42 * BLOCK_BYTES >> 10
    assert shown[2:] == plain[1:]
    assert len(shown) < 10, "40 blocks alike are one line"


def test_activation_offload_repr_lists_bytes_by_reason(disk_dir: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with open_store(disk_dir, 1 << 20) as store:
        offload = offload_activations(store, min_size=4096, model=model)
        assert "saved 0 B, in the store 0 B" in one_line(offload)
        with offload:
            result = model(torch.randn(64, 64)).sum()
        stats = store.stats().activations
        assert stats.shipped_bytes == 2 * 64 * 64 * 4, "the input, and what Tanh returns"
        saved, kept = size(stats.saved_bytes), size(stats.skipped["parameter"])
        for look in (offload, stats):
            assert f"saved {saved}, in the store 32.0 KiB, " in one_line(look)
            assert f"stayed (parameter) {kept}" in one_line(look)
            assert re.search(rf"stayed \(parameter\) +{kept}", drawn(look))
        result.backward()
    assert one_line(ActivationOffload.__new__(ActivationOffload)).endswith("not initialized yet>")


def test_patched_forward_repr_names_the_store(disk_dir: Path) -> None:
    model = Tower()
    with torch.no_grad(), open_store(disk_dir, 8 * BLOCK_BYTES) as store:
        dispatch_model(model, store)
        forward = model.blocks[1].forward
        assert repr(forward) == "<forward of Linear, with weights in a tierstore>"
        disable_offload(model)
        assert repr(forward) == "<forward of Linear, as it was>"


@pytest.mark.parametrize("look", [repr, drawn, lambda one: one._repr_html_()])
def test_repr_escapes_names(look: Any, disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        store.put("[red]\x1b[31m<b>", {"[bold]\x1b": torch.zeros(1)})
        with store.acquire("[red]\x1b[31m<b>") as lease:
            shown = look(lease)
    assert "\x1b" not in shown
    assert "[red]" in shown
