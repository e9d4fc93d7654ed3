"""Conformance tests for a `ForwardContext`: subclass `ForwardContextConformance`, and make one.

class TestMyContext(ForwardContextConformance):
    @contextmanager
    def subject(self, disk_dir):
        with a_model_on_a_store(disk_dir) as model:
            yield Subject(make=lambda: MyContext(model), seen=lambda: visible_state(model))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierstore.adapters.forward import ForwardContext


@dataclass
class Subject:
    """A way to `make` a context, and to read the state that users see (`seen`).

    The state must differ inside a context, and be restored after it.
    """

    make: Callable[[], ForwardContext]
    seen: Callable[[], Any]


class ForwardContextConformance(ABC):
    """Tests for a context around a model that nothing else runs."""

    @abstractmethod
    def subject(self, disk_dir: Path) -> AbstractContextManager[Subject]:
        """Yield a model and the functions to use it."""

    def test_begin_then_finish_restores_the_model(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            before = subject.seen()
            for _ in range(2):
                use, result = subject.make(), torch.ones(2)
                assert use.begin()
                assert subject.seen() != before
                assert use.finish(result, ((), {})) is result
                assert subject.seen() == before

    def test_end_after_an_error_restores_the_model(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            before = subject.seen()
            use = subject.make()
            use.begin()
            use.end()
            assert subject.seen() == before

    def test_end_repeated_or_without_begin_changes_nothing(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            before = subject.seen()
            subject.make().end()
            assert subject.seen() == before
            use = subject.make()
            use.begin()
            use.finish(None, ((), {}))
            use.end()
            use.end()
            assert subject.seen() == before

    def test_nested_contexts_restore_in_order(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            before = subject.seen()
            outer, inner = subject.make(), subject.make()
            outer.begin()
            during = subject.seen()
            inner.begin()
            inner.finish(None, ((), {}))
            assert subject.seen() == during
            outer.finish(None, ((), {}))
            assert subject.seen() == before

    def test_end_clears_the_autocast_cache(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            for end in (lambda use: use.end(), lambda use: use.finish(None, ((), {}))):
                use = subject.make()
                use.begin()
                end(use)
                assert torch.is_autocast_cache_enabled()
