"""Memory saved by autograd: pieces of storages, each at one version, in memory or in the store.

The graph holds a piece through the `Unpack` handles of its saved tensors, and frees it with them. A
piece starts as a reference to the storage. If it is worth offloading, its bytes are copied to the
store and the reference is dropped; on an accelerator, this happens once the copy has completed. As
long as anything else holds the storage, unpacking needs no copy.

Finalizers can run at any point, even inside another step, so they take no lock and only append to a
queue.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tierstore.adapters.activations.in_place import VersionWatch
from tierstore.adapters.codecs.memory import Geometry, over
from tierstore.adapters.view_lifetime import Allowance, Holder
from tierstore.engine.keys import saved_key
from tierstore.errors import BudgetError
from tierstore.lease import Lease
from tierstore.model import shares
from tierstore.model.locks import RLock, guarded, under
from tierstore.model.sizes import PAGE, round_up
from tierstore.model.tiers import Tier
from tierstore.store import TierStore, engine_of
from tierstore.system.views import byte_view
from tierstore.torch_private import storage_id, storage_of, version_of

PREFETCHED_PIECES = 8
"""Number of pieces to prefetch ahead of each read in a backward pass."""

ORDER_LENGTH = 256
"""Length at which a thread's order is first compacted, counting freed pieces."""

PENDING = 64 << 20
"""Maximum bytes of copied pieces that stay on the device while their copies run."""

PieceKey = tuple[int, int, int, int, int]
"""Storage id, version, start and end byte, and an index among equal-valued version counters."""


class SavedPiece:
    """Bytes from `start` to `stop` of a tensor's storage, at the tensor's version."""

    _stored: tuple[SavedTensorCache, int] | None = None  # a class default, as `__init__` may raise

    def __init__(self, tensor: torch.Tensor, start: int, stop: int) -> None:
        storage = tensor.untyped_storage()
        self.start = start
        self.nbytes = stop - start
        self.watch = VersionWatch(tensor)
        self.original: torch.UntypedStorage | None = storage
        self.reason = ""  # why it stays in memory; "" if it does not, or if undecided
        self.viewed_bytes = 0
        self.shipped = False  # its copy to the store has begun
        self.hinted = False
        self.order: PackOrder | None = None
        self.index = 0
        self._weak = StorageWeakRef(storage)
        self._copy: torch.UntypedStorage | None = None
        self._geometries: set[Geometry] = set()
        # Held until another piece is read: if two saved tensors share a piece, their nodes are
        # often adjacent.
        self.held: torch.UntypedStorage | None = None
        # The memory fetched last, and the stream that waits for it.
        self._last_read: tuple[StorageWeakRef, Any] | None = None

    def __del__(self) -> None:
        if self._stored is not None:
            cache, number = self._stored
            cache.on_unreferenced(number, self.nbytes)

    @property
    def number(self) -> int | None:
        """The piece's number in the store; None if it is not there."""
        return None if self._stored is None else self._stored[1]

    def part_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the piece's bytes in the storage, as a uint8 tensor."""
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return byte_view(empty.set_(storage), self.start, self.nbytes)

    def mark_stored(self, cache: SavedTensorCache, number: int) -> None:
        """Record that the store holds the piece under `number`."""
        self._stored = cache, number
        self._geometries.clear()

    def add_view(self, geometry: Geometry) -> None:
        """Record the geometry of a saved tensor, and add its distinct bytes to `viewed_bytes`."""
        if geometry not in self._geometries:
            self._geometries.add(geometry)
            self.viewed_bytes += geometry.distinct_bytes

    def copy_out(self) -> None:
        """Copy this small piece, to release the rest of its storage."""
        storage = self.original
        assert storage is not None
        self._copy = self.part_of(storage).clone().untyped_storage()
        self.original = None

    def build(self, geometry: Geometry) -> torch.Tensor:
        """Rebuild a saved tensor, fetching the bytes from the store if they are not in memory."""
        storage = self.original
        if storage is None:
            storage = storage_of(self._weak)
        if storage is not None and storage.nbytes() >= self.start + self.nbytes:
            return geometry.over(storage, counted=self.watch.counted)
        if self._copy is not None:
            return geometry.over(self._copy, self.start, self.watch.counted)
        return geometry.over(self._fetched(), self.start, self.watch.counted)

    def _fetched(self) -> torch.UntypedStorage:
        assert self._stored is not None
        cache, number = self._stored
        stream = engine_of(cache.store).core.current_stream()
        if self._last_read is not None and self._last_read[1] == stream:
            storage = storage_of(self._last_read[0])
            if storage is not None:
                return storage
        self._hint(cache)
        storage = cache.fetch(number)
        self._last_read = StorageWeakRef(storage), stream
        self.held = storage
        cache.was_read(self)
        return storage

    def _hint(self, cache: SavedTensorCache) -> None:
        """Prefetch the pieces packed just before this one: a backward pass reads them next."""
        self.hinted = False
        assert self.order is not None
        before = [piece for piece in self.order.before(self.index) if not piece.hinted]
        numbers = [piece.number for piece in before if piece.number is not None]
        for piece in before:
            piece.hinted = True
        if numbers:
            engine_of(cache.store).saved_tensors.prefetch(numbers)


