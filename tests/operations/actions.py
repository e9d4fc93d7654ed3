"""Building blocks of operations: load a model, offload it, and compute with it.

The same calls are made twice: without a `share` on an ordinary model on the device, and with one on
a store whose budgets are that share of the model's weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests import accelerator, pipelines
from tests.store.helpers import open_store
from tierstore import TierStore, disable_offload, dispatch_model, enable_group_offload


class Actions:
    """A run of an operation. `outputs` has the tensors that it computes."""

    def __init__(
        self,
        device: str,
        share: float | None,
        checkpoint: Callable[..., Path],
        folder: Path,
    ) -> None:
        self.device = device
        self.folder = folder
        """Directory for files of the operation itself."""
        self.outputs: list[torch.Tensor] = []
        self.read: list[int] = []
        """Bytes read for each output."""
        self._share = share
        self.checkpoint = checkpoint
        """`checkpoint(kind)` is a read-only directory of `tests.pipelines` or `parts`."""
        self._latest: Callable[[], torch.Tensor] | None = None
        self._store: TierStore | None = None
        self._handle: Any = None
        self._budget = 0
        self._pinned_before = 0

    def load(self, kind: str) -> Any:
        """Load a pipeline or model of `tests.pipelines`, on the CPU."""
        return pipelines.load(kind, self.checkpoint(kind))

    def offload(self, target: Any, **arguments: Any) -> None:
        """Put a pipeline or model on the store. The first one determines the budgets."""
        self._offload(enable_group_offload, target, arguments)

    def dispatch(self, model: nn.Module, **arguments: Any) -> None:
        """Do the same with `dispatch_model`."""
        self._offload(dispatch_model, model, arguments)

    def _offload(self, way: Callable[..., Any], target: Any, arguments: dict[str, Any]) -> None:
        if self._share is None:
            target.to(self.device)
            return
        if self._store is None:
            self._budget = int(self._share * pipelines.weight_bytes(target))
            self._store = open_store(self.folder / "store", self._budget, self.device)
            if self.device != "cpu":
                accelerator.start_counting()
                self._pinned_before = accelerator.counted("pinned_bytes")
        self._handle = way(target, self._store, **arguments)

    def end(self, target: Any) -> None:
        """Make the latest offloaded pipeline or model an ordinary one on the CPU."""
        if self._handle is not None:
            for handle in getattr(self._handle, "all", [self._handle]):
                disable_offload(handle)
        target.to("cpu")

    def suspended(self) -> AbstractContextManager[None]:
        """Make the latest offloaded pipeline or model ordinary inside the block, on the CPU."""
        suspended: AbstractContextManager[None] | None
        suspended = None if self._handle is None else self._handle.suspended()
        return suspended or nullcontext()

    @contextmanager
    def on_the_cpu(self, target: Any) -> Iterator[None]:
        """Keep weights on the CPU inside the block, where idle offloaded ones are anyway.

        Edits that compute (fusing, for instance) give other bits on an accelerator.
        """
        if self._share is None:
            target.to("cpu")
        yield
        if self._share is None:
            target.to(self.device)

    @property
    def device_of_an_ordinary_model(self) -> str:
        """Device of an ordinary model's inputs. An offloaded model accepts the CPU as well."""
        return self.device if self._share is None else "cpu"

    def run(self, kind: str, pipe: Any, **arguments: Any) -> None:
        """Compute a pipeline's output, for comparison (see `tests.pipelines.run`)."""
        settings = {"steps": 2, "device": self.device, **arguments}
        self.compute(functools.partial(pipelines.run, kind, pipe, **settings))

    def compute(self, work: Callable[[], torch.Tensor]) -> None:
        """Compute a value for comparison that uses weights of the model."""
        before = self._bytes_read()
        self.outputs.append(work().detach().cpu().clone())
        self.read.append(self._bytes_read() - before)
        self._latest = work

    def compare(self, value: torch.Tensor) -> None:
        """Compare a value that needed no run of the model."""
        self.outputs.append(value.detach().cpu().clone())

    def check_that_it_is_as_it_was(self) -> None:
        """Assert that repeating the latest computation reads weights and gives the same result."""
        assert self._latest is not None, "no earlier computation"
        self.compute(self._latest)
        assert torch.equal(*self.outputs[-2:]), "the model has changed"

    def check_that_it_changed(self) -> None:
        """Assert that the operation had an effect: the latest output differs from the previous."""
        assert not torch.equal(*self.outputs[-2:]), "the operation had no effect"

    def _bytes_read(self) -> int:
        return 0 if self._store is None else self._store.stats().bytes_read

    def check_budgets(self) -> None:
        """Assert that no tier held more than its budget at any time."""
        assert self._store is not None, "the operation offloads nothing"
        peaks = self._store.stats().peak_bytes
        assert 0 < peaks["HOST"] <= self._budget
        if self.device != "cpu":
            assert 0 < peaks["DEVICE"] <= self._budget
            assert accelerator.counted("peak_pinned_bytes") - self._pinned_before <= self._budget

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
