"""Memory that autograd saved: one piece of a storage, at one version, wherever its bytes are.

A piece is held by the graph, through the handles of the tensors that look at it, and goes with it.
It begins as a reference to the storage. Once it is worth it, the bytes are copied to the store and
the reference is let go. On an accelerator that is soon after: as long as anybody holds the storage,
unpacking needs no copy at all.

Finalizers run anywhere, even in the middle of another step: they take no lock, and only leave a
note in a queue.
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

AHEAD = 8
"""Pieces that the store is told are wanted next."""

ORDER_LENGTH = 256
"""Pieces, gone or not, that the order of a thread may have in any case."""

PENDING = 64 << 20
"""Bytes, at most, that stay on the device while its work goes on beside their copies."""

PieceKey = tuple[int, int, int, int, int]
"""A storage, its version, the first and last byte of it, and a number for each of the counters that
say that this is the version."""


class SavedPiece:
    """Bytes from `start` on of the storage of a tensor, as they were at the tensor's version."""

    _away: tuple[SavedTensorCache, int] | None = None  # of the class: `__init__` may raise

    def __init__(self, tensor: torch.Tensor, start: int, stop: int) -> None:
        storage = tensor.untyped_storage()
        self.start = start
        self.nbytes = stop - start
        self.watch = VersionWatch(tensor)
        self.original: torch.UntypedStorage | None = storage
        self.reason = ""  # why it is kept; "" if it is not, or if nobody has looked yet
        self.viewed_bytes = 0
        self.shipped = False  # somebody ships it, or has
        self.hinted = False
        self.order: PackOrder | None = None
        self.index = 0
        self._weak = StorageWeakRef(storage)
        self._copy: torch.UntypedStorage | None = None
        self._geometries: set[Geometry] = set()
        # Held as long as nothing else is read: where two saved tensors share a piece, their nodes
        # are often neighbours.
        self.held: torch.UntypedStorage | None = None
        # What the store gave back last, and the stream that was told to wait for it.
        self._back: tuple[StorageWeakRef, Any] | None = None

    def __del__(self) -> None:
        if self._away is not None:
            cache, number = self._away
            cache.gone(number, self.nbytes)

    @property
    def number(self) -> int | None:
        """The name that the store knows it by; None if it does not."""
        return None if self._away is None else self._away[1]

    def part_of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The bytes, in the storage that they were saved in."""
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return byte_view(empty.set_(storage), self.start, self.nbytes)

    def sent(self, cache: SavedTensorCache, number: int) -> None:
        """The store has it."""
        self._away = cache, number
        self._geometries.clear()

    def add_view(self, geometry: Geometry) -> None:
        """A saved tensor looks at it."""
        if geometry not in self._geometries:
            self._geometries.add(geometry)
            self.viewed_bytes += geometry.distinct_bytes

    def copy_out(self) -> None:
        """Keep a copy of these few bytes, so that they do not keep the whole storage."""
        storage = self.original
        assert storage is not None
        self._copy = self.part_of(storage).clone().untyped_storage()
        self.original = None

    def build(self, geometry: Geometry) -> torch.Tensor:
        """A tensor that was saved. Fetches the bytes if they are nowhere else."""
        storage = self.original
        if storage is None:
            storage = storage_of(self._weak)
        if storage is not None and storage.nbytes() >= self.start + self.nbytes:
            return geometry.over(storage, counted=self.watch.counted)
        if self._copy is not None:
            return geometry.over(self._copy, self.start, self.watch.counted)
        return geometry.over(self._fetched(), self.start, self.watch.counted)

    def _fetched(self) -> torch.UntypedStorage:
        assert self._away is not None
        cache, number = self._away
        stream = engine_of(cache.store).core.current_stream()
        if self._back is not None and self._back[1] == stream:
            storage = storage_of(self._back[0])
            if storage is not None:
                return storage
        self._hint(cache)
        storage = cache.fetch(number)
        self._back = StorageWeakRef(storage), stream
        self.held = storage
        cache.was_read(self)
        return storage

    def _hint(self, cache: SavedTensorCache) -> None:
        """What was packed just before is wanted next."""
        self.hinted = False
        assert self.order is not None
        before = [piece for piece in self.order.before(self.index) if not piece.hinted]
        numbers = [piece.number for piece in before if piece.number is not None]
        for piece in before:
            piece.hinted = True
        if numbers:
            engine_of(cache.store).saved_tensors.expect(numbers)


class PackOrder:
    """The order in which one thread put pieces aside."""

    def __init__(self) -> None:
        self._pieces: list[weakref.ref[SavedPiece]] = []
        self._limit = ORDER_LENGTH

    def add(self, piece: SavedPiece) -> None:
        """The newest one."""
        while self._pieces and self._pieces[-1]() is None:
            self._pieces.pop()
        if len(self._pieces) >= self._limit:
            self._compact()
        piece.order, piece.index = self, len(self._pieces)
        self._pieces.append(weakref.ref(piece))

    def _compact(self) -> None:
        """Forget those that are gone. Where forward passes overlap, they are not at the end."""
        found = [piece for ref in self._pieces if (piece := ref()) is not None]
        for i, piece in enumerate(found):
            piece.index = i
        self._pieces = [weakref.ref(piece) for piece in found]
        self._limit = max(2 * len(found), ORDER_LENGTH)  # so that it is not done for each

    def before(self, index: int) -> list[SavedPiece]:
        """Those that came just before it, the newest first."""
        found = [piece() for piece in self._pieces[max(index - AHEAD, 0) : index]]
        return [piece for piece in reversed(found) if piece is not None]


class _Local(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.order = PackOrder()


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A piece that is being copied from the device, and its memory, as somebody may look at it.

    The allocator may give the memory away when `stream`, on which it was saved, has waited for
    the event `copied`.
    """

    copied: torch.Event
    stream: torch.Stream
    memory: torch.UntypedStorage
    piece: weakref.ref[SavedPiece]
    nbytes: int


