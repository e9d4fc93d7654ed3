"""The tensors of one stored group, as `show` tells them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tierstore.model.groups import TensorSpec, contiguous_stride
from tierstore.model.objects import StoredObject


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a stored group.

    `offset` is in bytes from the start of the file. `digest` is the checksum of the storage that
    the tensor looks at. Tensors of one group with the same number in `tied` share some of it.
    """

    spec: TensorSpec
    offset: int
    digest: str
    tied: int | None

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in order and without gaps."""
        return self.spec.stride == contiguous_stride(self.spec.shape)


def tensors_of(stored: StoredObject) -> list[StoredTensor]:
    """Every tensor of a stored group, by its place in the file."""
    packing = stored.packing
    tensors: list[StoredTensor] = []
    ties = 0
    for block, start, digest in zip(packing.blocks, packing.dense, stored.digests, strict=True):
        for shared in _overlapping(block.views):
            ties += len(shared) > 1
            tied = ties if len(shared) > 1 else None
            tensors += [
                StoredTensor(view, stored.data_start + start + view.offset, digest, tied)
                for view in shared
            ]
    return tensors


def _overlapping(views: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """The tensors of one storage, those together that share bytes of it (or are joined by one)."""
    clusters: list[list[TensorSpec]] = []
    end = 0
    for view in sorted(views, key=lambda view: view.offset):
        if clusters and view.offset < end:
            clusters[-1].append(view)
        else:
            clusters.append([view])
        end = max(end, view.offset + view.nbytes)
    return clusters
