"""Put a model of 400 MB on a store, and print the resulting warnings.

python -m tests.dispatch.memory_warning HOW FILE DISK_DIR
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tierstore import TierStore, dispatch_model, enable_group_offload

NBYTES = 100 * 1000 * 1000 * 4


def loaded(how: str, file: str) -> nn.Module:
    """Load the model: in memory, or as a map of a file."""
    with torch.device("meta" if how == "mapped" else "cpu"):
        model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(100)))
    if how == "mapped":
        one = torch.zeros(1000, 1000)
        save_file({name: one.clone() for name in model.state_dict()}, file)
        model.load_state_dict(load_file(file), assign=True)
    return model


def main(how: str, file: str, disk_dir: str) -> None:
    model = loaded(how, file)
    offload = enable_group_offload if how == "group offload" else dispatch_model
    with (
        TierStore("40MB", disk_dir, device="cpu") as store,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        offload(model, store)
    messages = [str(each.message) for each in caught if "tierstore" in str(each.message)]
    print(
        "RESULT " + json.dumps({"messages": messages, "where": [each.filename for each in caught]})
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
