"""The accelerator that tests use, without its name: see tests/devices.py.

Bits are compared where a value and its reference were computed on the same device. Where the
reference is the CPU's, `same` compares: bits on the pretend accelerator, whose kernels are the
CPU's, and values within `TOLERANCES` on a real one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests import devices
from tests.device import pretend as _pretend

ACCELERATOR = devices.chosen()
"""Type of the accelerator, as torch names it: "pretend" or "cuda"."""
DEVICE_0, DEVICE_1 = f"{ACCELERATOR}:0", f"{ACCELERATOR}:1"
PRETENDING = ACCELERATOR == devices.PRETEND


# Availability -------------------------------------------------------------------------------------

needs_accelerator = pytest.mark.accelerator
DEVICES = ("cpu", pytest.param(ACCELERATOR, marks=needs_accelerator))
on_both = pytest.mark.parametrize("device", DEVICES)


def _prepare() -> str | None:
    """Make the accelerator ready, or return why it cannot be used here.

    The pretend one is loaded: that must come before the first backward pass of the process.
    """
    if PRETENDING:
        return _pretend.ready()
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != ACCELERATOR:
        return f"torch has no {ACCELERATOR} device here"
    _compute_the_same_each_time()
    return None


def _compute_the_same_each_time() -> None:
    """Choose kernels that give the same bits for the same input, so that bits can be compared.

    TensorFloat-32 rounds more than `TOLERANCES` allow. cuDNN's attention adds gradients up in no
    fixed order, nor does memory-efficient attention. Only flash attention, set to a fixed order,
    and plain products remain. `devices.DETERMINISTIC` is for cuBLAS. An operator without such a
    kernel still runs. Memory is left as it is allocated, as users have it.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.set_flags(_benchmark=False, _deterministic=True, _allow_tf32=False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


REASON = _prepare()
"""Reason why the accelerator cannot be used here, or None if it can."""


# Common functions ---------------------------------------------------------------------------------


def module() -> ModuleType:
    """Return the accelerator's module of torch, such as torch.cuda."""
    return torch.get_device_module(ACCELERATOR)


def count() -> int:
    """Return the number of devices."""
    return int(module().device_count()) if REASON is None else 0


def synchronize() -> None:
    """Wait for the first device."""
    torch.accelerator.synchronize(torch.device(DEVICE_0))


def finish() -> None:
    """Wait for all devices that were used. Raises the error of a kernel that ran late."""
    if PRETENDING:
        _pretend.finish()
    elif REASON is None and module().is_initialized():
        for index in range(count()):
            torch.accelerator.synchronize(index)


def counted(name: str, *arguments: Any) -> int:
    """Return a count of the pretend accelerator, such as "stale_copies". A real one has none: 0."""
    return int(getattr(_pretend, name)(*arguments)) if PRETENDING else 0


def start_counting() -> None:
    """Reset all counters, and the peaks of the first device."""
    module().reset_peak_memory_stats()
    if PRETENDING:
        _pretend.reset_counters()
        _pretend.reset_peak_pinned()


class _Pretend:
    """tests.device.pretend, for tests that are marked `pretend_only` and their helpers."""

    def __getattr__(self, name: str) -> Any:
        devices.require_mark(name)
        return getattr(_pretend, name)


pretend: Any = _Pretend()


# Comparison of values -----------------------------------------------------------------------------

TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 2e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""Relative tolerances for results of a real device against the CPU's, by dtype.

Kernels sum in another order, which moves each result by a few roundings.
"""


def same(found: torch.Tensor, expected: torch.Tensor, device: str | torch.device) -> bool:
    """Return whether `device` has computed what the CPU computes from the same values.

    Bits are compared on the CPU and on the pretend accelerator, and for dtypes that are exact.
    Otherwise each element may differ by its dtype's tolerance times its size and the mean size in
    the tensor, so that neither scale nor cancellation matters. NaN must match NaN.
    """
    found, expected = found.detach().cpu(), expected.detach().cpu()
    if found.dtype is not expected.dtype or found.shape != expected.shape:
        return False
    exact = torch.device(device).type in ("cpu", devices.PRETEND)
    if exact or expected.dtype not in TOLERANCES:
        return torch.equal(found, expected)
    sizes = expected.double().abs()
    usual = sizes[sizes.isfinite()].mean().nan_to_num()
    error, allowed = (
        found.double() - expected.double(),
        TOLERANCES[expected.dtype] * (sizes + usual),
    )
    near = (error.abs() <= allowed) & sizes.isfinite()
    return bool((near | (found == expected) | (found.isnan() & expected.isnan())).all())
