"""Build, load and read the pretend accelerator (see pretend.cpp).

``load()`` builds it when needed and registers it with torch under the name
``pretend``.  It has two devices, ``pretend:0`` and ``pretend:1``.

Its work runs later than the call, at moments drawn by a seed: ``seed`` or the environment
variable ``TIERSTORE_PRETEND_SEED``, reset for each test.  ``set_slowness`` or
``TIERSTORE_PRETEND_SLOWNESS`` sets how far it falls behind.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

NAME = "pretend"
SOURCE = Path(__file__).with_name("pretend.cpp")
PARTS = [
    SOURCE,
    *(
        SOURCE.with_name(f"{part}.h")
        for part in ("state", "streams", "maps", "memory", "backend", "kernels")
    ),
]
FLAGS = ["-std=c++20", "-shared", "-fPIC", "-O1", "-w"]
KINDS = ("h2d", "d2h", "d2d")
SLOWNESS = 2.0
"""Default slowness: the device falls behind, and catches up where a caller waits."""

_lock = threading.Lock()
_library: ctypes.CDLL | None = None


# ------------------------------------------------------------------- building


def ready() -> str | None:
    """Load the accelerator if it can be used here; otherwise return why not.

    Call it when a test module is imported, so before any test has run: see load().
    """
    reason = available()
    if reason is None:
        load()
    return reason


def available() -> str | None:
    """Return why the accelerator cannot be used here, or None if it can."""
    if _library is not None:
        return None
    if torch.accelerator.is_available():
        return "torch has a real accelerator here, and one process can use only one kind"
    if os.name != "posix":
        return "the pretend accelerator is built for Linux only"
    if not _built_path(PARTS).exists() and _compiler() is None:
        return "no C++ compiler to build the pretend accelerator with"
    if not (_torch_folder() / "include" / "ATen" / "ATen.h").exists():
        return "torch was installed without its C++ headers"
    return _build_failure()


@functools.cache
def _build_failure() -> str | None:
    try:
        build(PARTS)
    except RuntimeError as error:
        return str(error)
    return None


def build(parts: Sequence[Path]) -> Path:
    """Compile the first part, unless all are compiled and unchanged; return the library.

    Raises RuntimeError if that fails.
    """
    built = _built_path(parts)
    if not built.exists():
        built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _compile(parts[0], built)
    return built


def _compile(source: Path, built: Path) -> None:
    # Under a private name first: another run may be building the same thing.
    handle, draft = tempfile.mkstemp(dir=built.parent, suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run(_command(source, draft), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            first = [line for line in done.stderr.splitlines() if "error" in line][:3]
            raise RuntimeError("the pretend accelerator does not build: " + " / ".join(first))
        os.replace(draft, built)
    finally:
        Path(draft).unlink(missing_ok=True)


def _command(source: Path, target: str) -> list[str]:
    folder = _torch_folder()
    include, lib = folder / "include", folder / "lib"
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        _compiler() or "g++",
        *FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(source),
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


def _built_path(parts: Sequence[Path]) -> Path:
    key = hashlib.sha256(b"".join(part.read_bytes() for part in parts))
    key.update(repr((torch.__version__, str(_torch_folder()), FLAGS)).encode())
    folder = f"tierstore-{NAME}-{os.getuid()}-{key.hexdigest()[:16]}"
    return Path(tempfile.gettempdir()) / folder / f"{parts[0].stem}.so"


# ------------------------------------------------------------------ registering


def load() -> types.ModuleType:
    """Register the accelerator, once in a process; return ``torch.pretend``.

    The first call must come before the first backward pass of the process, even one on the CPU:
    that is when autograd starts its threads, one for each device.
    """
    global _library
    with _lock:
        if _library is None:
            path = str(build(PARTS))
            torch.ops.load_library(path)
            library = ctypes.CDLL(path)
            _declare(library)
            _library = library
            torch.utils.rename_privateuse1_backend(NAME)
            torch._register_device_module(NAME, _device_module())
            torch.utils.generate_methods_for_privateuse1_backend()
            start_over()
            atexit.register(_let_autograd_threads_finish)
            _check_autograd()
            torch.empty(1, pin_memory=True)  # before that, torch takes no memory for pinned
    return torch.get_device_module(NAME)


def _check_autograd() -> None:
    """Fail now with a clear message, rather than later with torch's internal assertion."""
    try:
        (torch.ones(1, requires_grad=True).to(NAME) * 1).backward()
    except RuntimeError as error:
        raise RuntimeError("pretend.load() must come before the first backward pass") from error


