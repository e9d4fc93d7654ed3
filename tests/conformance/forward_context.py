"""Conformance of a `ForwardContext`: subclass `ForwardContextConformance`, say how to make one.

class TestMyContext(ForwardContextConformance):
    @contextmanager
    def subject(self, disk_dir):
        with a_model_on_a_store(disk_dir) as model:
            yield Subject(make=lambda: MyContext(model), seen=lambda: what_a_user_sees(model))
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
    """How to `make` a use, and what can be `seen` of the model at a moment: another thing during a
    use than before, and the same again after it."""

    make: Callable[[], ForwardContext]
    seen: Callable[[], Any]


class ForwardContextConformance(ABC):
    """The use of a model that nothing runs at this moment."""

    @abstractmethod
    def subject(self, disk_dir: Path) -> AbstractContextManager[Subject]:
        """A model, and what to do with it."""

    def test_what_begins_is_finished(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            before = subject.seen()
            for _ in range(2):
                use, result = subject.make(), torch.ones(2)
                assert use.begin()
                assert subject.seen() != before
                assert use.finish(result, ((), {})) is result
                assert subject.seen() == before

    def test_what_raised_is_ended(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            before = subject.seen()
            use = subject.make()
            use.begin()
            use.end()
            assert subject.seen() == before

    def test_it_may_be_ended_again_and_without_a_beginning(self, disk_dir: Path) -> None:
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

    def test_one_inside_another(self, disk_dir: Path) -> None:
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

    def test_nothing_is_left_of_autocast(self, disk_dir: Path) -> None:
        with self.subject(disk_dir) as subject:
            for end in (lambda use: use.end(), lambda use: use.finish(None, ((), {}))):
                use = subject.make()
                use.begin()
                end(use)
                assert torch.is_autocast_cache_enabled()
