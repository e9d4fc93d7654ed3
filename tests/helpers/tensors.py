"""Tensors, and containers of them: copying and comparing."""

from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import torch
from torch import nn


def parameter_bytes(module: nn.Module, *, trained: bool = False) -> int:
    """Return the bytes of all parameters (or those that are trained), tied ones once."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad or not trained)


def assert_same(
    found: Any, expected: Any, where: str = "", *, same_device: bool = False, device: str = "cpu"
) -> None:
    """Check that nested dicts and lists are equal, and their tensors bitwise, with the same dtype.

    Tensors may be on other devices, unless the device must be the same, too. If a `device` is
    given, it has computed `found`, and the CPU `expected`: `accelerator.same` compares.
    """
    again = functools.partial(assert_same, same_device=same_device, device=device)
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert found.dtype is expected.dtype, where
        assert found.device == expected.device or not same_device, where
        if device == "cpu":
            assert torch.equal(found.detach().cpu(), expected.detach().cpu()), where
        else:
            # Imported here: this loads the accelerator, which must not happen in a process that
            # forks or has run a backward pass without it.
            from tests.accelerator import same

            assert same(found, expected, device), where
    elif isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys(), where
        for name, each in expected.items():
            again(found[name], each, f"{where} {name}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            again(*pair, f"{where} {number}")
    else:
        assert type(found) is type(expected) and found == expected, where


def pickled(value: Any) -> Any:
    """Return a copy made with pickle."""
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    """Return a copy made with torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