def _let_autograd_threads_finish() -> None:
    """Keep the exit of a process that has just run a backward pass clean.

    The thread that autograd keeps for each device drops its last references a moment after
    backward() returns. If Python is shutting down by then, the process aborts: "terminate called
    without an active exception".
    """
    time.sleep(0.05)


def _declare(library: ctypes.CDLL) -> None:
    integer, address = ctypes.c_int64, ctypes.c_void_p
    library.pretend_seed.argtypes = [ctypes.c_uint64]
    library.pretend_set_slowness.argtypes = [ctypes.c_double]
    library.pretend_set_link_speed.argtypes = [ctypes.c_double]
    library.pretend_work.argtypes = [ctypes.c_double]
    library.pretend_is_capturing.restype = ctypes.c_bool
    library.pretend_watches_maps.restype = ctypes.c_bool
    library.pretend_forget_unmapped.restype = integer
    library.pretend_set_registered_limit.argtypes = [integer]
    library.pretend_fail_registrations.argtypes = [integer]
    library.pretend_set_memory_limit.argtypes = [ctypes.c_int, integer]
    library.pretend_set_pinned_limit.argtypes = [integer]
    library.pretend_register_host.argtypes = [address, integer]
    library.pretend_unregister_host.argtypes = [address]
    for name in _COUNTS:
        getattr(library, f"pretend_{name}").restype = integer


_COUNTS = (
    "pinned_bytes",
    "peak_pinned_bytes",
    "registrations",
    "registered_bytes",
    "unregistered_in_use",
    "copied",
    "stale_tasks",
    "queued_tasks",
)


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


# ------------------------------------------------------------------ when work runs


def seed(number: int | None = None) -> None:
    """Draw the moments at which queued work runs from this seed, or from that of the environment.

    With one thread, the same seed and the same calls give the same order.
    """
    _loaded().pretend_seed(_from_environment("SEED", 0, int) if number is None else number)


def start_over() -> None:
    """Reset the seed and slowness from the environment, if the accelerator is loaded."""
    if _library is not None:
        seed()
        set_slowness(_from_environment("SLOWNESS", SLOWNESS, float))
        set_link_speed(None)


def finish() -> None:
    """Wait for the devices, if the accelerator is loaded.

    Raises the error of a kernel that ran late, unless a call has raised it.
    """
    if _library is not None:
        for index in range(device_count()):
            synchronize(index)


def _from_environment(name: str, otherwise: T, kind: Callable[[str], T]) -> T:
    value = os.environ.get(f"TIERSTORE_PRETEND_{name}")
    return otherwise if value is None else kind(value)


def set_slowness(slowness: float | None = SLOWNESS) -> None:
    """Set how far the device falls behind: on average one task in `slowness` calls runs unprompted.

    None: nothing runs before a caller waits for it. 0: everything runs at its call, as far as the
    events allow.
    """
    _loaded().pretend_set_slowness(math.inf if slowness is None else slowness)


def set_link_speed(bytes_per_second: float | None) -> None:
    """Set how long a copy between host and device takes, in event times and real time.

    They are those of a device that starts work as soon as it can. None: the time that this machine
    takes once the copy runs.
    """
    _loaded().pretend_set_link_speed(bytes_per_second or 0.0)


def occupy(seconds: float, index: int = 0) -> None:
    """Queue a kernel that computes nothing, and takes this long while the link has a speed."""
    torch.ops.pretend_accelerator.occupy(index, seconds * 1e3)


@contextlib.contextmanager
def working(threads: int = 3) -> Iterator[None]:
    """Let the device run work on this many threads, without waiting for calls.

    Callers only queue the work, as with a real device.
    """
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            _loaded().pretend_work(20.0)

    set_slowness(None)  # nothing runs at its call
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        ended.set()
        for worker in workers:
            worker.join()


