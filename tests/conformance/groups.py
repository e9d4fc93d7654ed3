"""Groups of random bits for tests that hold and copy them, and the tiers of a store alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import torch

from tests.helpers.threads import PATIENCE
from tierstore.model.groups import GroupId
from tierstore.model.moves import Copy, Instruction
from tierstore.model.tiers import Tier
from tierstore.system.views import pack_tensors, packed_spec, view_all
from tierstore.tiers.assembly import ExtraTier, StoreTiers, TierSettings, build
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.mover import Mover, MoverCallbacks
from tierstore.tiers.pages import fresh_memory

PAGE = 4096
CAPACITY = 16 * PAGE
SIZES = (1, 2, 3, 5)
"""Pages that groups take: any three of them fit at once."""


def entry_of(number: int, *, mutable: bool = False, durable: bool = False) -> GroupEntry:
    """Return an entry for a group with two tensors, which takes one of `SIZES` in pages."""
    pages = SIZES[number % len(SIZES)]
    like = {"rows": torch.empty(pages * PAGE // 4 - 300), "odd": torch.empty(7, dtype=torch.uint8)}
    key = f"group {number}"
    packing, _ = pack_tensors(key, like)
    return GroupEntry(
        GroupId(key, 0), packed_spec(key, packing, like), None, packing, durable, mutable=mutable
    )


def bytes_of(entry: GroupEntry, seed: int = 0) -> torch.Tensor:
    """Return random packed bytes of the group (uint8, page-aligned)."""
    generator = torch.Generator().manual_seed(crc32(entry.group.key.encode()) + seed)
    memory = fresh_memory(entry.spec.nbytes)
    return memory.copy_(torch.randint(0, 256, memory.shape, generator=generator).to(torch.uint8))


def assert_shows(views: dict[str, torch.Tensor], entry: GroupEntry, data: torch.Tensor) -> None:
    """Check that the tensors are those of the group with these packed bytes, bit for bit."""
    offsets = {tensor.name: tensor.offset for tensor in entry.spec.tensors}
    expected = view_all(entry.spec, data, offsets)
    assert views.keys() == expected.keys()
    for name, tensor in views.items():
        raw, wanted = (t.contiguous().cpu().view(torch.uint8) for t in (tensor, expected[name]))
        assert torch.equal(raw, wanted), f"{name} differs from the stored bytes"


class Ends:
    """Waits for copies as a store does."""

    def __init__(self) -> None:
        self.errors: dict[Copy, BaseException | None] = {}
        self.timed: list[tuple[Copy, float, float]] = []
        self._changed = threading.Condition()

    def over(self, copy: Copy, error: BaseException | None) -> None:
        with self._changed:
            self.errors[copy] = error
            self._changed.notify_all()

    def callbacks(self) -> MoverCallbacks:
        return MoverCallbacks(self.over, lambda copy: None, lambda *times: self.timed.append(times))

    def run(self, mover: Mover, *instructions: Instruction) -> None:
        """Run instructions one after the other. Raises the error of a failed copy."""
        for one in instructions:
            for copy, error in mover.accept([one]):
                self.over(copy, error)
            if isinstance(one, Copy):
                with self._changed:
                    assert self._changed.wait_for(lambda one=one: one in self.errors, PATIENCE)
                error = self.errors.pop(one)
                mover.drain()
                if one in mover.moving():
                    mover.acknowledge(one)
                if error is not None:
                    raise error
        mover.drain()


@contextmanager
def tiers_in(
    place: Path, device: str = "cpu", extra: Sequence[ExtraTier] = ()
) -> Iterator[tuple[StoreTiers, Mover, Ends]]:
    """Yield the tiers of a store in `place`, with space for some of the groups, and their mover."""
    budgets: dict[Tier, int | None] = {Tier.HOST: CAPACITY, Tier.DISK: None}
    if device != "cpu":
        budgets[Tier.DEVICE] = CAPACITY
    ends, directory = Ends(), ObjectDirectory(place)
    at = torch.device("cpu") if device == "cpu" else torch.device(device, 0)
    settings = TierSettings(device=at, budgets=budgets, verify="always", extra_tiers=tuple(extra))
    tiers, mover = build(settings, directory, ends.callbacks())
    try:
        yield tiers, mover, ends
    finally:
        assert mover.stop()
        directory.close()
