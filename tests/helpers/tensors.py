"""Tensors, and whatever holds some: copies of them, and whether they are the same."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import nn


def parameter_bytes(module: nn.Module, *, trained: bool = False) -> int:
    """Bytes of all parameters (or those that are trained), tied ones once."""
    return sum(p.nbytes for p in module.parameters() if p.requires_grad or not trained)


def assert_same(found: Any, expected: Any, where: str = "", *, same_device: bool = False) -> None:
    """Nested dicts and lists are equal, and the tensors in them bit for bit, of the same dtype.

    Of tensors, the device may be another, unless it must be the same, too.
    """
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert found.dtype is expected.dtype, where
        assert found.device == expected.device or not same_device, where
        assert torch.equal(found.cpu(), expected.cpu()), where
    elif isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys(), where
        for name, each in expected.items():
            assert_same(found[name], each, f"{where} {name}", same_device=same_device)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected), where
        for number, pair in enumerate(zip(found, expected, strict=True)):
            assert_same(*pair, f"{where} {number}", same_device=same_device)
    else:
        assert type(found) is type(expected) and found == expected, where


def pickled(value: Any) -> Any:
    """A copy that was pickled."""
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    """A copy that was saved and loaded."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)