class SavedTensorCache:
    """The pieces that one store looks after, for all who save activations in it."""

    def __init__(self, store: TierStore) -> None:
        self.store = store
        self.counts = engine_of(store).saved_tensors.counts
        self._lock = RLock()  # never held while the store is asked for anything
        self._pieces: weakref.WeakValueDictionary[PieceKey, SavedPiece] = (
            weakref.WeakValueDictionary()
        )
        self._local = _Local()
        self.reads = ReadLeases(store)
        self._pending: deque[PendingCopy] = deque()
        self._pending_bytes = 0
        self._away_bytes = 0
        self._gone: deque[int] = deque()
        self._latest: weakref.ref[SavedPiece] | None = None  # the piece that was read last

    # Packing -----------------------------------------------------------------------------------

    def piece(self, tensor: torch.Tensor, span: tuple[int, int]) -> SavedPiece:
        """The piece of a tensor's storage with these bytes, the same one for all who ask."""
        storage = tensor.untyped_storage()
        # Nobody gets the address of a storage as long as there is a weak reference to it.
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
        """The piece there, and else the key that it would have."""
        for number in itertools.count():
            piece = self._pieces.get((*key, number))
            if piece is None or piece.watch.covers(tensor):
                return piece, (*key, number)
        raise AssertionError  # numbers do not end

    @guarded
    def skip(self, piece: SavedPiece, reason: str) -> None:
        """A saved tensor looks at a piece that stays where it is."""
        if not piece.reason and not piece.shipped:
            piece.reason = reason
            self.counts.kept(reason, piece.nbytes)

    def save(self, piece: SavedPiece, geometry: Geometry, min_size: int) -> None:
        """A saved tensor looks at a piece: ship that, if it is worth it.

        Raises what `put` raises, but for a lack of room in memory: then it stays where it is.
        """
        reason = self._looked_at(piece, geometry, min_size)
        if reason:
            self.skip(piece, reason)
        elif reason is not None:
            self._ship(piece)

    @guarded
    def _looked_at(self, piece: SavedPiece, geometry: Geometry, min_size: int) -> str | None:
        """Why a piece is to stay; "": it is to be shipped. None: it is shipped already."""
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
        # What was cut out is copied already, even if it is large enough for this `min_size`.
        if piece.nbytes < max(min_size, 1) or piece.original is None:
            return "small"
        if round_up(piece.nbytes, PAGE) > engine_of(self.store).saved_tensors.largest_possible():
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
            self.skip(piece, "no_room")  # leases hold it
            return
        piece.sent(self, number)
        self._local.order.add(piece)
        copy = None
        if event is not None and stream is not None:
            copy = PendingCopy(event, stream, storage, weakref.ref(piece), piece.nbytes)
        self._count_shipped(piece, copy)
        self.release_copied(but=1)

    @guarded
    def _count_shipped(self, piece: SavedPiece, copy: PendingCopy | None) -> None:
        self.counts.shipped(piece.nbytes, instead_of=piece.reason)
        piece.reason = ""
        self._away_bytes += piece.nbytes
        if copy is None:
            piece.original = None
        else:
            self._pending.append(copy)
            self._pending_bytes += piece.nbytes

    @guarded
    def release_copied(self, *, but: int | None = None) -> None:
        """Let the allocator have the memory of what has been copied.

        `but` the newest few: that of others too, the oldest first, until little is left. The
        stream on which they were saved goes on once they are copied: it may get the memory next.
        The caller does not wait, however far the device is behind.
        """
        while self._gone:
            self._away_bytes -= self._gone.popleft()
        most = min(PENDING, self._away_bytes // shares.PENDING)
        while self._pending:
            oldest = self._pending[0]
            if not oldest.copied.query():
                may_wait = but is not None and len(self._pending) > but
                if not may_wait or self._pending_bytes <= most:
                    return
                oldest.stream.wait_event(oldest.copied)
            self._pending.popleft()
            self._pending_bytes -= oldest.nbytes
            if (piece := oldest.piece()) is not None:
                piece.original = None

    def gone(self, number: int, nbytes: int) -> None:
        """Nobody wants a piece any more. For finalizers."""
        engine_of(self.store).saved_tensors.drop(number)
        self._gone.append(nbytes)

    # Unpacking ---------------------------------------------------------------------------------

    def was_read(self, piece: SavedPiece) -> None:
        """A piece was read: the one before it need not be held any more."""
        before, self._latest = self._latest, weakref.ref(piece)
        other = None if before is None else before()
        if other is not None and other is not piece:
            other.held = None

    def fetch(self, number: int) -> torch.UntypedStorage:
        """Memory on the store's device with the bytes of a piece. Raises what `acquire` raises."""
        self.release_copied()
        try:
            lease = self.store.acquire(saved_key(number))
        except BudgetError:
            engine_of(self.store).saved_tensors.make_room()
            lease = self.store.acquire(saved_key(number))
        return self.reads.view(lease)


class ReadLeases:
    """Where pieces are read: in the store's own memory, as long as the lease lasts.

    It ends with the last view of the piece. On an accelerator that is when the work that reads it
    has been queued: the room is still taken until an event behind that work has passed.

    A backward pass may keep what it reads (to be differentiated again), so leases hold no more of
    a budget than leaves room for the largest group. Beyond that it gets copies, in memory that the
    allocator has for the stream that reads them.
    """

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._leased = Allowance()

    def view(self, lease: Lease) -> torch.UntypedStorage:
        """Memory with the bytes of a piece; the lease is over when it is gone, or now."""
        memory = lease.tensor
        taken = round_up(memory.nbytes, PAGE)
        if not self._leased.take(
            taken, engine_of(self._store).saved_tensors.room_for_leases() // shares.READ_LEASES
        ):
            with lease:
                return memory.clone().untyped_storage()
        holder = Holder(lease)
        weakref.finalize(holder, self._take_back, lease, taken).atexit = False
        return over(memory, holder).untyped_storage()

    def _take_back(self, lease: Lease, nbytes: int) -> None:
        lease.abandon()  # possibly in the middle of anything
        self._leased.give_back(nbytes)
