"""What examples of the documentation need and a test does not have: small ones of the same kind.

`<!-- stand-in: pipeline path/to/pipeline -->` above a block says that a small pipeline is saved
under that path before the block runs. `prepare` and `finish` run in the block's own process.
"""

from __future__ import annotations

import atexit
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Namespace = dict[str, Any]

_before: dict[Any, Any] = {}
"""The defaults of functions that were changed."""

PATHS = {
    "/nvme/": "nvme/",
    "/run/user/1000/tierstore/": "run/",
    "s3://bucket": "memory://bucket",
}
"""What is written in a block, and what it is when it runs: nothing outside of the directory."""


def with_paths_here(code: str) -> str:
    """The code of a block that has a stand-in, as it runs."""
    for written, here in PATHS.items():
        code = code.replace(written, here)
    return code


def prepare(what: str, namespace: Namespace) -> None:
    """Make what a comment `stand-in: WHAT` names."""
    for each in what.split(","):
        name, *words = each.split()
        STAND_INS[name](namespace, *words)


def finish(what: str, namespace: Namespace) -> None:
    """Look at what the block has made of it, where that is not done in the block."""
    for each in what.split(","):
        check = CHECKS.get(each.split()[0])
        if check is not None:
            check(namespace)


def _pipeline(_: Namespace, path: str) -> None:
    from diffusers import FluxPipeline

    from tests.pipelines import build_flux

    if not Path(path).exists():
        build_flux(path, "tiny")
    _with_defaults(FluxPipeline.__call__, height=32, width=32, num_inference_steps=2)


def _with_defaults(function: Callable[..., Any], **wanted: Any) -> None:
    """Change what arguments are that are not given."""
    inner = inspect.unwrap(function)
    parameters = inspect.signature(inner).parameters.values()
    defaults = [each for each in parameters if each.default is not inspect.Parameter.empty]
    _before.setdefault(inner, inner.__defaults__)
    inner.__defaults__ = tuple(wanted.get(each.name, each.default) for each in defaults)


def undo() -> None:
    """What `prepare` changed for all of the process is as it was."""
    while _before:
        function, defaults = _before.popitem()
        function.__defaults__ = defaults


def _model(_: Namespace, path: str) -> None:
    from tests.pipelines import build_llama

    if not Path(path).exists():
        build_llama(path, "tiny")


def _inputs(namespace: Namespace) -> None:
    import torch

    namespace["inputs"] = {"input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4}


def _transformer(namespace: Namespace, path: str) -> None:
    """A model of diffusers that is called `diffusers_model`."""
    from diffusers import FluxTransformer2DModel

    _pipeline(namespace, path)
    loaded = FluxTransformer2DModel.from_pretrained(path, subfolder="transformer")
    namespace["diffusers_model"] = loaded


def _service(_: Namespace) -> None:
    """`tierstore-serve`, at the socket that the recipe names."""
    folder = Path("run")
    folder.mkdir(mode=0o700, exist_ok=True)
    socket = folder / "weights.sock"
    words = [sys.executable, "-m", "tierstore.service", "served", "--ram", "64MB"]
    process = subprocess.Popen([*words, "--socket", str(socket)])
    atexit.register(_ended, process)
    until = time.monotonic() + 60
    while not socket.exists():
        assert time.monotonic() < until and process.poll() is None, "the service has not started"
        time.sleep(0.05)


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def _answered(namespace: Namespace) -> None:
    image = namespace["answer"]("a red boat on a calm lake")
    assert image.size == (32, 32)
    assert namespace["store"].stats().leased_bytes > 0
    namespace["store"].close()


def _bucket(namespace: Namespace, path: str) -> None:
    """All files of a pipeline, in an object store."""
    from tierstore.tiers.object_store import memory_store

    _pipeline(namespace, path)
    store = memory_store("memory://bucket")
    for file in sorted(Path(path).rglob("*")):
        if file.is_file():
            store.put(f"flux/{file.relative_to(path)}", file.read_bytes())


def _is_a_pipeline(namespace: Namespace) -> None:
    assert type(namespace["pipe"]).__name__ == "FluxPipeline"
    assert os.path.isdir(Path("store", "mirrors")) or os.path.isdir(Path("nvme"))


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
