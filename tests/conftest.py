"""What every test shares: an environment without network, few threads, and a few fixtures.

torch takes seconds to import, so nothing here imports it before a test needs it.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

THREADS = 2

# Set before any test imports the libraries that read these, and inherited by subprocesses.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # spinning threads starve each other on a busy machine
os.environ["OMP_NUM_THREADS"] = str(THREADS)
if "torch" in sys.modules:  # too late for the variable above
    sys.modules["torch"].set_num_threads(THREADS)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked cuda where there is no CUDA GPU."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked or importlib.import_module("torch").cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what is there before the first test, for good.

    That is half a million objects of torch, diffusers and transformers. Tests that look at what is
    left let garbage go first, often many times, and each time took 0.2 seconds for those alone.
    """
    gc.collect()
    gc.freeze()


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


@pytest.fixture
def pretend() -> Any:
    """The pretend accelerator, loaded; the test is skipped where it cannot be built."""
    accelerator = importlib.import_module("tests.device.pretend")
    why_not = accelerator.available()
    if why_not is not None:
        pytest.skip(why_not)
    return accelerator.load()
