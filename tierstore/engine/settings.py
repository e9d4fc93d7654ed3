"""From what a user writes to what the store works with: the device and the budgets."""

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
    """What a store works with.

    `device_budget_may_grow`: nobody chose it, and it has not grown yet. See `grown_device_budget`.
    """

    tiers: TierSettings
    disk_dir: str
    policy: str
    device_budget_may_grow: bool = False


def checked_verify(verify: str) -> str:
    """When checksums are compared. Raises ValueError for what is no such word."""
    if verify not in VERIFY:
        raise ValueError(f"verify={verify!r} is not one of {', '.join(VERIFY)}")
    return verify


def resolve_device(wanted: str | torch.device | None) -> torch.device:
    """The device, with its index. None: the current accelerator, or else the CPU.

    Raises DeviceError if there is none of that name here.
    """
    if wanted is None:
        wanted = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise DeviceError(f"{wanted!r} is no device: {_advice()}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "meta":
        raise ValueError("the meta device has no bytes: pass 'cpu' or an accelerator")
    count = _device_count(device.type)
    if count == 0:
        raise DeviceError(f"there is no {device.type} device here: {_advice()}")
    if str(device) != device.type and device.index >= count:
        raise DeviceError(f"there is no {device} here: {_advice()}")
    if str(device) != device.type:  # the index is part of the name
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _device_count(kind: str) -> int:
    """How many devices of a type torch can use here."""
    try:
        module = torch.get_device_module(kind)
        return int(module.device_count()) if module.is_available() else 0
    except (AttributeError, RuntimeError):  # torch was built without it
        return 0


def _advice() -> str:
    """What there is, and what to write."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        if torch.version.cuda or torch.version.hip:
            why = " (see whether nvidia-smi shows a GPU, and what CUDA_VISIBLE_DEVICES says)"
        else:
            why = " (its build is one without CUDA: https://pytorch.org/get-started has others)"
        return (
            f"torch {torch.__version__} finds no accelerator{why}; pass device='cpu', or leave "
            "device out, to run on the CPU"
        )
    names = [f"{found.type}:{index}" for index in range(torch.accelerator.device_count())]
    return f"pass one of {', '.join([*names, 'cpu'])}, or leave device out for the current one"


def resolve_budgets(
    device: torch.device, ram: Size, on_device: Size | None, disk: Size | None, disk_dir: Path
) -> dict[Tier, int | None]:
    """Bytes per tier. There is no DEVICE tier when the device is the CPU: host memory is it."""
    budgets: dict[Tier, int | None] = {Tier.HOST: _whole_pages(ram_bytes(ram), "ram_budget")}
    if device.type != "cpu":
        budgets[Tier.DEVICE] = _whole_pages(_device_bytes(device, on_device), "device_budget")
    elif is_chosen(on_device):
        raise ValueError(
            "device_budget is for accelerators; on the CPU ram_budget covers everything: leave "
            "device_budget out"
        )
    if disk is None:
        budgets[Tier.DISK] = None
    else:
        there = next(p for p in (disk_dir.absolute(), *disk_dir.absolute().parents) if p.exists())
        usage = shutil.disk_usage(there)
        budgets[Tier.DISK] = parse_size(disk, total=usage.total, auto=usage.free // shares.AUTO)
    return budgets


def ram_bytes(ram: Size) -> int:
    """`ram_budget` in bytes, as `sizes.ram_bytes`; what `"auto"` came to is logged."""
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
            "ram_budget is %s, but this process may use %s: the system may end it before the "
            "budget is used up; lower it, such as to '80%%'",
            size(nbytes, Units.DECIMAL),
            size(usable, Units.DECIMAL),
        )
    return nbytes


def is_chosen(device_budget: Size | None) -> bool:
    """Whether somebody said how large the device budget is."""
    return not (device_budget is None or is_auto(device_budget))


def grown_device_budget(budget: int, held: int, free: int) -> int:
    """A device budget that nobody chose, once every model has run: half of what that left over.

    Until then it is half of what was `free`, so that models may take the rest. What they took is
    still in torch's cache, for their next run. The other half of what is free now is for a larger
    run, and for what runs beside the store. `held` are the bytes that the store has there.
    """
    return max(budget, (held + free // shares.AUTO) // PAGE * PAGE)


def _device_bytes(device: torch.device, budget: Size | None) -> int:
    if isinstance(budget, int) and not isinstance(budget, bool):
        return parse_size(budget)
    free, total = device_memory(device)
    if budget is not None and not is_auto(budget):
        return parse_size(budget, total=total)
    nbytes = free // shares.AUTO  # the other half is left to activations
    logger.info(
        "device_budget 'auto': %s, half of the %s free",
        size(nbytes, Units.DECIMAL),
        size(free, Units.DECIMAL),
    )
    return nbytes


def device_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of an accelerator. Raises ValueError if it cannot tell."""
    sources = (
        (torch.accelerator, "get_memory_info"),  # of torch 2.10 and later, and not of all devices
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
        f"{device} does not tell how much memory it has: pass device_budget in bytes"
    ) from reason


def _whole_pages(nbytes: int, name: str) -> int:
    if nbytes < PAGE:
        raise ValueError(f"{name} is {nbytes} bytes, less than one page: pass at least {PAGE}")
    return nbytes // PAGE * PAGE
