"""Build, load and read the pretend accelerator (see pretend.cpp).

``load()`` builds it when needed and registers it with torch under the name
``pretend``.  It has two devices, ``pretend:0`` and ``pretend:1``.

With ``TIERSTORE_PRETEND=asynchronous`` in the environment, this module is the one of
tests/device/asynchronous.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import torch

if os.environ.get("TIERSTORE_PRETEND") == "asynchronous":
    sys.modules[__name__] = importlib.import_module("tests.device.asynchronous.pretend")

NAME = "pretend"
SOURCE = Path(__file__).with_name("pretend.cpp")
PARTS = [SOURCE, *(SOURCE.with_name(f"{part}.h") for part in ("memory", "backend", "kernels"))]
FLAGS = ["-std=c++20", "-shared", "-fPIC", "-O1", "-w"]
KINDS = ("h2d", "d2h", "d2d")

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


# ------------------------------------------------------------------- building


def ready() -> str | None:
    """Load the accelerator if it can be used here; otherwise say why not.

    Call it when a test module is imported, so before any test has run: see load().
    """
    reason = available()
    if reason is None:
        load()
    return reason


def available() -> str | None:
    """Why the accelerator cannot be used here, or None if it can."""
    if _library is not None:
        return None
    if torch.accelerator.is_available():
        return "torch has a real accelerator here, and one process can use only one kind"
    if os.name != "posix":
        return "the pretend accelerator is built for Linux only"
    if not _built_path().exists() and _compiler() is None:
        return "no C++ compiler to build the pretend accelerator with"
    if not (_torch_folder() / "include" / "ATen" / "ATen.h").exists():
        return "torch was installed without its C++ headers"
    return _build_failure()


@functools.cache
def _build_failure() -> str | None:
    try:
        build()
    except RuntimeError as error:
        return str(error)
    return None


def build() -> Path:
    """Compile unless the same source was compiled before; return the library."""
    built = _built_path()
    if not built.exists():
        built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(built)
    return built


def _compile(built: Path) -> None:
    # Under a private name first: another run may be building the same thing.
    handle, draft = tempfile.mkstemp(dir=built.parent, suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run(_command(draft), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            first = [line for line in done.stderr.splitlines() if "error" in line][:3]
            raise RuntimeError("the pretend accelerator does not build: " + " / ".join(first))
        os.replace(draft, built)
    finally:
        Path(draft).unlink(missing_ok=True)


def _command(target: str) -> list[str]:
    folder = _torch_folder()
    include, lib = folder / "include", folder / "lib"
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        _compiler() or "g++",
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(SOURCE),
        "-o",
        target,
        f"-L{lib}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{lib}",
    ]


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _built_path() -> Path:
    key = hashlib.sha256(b"".join(part.read_bytes() for part in PARTS))
    key.update(repr((torch.__version__, str(_torch_folder()), FLAGS)).encode())
    folder = f"tierstore-{NAME}-{os.getuid()}-{key.hexdigest()[:16]}"
    return Path(tempfile.gettempdir()) / folder / "pretend.so"


# ------------------------------------------------------------------ registering


def load() -> types.ModuleType:
    """Register the accelerator, once in a process; return ``torch.pretend``.

    The first call must come before the first backward pass of the process, even
    one on the CPU: that is when autograd starts its threads, one for each device.
    """
    global _library
    with _lock:
        if _library is None:
            path = str(build())
            torch.ops.load_library(path)
            library = ctypes.CDLL(path)
            _declare(library)
            torch.utils.rename_privateuse1_backend(NAME)
            torch._register_device_module(NAME, _device_module())
            torch.utils.generate_methods_for_privateuse1_backend()
            atexit.register(_let_autograd_threads_finish)
            _library = library
            _check_autograd()
    return torch.get_device_module(NAME)


def _check_autograd() -> None:
    """Fail now, and say why, rather than with torch's internal assertion later."""
    try:
        (torch.ones(1, requires_grad=True).to(NAME) * 1).backward()
    except RuntimeError as error:
        raise RuntimeError("pretend.load() must come before the first backward pass") from error


def _let_autograd_threads_finish() -> None:
    """Keep the exit of a process that has just run a backward pass clean.

    The thread that autograd keeps for each device drops its last references a
    moment after backward() returns.  If Python is shutting down by then, the
    process aborts: "terminate called without an active exception".
    """
    time.sleep(0.05)


def _declare(library: ctypes.CDLL) -> None:
    integer, address = ctypes.c_int64, ctypes.c_void_p
    library.pretend_set_memory_limit.argtypes = [ctypes.c_int, integer]
    library.pretend_set_pinned_limit.argtypes = [integer]
    library.pretend_register_host.argtypes = [address, integer]
    library.pretend_unregister_host.argtypes = [address]
    for name in ("pinned_bytes", "peak_pinned_bytes", "copied", "stale_copies", "queued_tasks"):
        getattr(library, f"pretend_{name}").restype = integer


def _device_module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")
    for function in _EXPORTED:
        setattr(module, function.__name__, function)
    module.Stream = torch.Stream
    module.Event = torch.Event
    return module


