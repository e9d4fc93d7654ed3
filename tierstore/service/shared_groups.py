"""The groups that a service serves, identified by content.

Two workers that register the same bytes of the same files in the same layout share a group. A group
without workers is kept for later ones, up to a limit (its memory is evicted first).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierstore.engine.engine import Engine
from tierstore.engine.groups import FileGroup
from tierstore.model.groups import (
    Check,
    Extent,
    GroupSpec,
    Move,
    Segment,
    Source,
    TensorSpec,
)
from tierstore.model.sizes import PAGE, round_up
from tierstore.system.file_table import HeldFile
from tierstore.wire import messages
from tierstore.wire.framing import ProtocolError

PREFIX = "shared/"
MAX_UNUSED = 4096
"""Maximum number of groups that are kept without a worker."""


@dataclass(eq=False)
class ServedGroup:
    """A group, its bytes, and the number of workers that have registered it."""

    key: str
    number: int
    nbytes: int
    workers: int = 0


class SharedGroups:
    """Groups by number and by content. `bytes_registered` counts those with workers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._by_key: dict[str, ServedGroup] = {}
        self._unused: dict[ServedGroup, None] = {}  # without workers, the oldest first
        self._numbers = 0
        self.bytes_registered = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def register(self, row: messages.Group, files: Sequence[HeldFile | None]) -> ServedGroup:
        """Return the group that a worker describes, creating it if necessary.

        Raises ProtocolError if the description is invalid, and the errors of its files.
        """
        spec, source, held = parse_group(row, files)
        group = self._by_key.get(spec.key)
        if group is None:
            self._engine.groups.add(spec.key, FileGroup(spec, source, held))
            group = ServedGroup(spec.key, self._numbers, row.nbytes)
            self._numbers += 1
            self._by_key[spec.key] = group
        if not group.workers:
            self._unused.pop(group, None)
            self.bytes_registered += group.nbytes
        group.workers += 1
        return group

    def unregister(self, group: ServedGroup) -> None:
        """Remove one worker's registration."""
        group.workers -= 1
        if group.workers:
            return
        self.bytes_registered -= group.nbytes
        self._unused[group] = None
        while len(self._unused) > MAX_UNUSED:
            oldest = next(iter(self._unused))
            del self._unused[oldest], self._by_key[oldest.key]
            self._engine.groups.discard(oldest.key)


def parse_group(
    row: messages.Group, files: Sequence[HeldFile | None]
) -> tuple[GroupSpec, Source, Mapping[str, HeldFile]]:
    """Validate a worker's description of a group. Raises ProtocolError."""
    used: dict[int, HeldFile] = {}
    segments = []
    for piece in row.pieces:
        held = files[piece.file] if piece.file < len(files) else None
        if held is None:
            raise ProtocolError(f"a group is in file {piece.file}, which was not sent")
        used[piece.file] = held
        # Reads cover whole pages of the file and of the memory.
        fits = piece.at % PAGE == piece.offset % PAGE
        fits = fits and round_up(piece.at + piece.nbytes, PAGE) <= row.nbytes
        fits = fits and piece.offset + piece.nbytes <= held.stamp.size
        if not fits or row.nbytes % PAGE:
            raise ProtocolError("a piece of a group exceeds the group, its file or its pages")
        segments.append(Segment(Extent(held.path, piece.offset, piece.nbytes), piece.at))
    ranges = [(s.src, s.nbytes) for s in row.shifts] + [(s.dst, s.nbytes) for s in row.shifts]
    ranges += [(check.offset, check.nbytes) for check in row.checksums]
    if len({held.path for held in used.values()}) < len(used):
        raise ProtocolError("a group is in two files of the same name")
    if any(at + nbytes > row.nbytes for at, nbytes in ranges):
        raise ProtocolError("a range of a group exceeds its end")
    key = PREFIX + _identity(row, used)
    moves = tuple(Move(s.src, s.dst, s.nbytes) for s in row.shifts)
    checks = tuple(Check(c.name, c.offset, c.nbytes, c.digest) for c in row.checksums)
    whole = TensorSpec("bytes", "U8", (row.nbytes,), (1,), 0)
    spec = GroupSpec(key, (whole,), row.nbytes)
    return spec, Source(tuple(segments), moves, checks), {h.path: h for h in used.values()}


def _identity(row: messages.Group, used: Mapping[int, HeldFile]) -> str:
    """Return a name for these bytes in this layout.

    It depends on the current state of the files, not on their paths.
    """
    names = {number: repr((held.stamp, held.header_digest)) for number, held in used.items()}
    pieces = [(names[p.file], p.offset, p.nbytes, p.at) for p in row.pieces]
    shifts = [(s.src, s.dst, s.nbytes) for s in row.shifts]
    checks = [(c.offset, c.nbytes, c.digest) for c in row.checksums]
    description = repr((row.nbytes, pieces, shifts, checks))
    return hashlib.sha256(description.encode()).hexdigest()[:32]
