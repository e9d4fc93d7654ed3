"""What every test shares: an environment without network, few threads, and a few fixtures.

torch takes seconds to import, so nothing here imports it before a test needs it.
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

# Processes that run tests at once have a core each: with more threads, they would wait for it.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2

# Set before any test imports the libraries that read these, and inherited by subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads starve each other on a busy machine
os.environ["OMP_NUM_THREADS"] = str(THREADS)
if "torch" in sys.modules:  # too late for the variable above
    sys.modules["torch"].set_num_threads(THREADS)

# Compiled files are kept, whatever was set: hundreds of processes that tests start import the same.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Whoever runs the tests in the background of a script has Ctrl-C ignored, by all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


pytest_configure = lanes.pytest_configure
pytest_collection_modifyitems = lanes.pytest_collection_modifyitems


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of the lanes, and what tests/devices.py is: a plugin of its own."""
    lanes.pytest_addoption(parser)
    pluginmanager.register(devices, "devices")


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what is there before the first test, for good.

    That is half a million objects of torch, diffusers and transformers. Tests that look at what is
    left let garbage go first, often many times, and each time took 0.2 seconds for those alone.
    """
    gc.collect()
    gc.freeze()


# Locks are taken on files that are always here, so that none is left behind.
QUEUE = Path(__file__)
MACHINE = Path(__file__).with_name("__init__.py")


@contextmanager
def place_on_the_machine(alone: bool) -> Iterator[None]:
    """Inside, tests of other processes may run too, unless this one must be alone.

    Who wants to go on queues first: otherwise the others could go on and on while one waits until
    none of them is left.
    """
    with QUEUE.open() as queue, MACHINE.open() as machine:
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        try:
            yield
        finally:  # closing is not enough where a test has left a fork of this process
            fcntl.flock(machine, fcntl.LOCK_UN)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the time of the test counts
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where several processes run tests at once, those marked `alone` have the machine."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    with place_on_the_machine(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured of the user's disks changes no test, and no test changes it.

    Nor do processes that run tests at once share it: each makes one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def disk_dir(tmp_path: Path) -> Path:
    """A directory for a store's files; it does not exist yet."""
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def same_moments() -> Iterator[None]:
    """The pretend accelerator, where it is loaded, runs work at the same moments in each test.

    Nothing is left for the next test, such as registered memory. What a kernel raised that nobody
    asked about is raised here.
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
    """The accelerator's module of torch, such as torch.cuda: what each of them can do."""
    return importlib.import_module("tests.accelerator").module()


@pytest.fixture
def pretend() -> Any:
    """The pretend accelerator, loaded, for tests that are marked `pretend_only`: these are skipped
    where it cannot be built."""
    return importlib.import_module("tests.device.pretend").load()


@pytest.fixture
def late_pretend(pretend: Any) -> Any:
    """The pretend accelerator, doing nothing before somebody waits for it: whoever does not wait
    finds that out each time."""
    pretend.set_slowness(None)
    return pretend
