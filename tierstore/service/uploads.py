"""What a worker hands over, to be kept for all as an object file."""

from __future__ import annotations

import torch

from tierstore.engine.adoption import WEIGHTS, content_hash
from tierstore.engine.core import refuse_beyond_the_disk
from tierstore.engine.engine import Engine
from tierstore.errors import CorruptDataError
from tierstore.model.groups import DTYPE_SIZES, TensorSpec
from tierstore.system.maps import nameless_file_memory
from tierstore.system.views import DTYPES, view_one
from tierstore.wire import messages


class Upload:
    """An object that comes in parts, by way of a file without a name: it takes no memory.

    `begin` and `take` may wait for the disk; they are called on any thread, one after the other.
    """

    def __init__(self, engine: Engine, message: messages.Upload) -> None:
        self.request = message.request
        self.complete = False
        self._engine = engine
        self._message = message
        self._memory: memoryview | None = None
        self._there = 0

    def begin(self) -> bool:
        """Make room. Raises BudgetError, DiskFullError, or ValueError for what can be no tensor."""
        message = self._message
        for row in message.tensors:
            _check(row, message.nbytes)
        refuse_beyond_the_disk(self._engine.core, message.key, message.nbytes)
        self._memory = nameless_file_memory(self._engine.core.directory.path, message.nbytes)
        return True

    def take(self, data: bytes) -> bool:
        """The next bytes. True once all are there, and on disk. Raises what a put raises."""
        memory = self._memory
        assert memory is not None, "room comes first"
        ends = self._there + len(data)
        if ends > len(memory):
            raise ValueError("more bytes came than the object has")
        memory[self._there : ends] = data
        self._there = ends
        if ends < len(memory):
            return False
        whole = torch.frombuffer(memory, dtype=torch.uint8)  # tied tensors stay tied in it
        tensors = {
            row.name: view_one(_spec(row), whole, row.offset) for row in self._message.tensors
        }
        self._keep(tensors)
        self.complete = True
        return True

    def _keep(self, tensors: dict[str, torch.Tensor]) -> None:
        key, objects = self._message.key, self._engine.objects
        if key.startswith(WEIGHTS) and key != WEIGHTS + content_hash(tensors):
            raise CorruptDataError(f"object {key!r} has other bytes than its name says", key=key)
        if not objects.has(key):  # another worker may have been faster
            objects.write(key, tensors)


def _spec(row: messages.TensorRow) -> TensorSpec:
    return TensorSpec(row.name, row.dtype, tuple(row.shape), tuple(row.stride), row.offset)


def _check(row: messages.TensorRow, nbytes: int) -> None:
    """Raise ValueError unless the tensor lies within so many bytes."""
    size = DTYPE_SIZES.get(row.dtype)
    if size is None or row.dtype not in DTYPES or len(row.shape) != len(row.stride):
        raise ValueError(f"{row.name!r:.60} can be no tensor")
    if row.offset % size or row.offset + _spec(row).nbytes > nbytes:
        raise ValueError(f"{row.name!r:.60} lies beyond the bytes that come")
