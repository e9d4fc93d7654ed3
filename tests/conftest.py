"""Common to all tests: an environment without network, few threads, and a few fixtures.

Importing torch takes seconds, so nothing here imports it before a test needs it.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import devices, lanes

# Each parallel test process has one core: with more threads they would compete for it.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2

# Set before any test imports the libraries that read these, and inherited by subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads starve each other on a busy machine
os.environ["OMP_NUM_THREADS"] = str(THREADS)
if "torch" in sys.modules:  # too late for the variable above
    sys.modules["torch"].set_num_threads(THREADS)

# Compiled files are always kept: hundreds of processes that tests start import the same ones.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell script's background jobs ignore Ctrl-C, as do their children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


pytest_configure = lanes.pytest_configure
pytest_collection_modifyitems = lanes.pytest_collection_modifyitems


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of the lanes, and tests/devices.py as a plugin."""
    lanes.pytest_addoption(parser)
    pluginmanager.register(devices, "devices")


def pytest_collection_finish() -> None:
    """Permanently exclude all objects that exist before the first test from garbage collection.

    They are half a million objects of torch, diffusers and transformers. Leak tests collect
    garbage first, often many times, and each pass took 0.2 seconds for those alone.
    """
    gc.collect()
    gc.freeze()


# The locked files always exist, so none is left behind.
QUEUE = Path(__file__)
MACHINE = Path(__file__).with_name("__init__.py")


@contextmanager
def hold_the_machine(alone: bool) -> Iterator[None]:
    """Hold a place on the machine; other test processes may hold one, too, unless `alone`.

    Each process queues first: otherwise others could continue while one waits for all to finish.
    """
    with QUEUE.open() as queue, MACHINE.open() as machine:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:  # closing is not enough where a test has left a fork of this process
            fcntl.flock(machine, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's timer starts
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give tests marked `alone` the whole machine where several processes run tests at once."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with hold_the_machine(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def separate_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements of the user's disks away from tests, and tests away from them.

    Parallel test processes do not share it either: each makes one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """Return a directory for a store's files; it does not exist yet."""
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def same_moments() -> Iterator[None]:
    """Run the pretend accelerator's work, where loaded, at the same moments in each test.

    State such as registered memory is cleared for the next test. The error of a kernel that no call
    has raised is raised here.
    """
    accelerator = sys.modules.get("tests.device.pretend")
    if accelerator is not None:
        accelerator.start_over()
    yield
    if (chosen := sys.modules.get("tests.accelerator")) is not None:
        chosen.finish()
    elif accelerator is not None:
        accelerator.finish()
    if accelerator is not None:
        accelerator.check_at_end()


@pytest.fixture
def accelerator() -> Any:
    """Return the accelerator's module of torch, such as torch.cuda, common to all accelerators."""
    return importlib.import_module("tests.accelerator").module()


@pytest.fixture
def pretend() -> Any:
    """Return the pretend accelerator, loaded, for tests that are marked `pretend_only`.

    These are skipped where it cannot be built.
    """
    return importlib.import_module("tests.device.pretend").load()


@pytest.fixture
def late_pretend(pretend: Any) -> Any:
    """Return the pretend accelerator in late mode.

    It does nothing before something waits for it, so that a missing wait shows every time.
    """
    pretend.set_slowness(None)
    return pretend