def _loaded() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError("the pretend accelerator is not loaded: call load() first")
    return _library


def _index(device: int | str | torch.device | None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device if device >= 0 else current_device()
    index = torch.device(device).index
    return current_device() if index is None else index


# ---------------------------------------------------------- memory and counters


def memory_allocated(index: int = 0) -> int:
    """Bytes of the tensors that live on the device now."""
    return torch.accelerator.memory_allocated(_index(index))


def max_memory_allocated(index: int = 0) -> int:
    """The most bytes that lived on the device since the last reset."""
    return torch.accelerator.max_memory_allocated(_index(index))


def memory_reserved(index: int = 0) -> int:
    """As memory_allocated, with freed blocks that record_stream still holds."""
    return torch.accelerator.memory_reserved(_index(index))


def max_memory_reserved(index: int = 0) -> int:
    return torch.accelerator.max_memory_reserved(_index(index))


def reset_peak_memory_stats(index: int | None = None) -> None:
    """Start the peaks of one device, or of all, at what is in use now."""
    for each in range(device_count()) if index is None else [_index(index)]:
        torch.accelerator.reset_peak_memory_stats(each)


def set_memory_limit(nbytes: int | None, index: int = 0) -> None:
    """Above this many bytes in use an allocation raises OutOfMemoryError."""
    _loaded().pretend_set_memory_limit(_index(index), -1 if nbytes is None else nbytes)


def mem_get_info(index: int | str | torch.device | None = None) -> tuple[int, int]:
    """Free bytes and the limit of the device."""
    return torch.accelerator.get_memory_info(_index(index))


def pinned_bytes() -> int:
    """Bytes of pinned host memory; queued copies keep theirs until they run."""
    return _loaded().pretend_pinned_bytes()


def peak_pinned_bytes() -> int:
    return _loaded().pretend_peak_pinned_bytes()


def reset_peak_pinned() -> None:
    _loaded().pretend_reset_peak_pinned()


def set_pinned_limit(nbytes: int | None) -> None:
    """Above this many pinned bytes, pinning raises RuntimeError."""
    _loaded().pretend_set_pinned_limit(-1 if nbytes is None else nbytes)


def register_host(address: int, nbytes: int) -> None:
    """Pin memory the caller owns, as cudaHostRegister does."""
    if _loaded().pretend_register_host(address, nbytes):
        raise RuntimeError("pretend: this host memory cannot be registered")


def unregister_host(address: int) -> None:
    """Unpin what register_host pinned; queued copies run first."""
    if _loaded().pretend_unregister_host(address):
        raise RuntimeError("pretend: this host memory is not registered")


def copied(kind: str) -> int:
    """Bytes of the copies asked for so far; kind is 'h2d', 'd2h' or 'd2d'."""
    return _loaded().pretend_copied(KINDS.index(kind))


def stale_copies() -> int:
    """Queued copies that ran only after their device block was given back."""
    return _loaded().pretend_stale_copies()


def queued_tasks(index: int = 0) -> int:
    """Copies, marks and waits that no wait has forced so far."""
    return _loaded().pretend_queued_tasks(_index(index))


def reset_counters() -> None:
    """Set the byte counters and the count of stale copies to zero."""
    _loaded().pretend_reset_counters()


# --------------------------------------------- what torch asks of a device module


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """There is nothing to set up."""


def _lazy_init() -> None:
    """There is nothing to set up."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: int | str | torch.device) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: int | str | torch.device) -> torch.accelerator.device_index:
    """A context in which this device is the current one."""
    return torch.accelerator.device_index(_index(device))


def synchronize(device: int | str | torch.device | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: int | str | torch.device | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """As torch.cuda.stream: a stream is its own context manager here."""
    return stream


def empty_cache() -> None:
    """Nothing is cached."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def manual_seed(seed: int) -> None:
    manual_seed_all(seed)


def manual_seed_all(seed: int) -> None:
    torch.ops.pretend_accelerator.seed_all(seed)


def get_rng_state(device: int | str | torch.device | None = None) -> torch.Tensor:
    return torch.ops.pretend_accelerator.get_rng_state(_index(device))


def set_rng_state(new_state: torch.Tensor, device: int | str | torch.device | None = None) -> None:
    torch.ops.pretend_accelerator.set_rng_state(_index(device), new_state)


_EXPORTED = [
    memory_allocated,
    max_memory_allocated,
    memory_reserved,
    max_memory_reserved,
    reset_peak_memory_stats,
    set_memory_limit,
    mem_get_info,
    pinned_bytes,
    peak_pinned_bytes,
    reset_peak_pinned,
    set_pinned_limit,
    register_host,
    unregister_host,
    copied,
    stale_copies,
    queued_tasks,
    reset_counters,
    is_available,
    is_initialized,
    init,
    _lazy_init,
    _is_in_bad_fork,
    device_count,
    current_device,
    set_device,
    device,
    synchronize,
    current_stream,
    set_stream,
    stream,
    empty_cache,
    get_amp_supported_dtype,
    is_bf16_supported,
    manual_seed,
    manual_seed_all,
    get_rng_state,
    set_rng_state,
]
