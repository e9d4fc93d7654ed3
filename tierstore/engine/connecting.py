"""Create the engine of a worker, whose registered weights a service holds."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

from tierstore.engine.directories import resolved_directory
from tierstore.engine.engine import Engine
from tierstore.engine.settings import (
    Settings,
    Size,
    TierSettings,
    is_explicit,
    resolve_budgets,
    resolve_device,
)
from tierstore.model.extras import extra_for
from tierstore.model.sizes import PAGE
from tierstore.model.tiers import Tier


def connected_engine(
    socket: str,
    device: str | torch.device | None,
    device_budget: Size | None,
    ram_budget: Size,
    disk_dir: str | os.PathLike[str] | None,
) -> tuple[torch.device, Engine]:
    """Return the device and an engine connected to a service. See `TierStore.connect`."""
    device = resolve_device(device)
    directory = resolved_directory(
        tempfile.mkdtemp(prefix="tierstore-") if disk_dir is None else disk_dir
    )
    try:
        no_ram = str(ram_budget) in ("0", "0B")  # any other budget is at least one page
        ram = PAGE if no_ram else ram_budget
        budgets = resolve_budgets(device, ram, device_budget, None, Path(directory))
        if no_ram:
            budgets[Tier.HOST] = 0
        if disk_dir is None:
            budgets[Tier.DISK] = 0
        settings = Settings(
            tiers=TierSettings(
                device=device,
                budgets=budgets,
                verify="first",
                link=_link(socket, private=device.type == "cpu"),
            ),
            disk_dir=directory,
            policy="next-use",
            device_budget_may_grow=device.type != "cpu" and not is_explicit(device_budget),
        )
        engine = Engine(settings)
    except BaseException:
        if disk_dir is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    if disk_dir is None:
        weakref.finalize(engine, shutil.rmtree, directory, ignore_errors=True)
    return device, engine


def _link(socket: str, *, private: bool) -> Any:
    with extra_for("to connect to a service"):
        from tierstore.tiers.service_link import ServiceLink
    return ServiceLink(socket, private)
