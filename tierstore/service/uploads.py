"""Uploads of workers, which the service stores as object files for all workers."""

from __future__ import annotations

import torch

from tierstore.engine.core import check_disk_budget
from tierstore.engine.engine import Engine
from tierstore.engine.in_place_groups import WEIGHTS, content_hash
from tierstore.errors import CorruptDataError
from tierstore.model.groups import DTYPE_SIZES, TensorSpec
from tierstore.system.maps import unnamed_file_memory
from tierstore.system.views import DTYPES, view_one
from tierstore.wire import messages


class Upload:
    """An object that arrives in parts. It is collected in an unnamed file, not in memory.

    `begin` and `take` may wait for the disk; call them from any thread, one at a time.
    """

    def __init__(self, engine: Engine, message: messages.Upload) -> None:
        self.request = message.request
        self.complete = False
        self._engine = engine
        self._message = message
        self._memory: memoryview | None = None
        self._received = 0

    def begin(self) -> bool:
        """Reserve space. Raises BudgetError, DiskFullError, or ValueError for an invalid tensor."""
        message = self._message
        for row in message.tensors:
            _check(row, message.nbytes)
        check_disk_budget(self._engine.core, message.key, message.nbytes)
        self._memory = unnamed_file_memory(self._engine.core.directory.path, message.nbytes)
        return True

    def take(self, data: bytes) -> bool:
        """Store the next bytes. Returns True once all are on disk. Raises the errors of a put."""
        memory = self._memory
        assert memory is not None, "call begin first"
        ends = self._received + len(data)
        if ends > len(memory):
            raise ValueError("more bytes arrived than the object has")
        memory[self._received : ends] = data
        self._received = ends
        if ends < len(memory):
            return False
        whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps tied tensors tied
        tensors = {
            row.name: view_one(_spec(row), whole, row.offset) for row in self._message.tensors
        }
        self._store(tensors)
        self.complete = True
        return True

    def _store(self, tensors: dict[str, torch.Tensor]) -> None:
        key, objects = self._message.key, self._engine.objects
        if key.startswith(WEIGHTS) and key != WEIGHTS + content_hash(tensors):
            raise CorruptDataError(f"object {key!r} does not match the hash in its name", key=key)
        if not objects.has(key):  # another worker may have uploaded it first
            objects.write(key, tensors)


def _spec(row: messages.TensorRow) -> TensorSpec:
    return TensorSpec(row.name, row.dtype, tuple(row.shape), tuple(row.stride), row.offset)


def _check(row: messages.TensorRow, nbytes: int) -> None:
    """Raise ValueError unless the tensor is valid and lies within `nbytes` bytes."""
    size = DTYPE_SIZES.get(row.dtype)
    if size is None or row.dtype not in DTYPES or len(row.shape) != len(row.stride):
        raise ValueError(f"{row.name!r:.60} is not a valid tensor")
    if row.offset % size or row.offset + _spec(row).nbytes > nbytes:
        raise ValueError(f"{row.name!r:.60} exceeds the bytes of the upload")