def begin_capture(stream: torch.Stream | None = None, capture_error_mode: str = "global") -> None:
    """Capture work queued from now on, on a stream or the current one.

    It is never run. Meanwhile each call that waits or queries raises, as in CUDA: in this thread if
    the mode is "thread_local", else in all.
    """
    if capture_error_mode not in ("global", "thread_local"):
        raise ValueError(f"unknown mode: {capture_error_mode}")
    stream = current_stream() if stream is None else stream
    with stream:
        torch.ops.pretend_accelerator.begin_capture(
            stream.device_index, capture_error_mode == "global"
        )


def end_capture() -> None:
    """End the capture. Raises RuntimeError if a call was rejected meanwhile."""
    torch.ops.pretend_accelerator.end_capture()


def is_current_stream_capturing() -> bool:
    return bool(_loaded().pretend_is_capturing(current_device()))


# ---------------------------------------------------------- memory and counters


def memory_allocated(index: int = 0) -> int:
    """Return the bytes of tensors that live on the device now."""
    return torch.accelerator.memory_allocated(_index(index))


def max_memory_allocated(index: int = 0) -> int:
    """Return the most bytes that lived on the device since the last reset."""
    return torch.accelerator.max_memory_allocated(_index(index))


def memory_active(index: int = 0) -> int:
    """Return the bytes of memory_allocated plus freed blocks that record_stream still holds."""
    return _stats(index)["active_bytes.all.current"]


def max_memory_active(index: int = 0) -> int:
    return _stats(index)["active_bytes.all.peak"]


def _stats(index: int) -> dict[str, int]:
    return torch.accelerator.memory_stats(_index(index))


def memory_reserved(index: int = 0) -> int:
    """Return the bytes of memory_active plus freed blocks that are cached for their streams."""
    return torch.accelerator.memory_reserved(_index(index))


def max_memory_reserved(index: int = 0) -> int:
    return torch.accelerator.max_memory_reserved(_index(index))


def reset_peak_memory_stats(index: int | None = None) -> None:
    """Reset the peaks of one device, or of all, to the current use."""
    for each in range(device_count()) if index is None else [_index(index)]:
        torch.accelerator.reset_peak_memory_stats(each)


def set_memory_limit(nbytes: int | None, index: int = 0) -> None:
    """Set a limit in bytes above which an allocation raises OutOfMemoryError.

    Before that, cached blocks are released: first those whose work has passed, then, after waiting
    for the device, all.
    """
    _loaded().pretend_set_memory_limit(_index(index), -1 if nbytes is None else nbytes)


def mem_get_info(index: int | str | torch.device | None = None) -> tuple[int, int]:
    """Return the free bytes and the limit of the device."""
    if _index(index) in _memory_info:
        return _memory_info[_index(index)]
    if not hasattr(torch.accelerator, "get_memory_info"):
        raise NotImplementedError("this torch does not report it")
    return torch.accelerator.get_memory_info(_index(index))


_memory_info: dict[int, tuple[int, int]] = {}


def set_memory_info(info: tuple[int, int] | None, index: int | None = None) -> None:
    """Set the result of ``mem_get_info`` for a device.

    None restores the true values of every device.
    """
    if info is None:
        _memory_info.clear()
    else:
        _memory_info[_index(index)] = info


def pinned_bytes() -> int:
    """Return the bytes of pinned host memory; queued copies keep theirs until they run."""
    return _loaded().pretend_pinned_bytes()


def peak_pinned_bytes() -> int:
    return _loaded().pretend_peak_pinned_bytes()


def reset_peak_pinned() -> None:
    _loaded().pretend_reset_peak_pinned()


def set_pinned_limit(nbytes: int | None) -> None:
    """Set a limit of pinned bytes above which pinning raises RuntimeError."""
    _loaded().pretend_set_pinned_limit(-1 if nbytes is None else nbytes)


class Runtime:
    """Functions of CUDA's own library that a store uses, with their error codes."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        """Pin memory of the caller."""
        return int(_loaded().pretend_register_host(address, nbytes))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        """Unpin memory. Copies that still use it are counted as mistakes, and run first."""
        return int(_loaded().pretend_unregister_host(address))

    @staticmethod
    def cudaGetLastError() -> int:
        """Return this thread's last error, once; otherwise its next launch would raise it."""
        return int(_loaded().pretend_get_last_error())


_ERRORS = {
    1: "invalid argument",
    2: "out of memory",
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
    900: "operation not permitted when stream is capturing",
}


def cudart() -> Runtime:
    """Stand in for torch.cuda.cudart."""
    return Runtime()


