"""Run a model from an object store, with RAM for a quarter of it and disk for a half.

Takes some seconds, and 40 MB of disk. Needs `tierstore[remote]`; no GPU, no network.

    pip install 'tierstore[remote]'
    python docs/examples/run_from_object_store.py

It runs offline: a directory, by its URL, stands for the object store. To use a bucket, replace the
URL with `s3://bucket/...` and set credentials in the environment.
"""

import itertools
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.func import functional_call

from tierstore import TierStore

LAYERS, WIDTH = 24, 512


def layer(device: str = "cpu") -> torch.nn.Module:
    with torch.device(device):
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())


with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    torch.manual_seed(0)
    layers = [layer() for _ in range(LAYERS)]
    weights = {f"{i}.{n}": t for i, one in enumerate(layers) for n, t in one.state_dict().items()}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    bucket = Path(folder) / "bucket"
    bucket.mkdir()
    save_file(weights, bucket / "model.safetensors")

    x = torch.randn(4, WIDTH)
    expected = x
    for one in layers:
        expected = one(expected)

    empty = layer("meta")  # its weights come from the store
    groups = {f"{i}": [f"{i}.{n}" for n in empty.state_dict()] for i in range(LAYERS)}
    for run in ("first", "second"):
        with TierStore(
            nbytes // 4, Path(folder) / "store", device="cpu", disk_budget=nbytes // 2
        ) as store:
            store.register_checkpoint(f"file://{bucket}", groups=groups)
            fetched = [0]
            for _ in range(4):
                result = x
                for key in groups:
                    with store.acquire(key) as lease:
                        own = {n.partition(".")[2]: t for n, t in lease.tensors.items()}
                        result = functional_call(empty, own, result)
                assert torch.equal(result, expected)
                fetched.append(store.stats().bytes_fetched)
        steps = [f"{(b - a) / nbytes:.0%}" for a, b in itertools.pairwise(fetched)]
        print(f"{run} run: of {nbytes / 1e6:.0f} MB, each step fetched {', '.join(steps)}")
print("OK: each step computed what the model in memory does")
