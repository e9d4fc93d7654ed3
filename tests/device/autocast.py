"""Autocast on the pretend accelerator (see autocast.cpp), which has none."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from tests.device import pretend

SOURCE = Path(__file__).with_name("autocast.cpp")


@functools.cache
def load() -> None:
    """Build it when needed, and register it with torch. The accelerator must be loaded."""
    torch.ops.load_library(str(pretend.build([SOURCE])))
    module = torch.get_device_module("pretend")
    if not hasattr(module, "get_amp_supported_dtype"):
        module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
