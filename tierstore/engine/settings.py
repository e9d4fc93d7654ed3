"""Resolve the arguments of a store: the device and the budgets."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.errors import DeviceError
from tierstore.model import shares, sizes
from tierstore.model.formatting import Units, size
from tierstore.model.sizes import PAGE, available_memory, is_auto, parse_size, usable_memory
from tierstore.model.tiers import Tier
from tierstore.tiers.assembly import TierSettings as TierSettings

Size = int | float | str
VERIFY = ("first", "always", "never")

logger = logging.getLogger("tierstore.engine")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The resolved settings of a store.

    `device_budget_may_grow` is True if the user set no device budget and it has not grown yet: see
    `grown_device_budget`.
    """

    tiers: TierSettings
    disk_dir: str
    policy: str
    device_budget_may_grow: bool = False


def check_verify(verify: str) -> str:
    """Return `verify`, or raise ValueError if it is not one of `VERIFY`."""
    if verify not in VERIFY:
        raise ValueError(f"verify={verify!r} is not one of {', '.join(VERIFY)}")
    return verify


def resolve_device(wanted: str | torch.device | None) -> torch.device:
    """Return the device, with its index. None: the current accelerator, or else the CPU.

    Raises DeviceError if this machine has no such device.
    """
    if wanted is None:
        wanted = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise DeviceError(f"{wanted!r} is not a device: {_advice()}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise ValueError("the meta device has no bytes: pass 'cpu' or an accelerator")
    count = _device_count(device.type)
    if count == 0:
        raise DeviceError(f"this machine has no {device.type} device: {_advice()}")
    if str(device) != device.type and device.index >= count:
        raise DeviceError(f"this machine has no {device}: {_advice()}")
    if str(device) != device.type:  # the index is part of the name
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _device_count(kind: str) -> int:
    """Return the number of devices of a type that torch can use."""
    try:
        module = torch.get_device_module(kind)
        return int(module.device_count()) if module.is_available() else 0
    except (AttributeError, RuntimeError):  # torch was built without it
        return 0


def _advice() -> str:
    """Return advice for an error message: the available devices, and the argument to pass."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        if torch.version.cuda or torch.version.hip:
            reason = " (check that nvidia-smi lists a GPU, and the value of CUDA_VISIBLE_DEVICES)"
        else:
            reason = " (this build has no CUDA: see https://pytorch.org/get-started for others)"
        return (
            f"torch {torch.__version__} finds no accelerator{reason}; pass device='cpu', or omit "
            "device, to run on the CPU"
        )
    names = [f"{found.type}:{index}" for index in range(torch.accelerator.device_count())]
    return f"pass one of {', '.join([*names, 'cpu'])}, or omit device for the current one"


def resolve_budgets(
    device: torch.device, ram: Size, on_device: Size | None, disk: Size | None, disk_dir: Path
) -> dict[Tier, int | None]:
    """Return the budget of each tier in bytes. On the CPU there is no DEVICE tier."""
    budgets: dict[Tier, int | None] = {Tier.HOST: _whole_pages(ram_bytes(ram), "ram_budget")}
    if device.type != "cpu":
        budgets[Tier.DEVICE] = _whole_pages(_device_bytes(device, on_device), "device_budget")
    elif is_explicit(on_device):
        raise ValueError(
            "device_budget is for accelerators, and on the CPU ram_budget covers everything: omit "
            "device_budget"
        )
    if disk is None:
        budgets[Tier.DISK] = None
    else:
        there = next(p for p in (disk_dir.absolute(), *disk_dir.absolute().parents) if p.exists())
        usage = shutil.disk_usage(there)
        budgets[Tier.DISK] = parse_size(disk, total=usage.total, auto=usage.free // shares.AUTO)
    return budgets


def ram_bytes(ram: Size) -> int:
    """Return `ram_budget` in bytes: see `sizes.ram_bytes`. Logs the value of `"auto"`."""
    available = available_memory()
    nbytes = sizes.ram_bytes(ram, available)
    if is_auto(ram):
        logger.info(
            "ram_budget 'auto': %s, half of the %s available",
            size(nbytes, Units.DECIMAL),
            size(available, Units.DECIMAL),
        )
    elif nbytes > (usable := usable_memory()):
        logger.warning(
            "ram_budget is %s, but this process may use %s: the system may kill the process before "
            "the budget is used up; lower it, for example to '80%%'",
            size(nbytes, Units.DECIMAL),
            size(usable, Units.DECIMAL),
        )
    return nbytes


def is_explicit(device_budget: Size | None) -> bool:
    """Return True if the user set the device budget."""
    return not (device_budget is None or is_auto(device_budget))


def grown_device_budget(budget: int, held: int, free: int) -> int:
    """Return the automatic device budget once every model has run, in bytes.

    Before that, it is half of the free memory, which leaves the rest to the models. Their memory
    is still in torch's cache, for their next run, so half of the memory that is `free` now can be
    added. The other half is for larger runs and other programs. `held` is the memory that the store
    has allocated on the device.
    """
    return max(budget, (held + free // shares.AUTO) // PAGE * PAGE)


def _device_bytes(device: torch.device, budget: Size | None) -> int:
    if isinstance(budget, int) and not isinstance(budget, bool):
        return parse_size(budget)
    free, total = device_memory(device)
    if budget is not None and not is_auto(budget):
        return parse_size(budget, total=total)
    nbytes = free // shares.AUTO  # the other half is for activations
    logger.info(
        "device_budget 'auto': %s, half of the %s free",
        size(nbytes, Units.DECIMAL),
        size(free, Units.DECIMAL),
    )
    return nbytes


def device_memory(device: torch.device) -> tuple[int, int]:
    """Return (free, total) bytes of an accelerator. Raises ValueError if they are unknown."""
    sources = (
        (torch.accelerator, "get_memory_info"),  # torch 2.10 and later, not on all devices
        (torch.get_device_module(device), "mem_get_info"),
    )
    reason: Exception | None = None
    for module, name in sources:
        try:
            free, total = getattr(module, name)(device)
            return int(free), int(total)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            reason = error
    raise ValueError(
        f"{device} does not report its memory size: pass device_budget in bytes"
    ) from reason


def _whole_pages(nbytes: int, name: str) -> int:
    if nbytes < PAGE:
        raise ValueError(f"{name} is {nbytes} bytes, less than one page: pass at least {PAGE}")
    return nbytes // PAGE * PAGE