def check_error(code: int) -> None:
    """Stand in for torch.cuda.check_error."""
    if code:
        raise RuntimeError(f"pretend error: {_ERRORS[code]} ({code})")


def register_host(address: int, nbytes: int) -> None:
    """Pin memory of the caller, as cudaHostRegister does."""
    check_error(cudart().cudaHostRegister(address, nbytes, 0))


def unregister_host(address: int) -> None:
    """Unpin memory that register_host pinned."""
    check_error(cudart().cudaHostUnregister(address))


def watches_maps() -> bool:
    """Return whether unmapping registered memory is detected: see maps.h."""
    return bool(_loaded().pretend_watches_maps())


def forget_unmapped() -> int:
    """Return how often registered memory was unmapped since the last call.

    None of it is registered any more.
    """
    return int(_loaded().pretend_forget_unmapped())


def check_at_end() -> None:
    """Fail if registered memory was unmapped, or if any has outlived its owner.

    Nothing is done before the accelerator is loaded.
    """
    if _library is None:
        return
    assert not forget_unmapped(), "registered memory was unmapped"
    ends = time.monotonic() + 10
    while registered_bytes() and time.monotonic() < ends:
        gc.collect()  # it may be in a cycle, or dropped by a thread that is about to end
        time.sleep(0.02)
    left = registered_bytes()
    _library.pretend_unregister_all()
    assert not left, "memory is still registered"


def registrations() -> int:
    """Return the number of registrations, including failed ones, since the last reset."""
    return _loaded().pretend_registrations()


def registered_bytes() -> int:
    """Return the bytes that are registered now; queued copies keep theirs until they run."""
    return _loaded().pretend_registered_bytes()


def unregistered_in_use() -> int:
    """Return how often memory was unregistered while copies that use it were queued."""
    return _loaded().pretend_unregistered_in_use()


def set_registered_limit(nbytes: int | None) -> None:
    """Set a limit of registered bytes above which registering fails."""
    _loaded().pretend_set_registered_limit(-1 if nbytes is None else nbytes)


def fail_registrations(count: int) -> None:
    """Make the next registrations fail, as a driver that allows none does."""
    _loaded().pretend_fail_registrations(count)


def copied(kind: str) -> int:
    """Return the bytes of the copies requested so far; kind is 'h2d', 'd2h' or 'd2d'."""
    return _loaded().pretend_copied(KINDS.index(kind))


def stale_copies() -> int:
    """Return how many kernels and copies ran only after one of their device blocks was freed."""
    return _loaded().pretend_stale_tasks()


def queued_tasks(index: int = 0) -> int:
    """Return how many kernels, copies, marks and waits have not run."""
    return _loaded().pretend_queued_tasks(_index(index))


def reset_counters() -> None:
    """Reset the counters of bytes, of stale work and of registrations."""
    _loaded().pretend_reset_counters()


# --------------------------------------------- functions that torch requires


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Do nothing: no set-up is needed."""


def _lazy_init() -> None:
    """Do nothing: no set-up is needed."""


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: int | str | torch.device) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: int | str | torch.device) -> torch.accelerator.device_index:
    """Return a context in which this device is the current one."""
    return torch.accelerator.device_index(_index(device))


def synchronize(device: int | str | torch.device | None = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: int | str | torch.device | None = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """Stand in for torch.cuda.stream: a stream is its own context manager here."""
    return stream


def empty_cache() -> None:
    """Return cached memory to the devices. Waits for them."""
    torch.accelerator.empty_cache()


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
    seed,
    start_over,
    finish,
    set_slowness,
    set_link_speed,
    occupy,
    working,
    begin_capture,
    end_capture,
    is_current_stream_capturing,
    memory_allocated,
    max_memory_allocated,
    memory_active,
    max_memory_active,
    memory_reserved,
    max_memory_reserved,
    reset_peak_memory_stats,
    set_memory_limit,
    mem_get_info,
    set_memory_info,
    pinned_bytes,
    peak_pinned_bytes,
    reset_peak_pinned,
    set_pinned_limit,
    cudart,
    check_error,
    register_host,
    unregister_host,
    watches_maps,
    forget_unmapped,
    check_at_end,
    registrations,
    registered_bytes,
    unregistered_in_use,
    set_registered_limit,
    fail_registrations,
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