class PackOrder:
    """The order in which one thread offloaded pieces."""

    def __init__(self) -> None:
        self._pieces: list[weakref.ref[SavedPiece]] = []
        self._limit = ORDER_LENGTH

    def add(self, piece: SavedPiece) -> None:
        """Append the newest piece."""
        while self._pieces and self._pieces[-1]() is None:
            self._pieces.pop()
        if len(self._pieces) >= self._limit:
            self._compact()
        piece.order, piece.index = self, len(self._pieces)
        self._pieces.append(weakref.ref(piece))

    def _compact(self) -> None:
        """Remove freed pieces. If forward passes overlap, these are not only at the end."""
        found = [piece for ref in self._pieces if (piece := ref()) is not None]
        for i, piece in enumerate(found):
            piece.index = i
        self._pieces = [weakref.ref(piece) for piece in found]
        self._limit = max(2 * len(found), ORDER_LENGTH)  # amortises the cost

    def before(self, index: int) -> list[SavedPiece]:
        """Return the pieces just before an index, the newest first."""
        found = [piece() for piece in self._pieces[max(index - PREFETCHED_PIECES, 0) : index]]
        return [piece for piece in reversed(found) if piece is not None]


class _Local(threading.local):
    """Thread-local state."""

    def __init__(self) -> None:
        self.order = PackOrder()


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A piece being copied from the device, with its memory, which may still be viewed.

    The memory can be freed once `stream`, on which it was saved, has waited for the event `copied`.
    """

    copied: torch.Event
    stream: torch.Stream
    memory: torch.UntypedStorage
    piece: weakref.ref[SavedPiece]
    nbytes: int


class SavedTensorCache:
    """The saved pieces of one store, shared by all its `ActivationOffload` contexts."""

    def __init__(self, store: TierStore) -> None:
        self.store = store
        self.counts = engine_of(store).saved_tensors.counts
        self._lock = RLock()  # never held during a call of the store
        self._pieces: weakref.WeakValueDictionary[PieceKey, SavedPiece] = (
            weakref.WeakValueDictionary()
        )
        self._local = _Local()
        self.reads = ReadLeases(store)
        self._pending: deque[PendingCopy] = deque()
        self._pending_bytes = 0
        self._stored_bytes = 0
        self._unreferenced: deque[int] = deque()
        self._latest: weakref.ref[SavedPiece] | None = None  # the piece that was read last

    # Packing -----------------------------------------------------------------------------------

    def piece(self, tensor: torch.Tensor, span: tuple[int, int]) -> SavedPiece:
        """Return the piece with a byte span of a tensor's storage; it is shared by all callers."""
        storage = tensor.untyped_storage()
        # A storage's address is not reused while there is a weak reference to it.
        version = storage_id(storage), version_of(tensor)
        whole = (0, storage.nbytes())
        return under(self._lock, lambda: self._piece(tensor, version, whole, span))

    def _piece(
        self,
        tensor: torch.Tensor,
        version: tuple[int, int],
        whole: tuple[int, int],
        span: tuple[int, int],
    ) -> SavedPiece:
        piece = self._find(tensor, (*version, *whole))[0]
        if piece is None:
            piece, key = self._find(tensor, (*version, *span))
        if piece is None:
            piece = self._pieces[key] = SavedPiece(tensor, *span)
        return piece

    def _find(
        self, tensor: torch.Tensor, key: tuple[int, int, int, int]
    ) -> tuple[SavedPiece | None, PieceKey]:
        """Return the existing piece, or None, and its key."""
        for number in itertools.count():
            piece = self._pieces.get((*key, number))
            if piece is None or piece.watch.covers(tensor):
                return piece, (*key, number)
        raise AssertionError  # unreachable: the count is infinite

    @guarded
    def skip(self, piece: SavedPiece, reason: str) -> None:
        """Count a piece that stays in memory for `reason`, once."""
        if not piece.reason and not piece.shipped:
            piece.reason = reason
            self.counts.kept(reason, piece.nbytes)

    def save(self, piece: SavedPiece, geometry: Geometry, min_size: int) -> None:
        """Offload the piece of a saved tensor, if it is worth it.

        Raises the errors of `put`, except BudgetError for memory: the piece then stays in memory.
        """
        reason = self._record_view(piece, geometry, min_size)
        if reason:
            self.skip(piece, reason)
        elif reason is not None:
            self._ship(piece)

    @guarded
    def _record_view(self, piece: SavedPiece, geometry: Geometry, min_size: int) -> str | None:
        """Record a view of a piece. Return why it must stay in memory.

        "" if the piece must be offloaded; None if it already was.
        """
        if piece.shipped:
            self.counts.deduplicated(geometry.distinct_bytes)
            return None
        piece.add_view(geometry)
        reason = self._why_skipped(piece, min_size)
        piece.shipped = not reason
        storage = piece.original
        if reason == "small" and storage is not None and storage.nbytes() >= max(min_size, 1):
            piece.copy_out()
        return reason

    def _why_skipped(self, piece: SavedPiece, min_size: int) -> str:
        # A piece that was copied out has no `original`, even if it is as large as this `min_size`.
        if piece.nbytes < max(min_size, 1) or piece.original is None:
            return "small"
        if round_up(piece.nbytes, PAGE) > engine_of(self.store).saved_tensors.max_group_bytes():
            return "no_room"
        return "sparse_slice" if piece.viewed_bytes * shares.COVERAGE < piece.nbytes else ""

    def _ship(self, piece: SavedPiece) -> None:
        storage, stream = piece.original, engine_of(self.store).core.current_stream()
        assert storage is not None
        try:
            number, event = engine_of(self.store).saved_tensors.save(piece.part_of(storage))
        except BaseException as error:
            piece.shipped = False
            if not isinstance(error, BudgetError) or error.tier == Tier.DISK.name:
                raise
            self.skip(piece, "no_room")  # leases hold the memory
            return
        piece.mark_stored(self, number)
        self._local.order.add(piece)
        copy = None
        if event is not None and stream is not None:
            copy = PendingCopy(event, stream, storage, weakref.ref(piece), piece.nbytes)
        self._count_shipped(piece, copy)
        self.release_copied(keep_newest=1)

    @guarded
    def _count_shipped(self, piece: SavedPiece, copy: PendingCopy | None) -> None:
        self.counts.shipped(piece.nbytes, instead_of=piece.reason)
        piece.reason = ""
        self._stored_bytes += piece.nbytes
        if copy is None:
            piece.original = None
        else:
            self._pending.append(copy)
            self._pending_bytes += piece.nbytes

    @guarded
    def release_copied(self, *, keep_newest: int | None = None) -> None:
        """Free the memory of pieces whose copies have completed.

        With `keep_newest`, also free the memory of copies in progress, the oldest first, until few
        bytes are pending or only the newest `keep_newest` remain. Their stream then waits for the
        copies, because its next allocation may reuse the memory. The caller never blocks.
        """
        while self._unreferenced:
            self._stored_bytes -= self._unreferenced.popleft()
        most = min(PENDING, self._stored_bytes // shares.PENDING)
        while self._pending:
            oldest = self._pending[0]
            if not oldest.copied.query():
                may_wait = keep_newest is not None and len(self._pending) > keep_newest
                if not may_wait or self._pending_bytes <= most:
                    return
                oldest.stream.wait_event(oldest.copied)
            self._pending.popleft()
            self._pending_bytes -= oldest.nbytes
            if (piece := oldest.piece()) is not None:
                piece.original = None

    def on_unreferenced(self, number: int, nbytes: int) -> None:
        """Drop a piece that is no longer referenced. Called by finalizers."""
        engine_of(self.store).saved_tensors.drop(number)
        self._unreferenced.append(nbytes)

    # Unpacking ---------------------------------------------------------------------------------

    def was_read(self, piece: SavedPiece) -> None:
        """Record that a piece was read, and stop holding the memory of the previous one."""
        before, self._latest = self._latest, weakref.ref(piece)
        other = None if before is None else before()
        if other is not None and other is not piece:
            other.held = None

    def fetch(self, number: int) -> torch.UntypedStorage:
        """Return memory on the store's device with the bytes of a piece.

        Raises the errors of `acquire`.
        """
        self.release_copied()
        try:
            lease = self.store.acquire(saved_key(number))
        except BudgetError:
            engine_of(self.store).saved_tensors.release_idle_leases()
            lease = self.store.acquire(saved_key(number))
        return self.reads.view(lease)


class ReadLeases:
    """Leases under which pieces are read directly in the store's memory.

    A lease ends with the last view of the piece. On an accelerator, that is when the work that
    reads it has been queued; the memory stays in use until an event after that work completes.

    A backward pass may keep the tensors that it reads (for double backward), so leases are limited
    to a part of the budget that leaves space for the largest group. Beyond the limit, readers get
    copies in memory from torch's allocator, on the stream that reads them.
    """

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._leased = Allowance()

    def view(self, lease: Lease) -> torch.UntypedStorage:
        """Return memory with the bytes of a piece, and take over the lease.

        The lease ends with the last view of that memory, or at once if the bytes are copied.
        """
        memory = lease.tensor
        taken = round_up(memory.nbytes, PAGE)
        if not self._leased.take(
            taken, engine_of(self._store).saved_tensors.lease_capacity() // shares.READ_LEASES
        ):
            with lease:
                return memory.clone().untyped_storage()
        holder = Holder(lease)
        weakref.finalize(holder, self._release, lease, taken).atexit = False
        return over(memory, holder).untyped_storage()

    def _release(self, lease: Lease, nbytes: int) -> None:
        lease.abandon()  # safe in a finalizer
        self._leased.release(nbytes)
