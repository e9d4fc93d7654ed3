"""Verification of the data of groups against their checksums.

Each file is read once through a buffer of a few mebibytes, bypassing the page cache if the file
system allows it. So the check covers the disk itself, and evicts nothing from the page cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace

import xxhash

from tierstore.errors import TruncatedFileError
from tierstore.inspection.survey import Contents, Group, Problem, find_group, is_transient
from tierstore.model.objects import StoredObject
from tierstore.model.sizes import round_up
from tierstore.system.files import CHUNK, DataFile

_ATTEMPTS = 5
"""Attempts to check a group that a live store replaces meanwhile."""

Advance = Callable[[int], None]
"""Callback with the number of bytes of each read."""


def check_data(contents: Contents, advance: Advance) -> tuple[list[Group], int]:
    """Read all groups. Returns a group for each problem, and the number of bytes read."""
    checker = Checker(contents.directory, advance)
    return [found for group in contents.groups for found in checker.check(group)], checker.read


class Checker:
    """Checks groups one by one, with one buffer."""

    def __init__(self, directory: str, advance: Advance) -> None:
        self._directory = directory
        self._advance = advance
        self._buffer = memoryview(mmap.mmap(-1, CHUNK))  # page-aligned for direct reads
        self.read = 0

    def check(self, group: Group) -> list[Group]:
        """Return the group once for each problem.

        Returns an empty list if it is intact, was removed, or is replaced faster than it is read.
        """
        for _ in range(_ATTEMPTS):
            if group.stored is None or group.key is None:
                return [group]
            problems = self._problems(group, group.stored)
            if not problems:
                return []
            # The file may have been replaced by a newer version, which has other checksums.
            latest = find_group(self._directory, group.key)
            if latest is None:
                return []
            if latest.item == group.item:
                return [replace(group, stored=None, problem=problem) for problem in problems]
            group = latest
        return []

    def _problems(self, group: Group, stored: StoredObject) -> list[Problem]:
        path = f"{self._directory}/{group.item.name}"
        try:
            found = list(self._digests(DataFile(path, follow_links=False), stored))
        except TruncatedFileError as error:
            return [Problem(str(error), damaged=True)]
        except OSError as error:
            reason = f"{path} cannot be read: {error.strerror or error}"
            return [Problem(reason, damaged=False, transient=is_transient(error))]
        blocks = zip(stored.packing.blocks, stored.digests, found, strict=True)
        return [
            Problem(
                "its checksum does not match: put the group again",
                damaged=True,
                expected=expected,
                found=digest,
                tensor=block.name,
            )
            for block, expected, digest in blocks
            if digest != expected
        ]

    def _digests(self, file: DataFile, stored: StoredObject) -> Iterator[str]:
        """Yield the checksum of each block, in order. The blocks are contiguous in the file."""
        data = self._chunks(file, stored.data_start, stored.packing.dense_nbytes)
        chunk = memoryview(b"")
        for block in stored.packing.blocks:
            digest = xxhash.xxh3_64()
            missing = block.nbytes
            while missing:
                chunk = chunk or next(data)
                part = chunk[:missing]
                digest.update(part)
                missing -= len(part)
                chunk = chunk[len(part) :]
            yield digest.hexdigest()

    def _chunks(self, file: DataFile, start: int, nbytes: int) -> Iterator[memoryview]:
        for done in range(0, nbytes, len(self._buffer)):
            needed = min(len(self._buffer), nbytes - done)
            file.read_at_least(
                self._buffer[: round_up(needed, mmap.PAGESIZE)], start + done, needed
            )
            self.read += needed
            self._advance(needed)
            yield self._buffer[:needed]
