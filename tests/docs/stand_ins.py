"""Small stand-ins for objects that examples of the documentation need and a test does not have.

`<!-- stand-in: pipeline path/to/pipeline -->` above a block says that a small pipeline is saved
under that path before the block runs. `prepare` and `finish` run in the block's process.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Namespace = dict[str, Any]

PATHS = {
    "/nvme/": "nvme/",
    "/run/user/1000/tierstore/": "run/",
    "s3://bucket": "memory://bucket",
}
"""Paths in a block, and their replacements when it runs: none is outside of the directory."""


def with_paths_here(code: str) -> str:
    """Return the code of a block that has a stand-in, as it runs."""
    for written, here in PATHS.items():
        code = code.replace(written, here)
    return code


def prepare(what: str, namespace: Namespace) -> None:
    """Make the object that a comment `stand-in: WHAT` names."""
    for each in what.split(","):
        name, *words = each.split()
        STAND_INS[name](namespace, *words)


def finish(what: str, namespace: Namespace) -> None:
    """Check the block's result, where the block itself does not."""
    for each in what.split(","):
        if (check := CHECKS.get(each.split()[0])) is not None:
            check(namespace)


def _pipeline(_: Namespace, path: str) -> None:
    from diffusers import FluxPipeline

    from tests.pipelines import build_flux

    if not Path(path).exists():
        build_flux(path, "tiny")
    call = inspect.unwrap(FluxPipeline.__call__)
    wanted = {"height": 32, "width": 32, "num_inference_steps": 2}
    parameters = inspect.signature(call).parameters.values()
    defaults = [each for each in parameters if each.default is not inspect.Parameter.empty]
    call.__defaults__ = tuple(wanted.get(each.name, each.default) for each in defaults)


def _model(_: Namespace, path: str) -> None:
    from tests.pipelines import build_llama

    if not Path(path).exists():
        build_llama(path, "tiny")


def _inputs(namespace: Namespace) -> None:
    import torch

    namespace["inputs"] = {"input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4}


def _transformer(namespace: Namespace, path: str) -> None:
    from diffusers import FluxTransformer2DModel

    _pipeline(namespace, path)
    loaded = FluxTransformer2DModel.from_pretrained(path, subfolder="transformer")
    namespace["diffusers_model"] = loaded


def _service(_: Namespace) -> None:
    """Start `tierstore-serve`, at the socket that the recipe names."""
    folder = Path("run")
    folder.mkdir(mode=0o700, exist_ok=True)
    socket = folder / "weights.sock"
    words = [sys.executable, "-m", "tierstore.service", "served", "--ram", "64MB"]
    process = subprocess.Popen([*words, "--socket", str(socket)])
    atexit.register(lambda: (process.terminate(), process.wait(60)))
    until = time.monotonic() + 60
    while not socket.exists():
        assert time.monotonic() < until and process.poll() is None, "the service has not started"
        time.sleep(0.05)


def _answered(namespace: Namespace) -> None:
    image = namespace["answer"]("a red boat on a calm lake")
    assert image.size == (32, 32)
    assert namespace["store"].stats().leased_bytes > 0
    namespace["store"].close()


def _bucket(namespace: Namespace, path: str) -> None:
    """Put all files of a pipeline into an object store."""
    from tierstore.tiers.object_store import memory_store

    _pipeline(namespace, path)
    store = memory_store("memory://bucket")
    for file in sorted(Path(path).rglob("*")):
        if file.is_file():
            store.put(f"flux/{file.relative_to(path)}", file.read_bytes())


def _is_a_pipeline(namespace: Namespace) -> None:
    assert type(namespace["pipe"]).__name__ == "FluxPipeline"
    assert os.path.isdir(Path("store", "mirrors")) or os.path.isdir(Path("nvme"))


def run_example(name: str, code: str) -> None:
    """Run the example in the docstring of `name`, in a separate directory."""
    os.makedirs(name)
    os.chdir(name)
    namespace = _names()
    _names_of(name, namespace)
    exec(compile(with_paths_here(code), name, "exec"), namespace)
    namespace["store"].close()
    os.chdir("..")


def _names() -> Namespace:
    import torch
    from torch import nn

    import tierstore

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(256, 64), nn.Linear(64, 256)

        def forward(self, x: Any, mask: Any = None) -> Any:
            return x + self.down_proj(torch.relu(self.up_proj(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x: Any) -> Any:
            return nn.Sequential(*self.layers)(x).square().mean()

        generate = forward

    model, x = Model(), torch.randn(2, 256)
    store = tierstore.TierStore("16MB", "store", device="cpu")
    store.put("blocks.0", {"weight": torch.randn(8, 256)})
    return {
        **{name: getattr(tierstore.errors, name) for name in tierstore.errors.__all__},
        **{name: getattr(tierstore, name) for name in tierstore.__all__},
        **{"torch": torch, "nn": nn, "store": store, "model": model, "x": x, "mask": None},
        **{"block": model.layers[0], "optimizer": torch.optim.AdamW(model.parameters())},
        **{"inputs": {"x": x}, "up": torch.zeros(64, 2), "down": torch.zeros(2, 256)},
    }


def _names_of(name: str, names: Namespace) -> None:
    """Add the names that one example needs besides those of all examples."""
    model, store = names["model"], names["store"]
    match name.replace(".errors.", ".").replace(".types.", ".").split(".")[1:]:
        case ["from_pretrained" | "enable_group_offload" | "disable_offload" as function]:
            from diffusers import DiffusionPipeline

            _pipeline(names, "a/pipeline")
            names["DiffusionPipeline"] = DiffusionPipeline
            names["pipe"] = DiffusionPipeline.from_pretrained(
                "a/pipeline", dtype=names["torch"].bfloat16
            )
            if function == "disable_offload":
                names["enable_group_offload"](names["pipe"], store)
        case ["OffloadHandle", *_]:
            names["handle"] = names["enable_group_offload"](model, store)
        case ["edit_weights"]:
            names["dispatch_model"](model, store)
        case ["load_training"]:
            extra = {"rng": names["torch"].get_rng_state()}
            names["save_training"]("run", model, names["optimizer"], extra=extra)
        case ["prometheus", *_]:
            names["REGISTRY"] = importlib.import_module("prometheus_client").REGISTRY
            names["StoreCollector"] = importlib.import_module("tierstore.prometheus").StoreCollector
        case ["trace", *_]:
            store.acquire("blocks.0").release()
            store.trace("run.json")
            names["read_trace"] = importlib.import_module("tierstore.trace").read_trace


STAND_INS: dict[str, Callable[..., None]] = {
    "bucket": _bucket,
    "inputs": _inputs,
    "model": _model,
    "pipeline": _pipeline,
    "service": _service,
    "transformer": _transformer,
}

CHECKS: dict[str, Callable[[Namespace], None]] = {
    "bucket": _is_a_pipeline,
    "service": _answered,
}
