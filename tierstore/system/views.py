"""Conversion between torch tensors and packed bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tierstore.model.groups import (
    Block,
    GroupSpec,
    Packing,
    TensorSpec,
    block_of,
    group_of,
    pack,
)
from tierstore.model.header import check_text
from tierstore.system.objects import check_key
from tierstore.torch_private import storage_at

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """Return the safetensors name of a tensor's dtype. Raises TypeError if it has none."""
    found = NAMES.get(tensor.dtype)
    if found is None:
        raise TypeError(
            f"tensor {name!r} has the dtype {tensor.dtype}, which safetensors files do not "
            "support: convert it first"
        )
    return found


def view_all(
    spec: GroupSpec, memory: torch.Tensor, offsets: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a group as views of its packed bytes (uint8, 1-d)."""
    return {t.name: view_one(t, memory, offsets[t.name]) for t in spec.tensors}


@torch.inference_mode(mode=False)  # the views outlive the first caller's inference mode
def owning_views(
    spec: GroupSpec,
    memory: torch.Tensor,
    offsets: Mapping[str, int],
    holder: object,
    reused: Mapping[str, torch.UntypedStorage],
) -> dict[str, torch.Tensor]:
    """Return the tensors of a group over storages that keep `holder` alive, and thereby the memory.

    Overlapping tensors share a storage. Tensors named in `reused` use those storages instead of new
    ones.
    """
    address, device = memory.data_ptr(), memory.device
    if not spec.simple:
        whole = storage_over(address, device, memory.nbytes, holder)
        return view_all(spec, memory.new_empty(0).set_(whole), offsets)
    found = {}
    # No Python-level calls in this loop: it is on the critical path of a lease.
    for t, nbytes in zip(spec.tensors, spec.bytes_of_tensors, strict=True):
        storage = reused.get(t.name)
        if storage is None:
            storage = storage_at(address + offsets[t.name], device, nbytes)
            storage.__dict__["holder"] = holder
        empty = torch.empty(0, dtype=DTYPES[t.dtype], device=device)
        found[t.name] = empty.set_(storage, 0, t.shape, t.stride)
    return found


def storage_over(
    address: int, device: torch.device, nbytes: int, holder: object
) -> torch.UntypedStorage:
    """Return a storage over memory that `holder` owns. The storage keeps `holder` alive."""
    storage: torch.UntypedStorage = storage_at(address, device, nbytes)
    vars(storage)["holder"] = holder
    return storage


def view_one(spec: TensorSpec, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """Return one tensor as a view of `memory` from byte `offset` on."""
    dtype = DTYPES[spec.dtype]
    if spec.nbytes == 0:
        return torch.empty(0, dtype=dtype, device=memory.device).as_strided(spec.shape, spec.stride)
    flat = memory[offset : offset + spec.nbytes].view(dtype)
    return flat.as_strided(spec.shape, spec.stride)


def block_tensors(views: Sequence[TensorSpec], memory: Any, offset: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a block that lies in `memory` (a buffer) from byte `offset` on.

    Overlapping tensors share a storage, as the original tensors did.
    """
    if len(views) == 1:
        return {
            views[0].name: tensor_over(replace(views[0], offset=offset + views[0].offset), memory)
        }
    stop = max(view.offset + view.nbytes for view in views)
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=stop, offset=offset)
    return {view.name: view_one(view, whole, view.offset) for view in views}


def tensor_over(spec: TensorSpec, memory: Any) -> torch.Tensor:
    """Return one tensor over `memory` (a buffer), in a storage that ends with the tensor."""
    dtype = DTYPES[spec.dtype]
    if spec.nbytes == 0:
        return torch.empty(0, dtype=dtype).as_strided(spec.shape, spec.stride)
    count = spec.nbytes // dtype.itemsize
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=spec.offset)
    return flat.as_strided(spec.shape, spec.stride)


def clone_all(spec: GroupSpec, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy all tensors. Copies share memory among themselves where `views` do."""
    if spec.simple:  # true of almost all groups: no storage is shared
        return {tensor.name: _clone(views[tensor.name]) for tensor in spec.tensors}
    blocks = blocks_of(views)
    copies: dict[str, torch.Tensor] = {}
    for block, source in blocks:
        memory = source.clone()
        for view in block.views:
            copies[view.name] = view_one(view, memory, view.offset)
    return {tensor.name: copies[tensor.name] for tensor in spec.tensors}


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a tensor of any dtype: torch before 2.9 cannot copy float4 directly."""
    if tensor.dtype is torch.float4_e2m1fn_x2:
        return tensor.view(torch.uint8).clone().view(tensor.dtype)
    return tensor.clone()


def byte_view(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return `nbytes` bytes of a tensor's storage from byte `start` on, as a uint8 tensor.

    Raises ValueError if the storage is too short.
    """
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return set_storage(view, tensor.untyped_storage(), start, (nbytes,), (1,))


def set_storage(
    tensor: torch.Tensor,
    storage: torch.UntypedStorage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """Point a tensor at elements of an existing storage, and return the tensor.

    `offset` and `stride` count elements. `Tensor.set_` would grow a storage that is too short, and
    expose uninitialised memory. A storage is too short, for example, after its owner has freed it
    by `resize_(0)`, as FSDP does between its uses.

    Raises ValueError if the storage ends before the last element.
    """
    last = -1 if 0 in size else sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    needed = (offset + last + 1) * tensor.element_size()
    if storage.nbytes() < needed:
        raise ValueError(
            f"the storage has {storage.nbytes():,} bytes, but the tensor needs {needed:,}: its "
            "memory was freed by resize_; pass it while it has its data"
        )
    return tensor.set_(storage, offset, tuple(size), tuple(stride))


def blocks_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Block, torch.Tensor]]:
    """Partition tensors into blocks of storage, with their bytes; overlapping tensors share one.

    Raises TypeError for anything but a plain strided tensor of a dtype that safetensors supports.
    """
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    plain = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in plain.items():
        start = int(tensor.storage_offset()) * tensor.element_size()
        spec = _spec(name, tensor, 0)
        place = (tensor.device, _storage_address(name, tensor, start + spec.nbytes))
        spans.setdefault(place, []).append((start, start + spec.nbytes, name))
    blocks = []
    for found in spans.values():
        for start, stop, names in _merge(found):
            members = {name: plain[name] for name in names}
            # With mixed dtypes, the first tensor's start may be misaligned for the largest one.
            start -= start % max(member.element_size() for member in members.values())
            # Storages at one address may have different lengths, as those of two numpy arrays.
            whole = max(members.values(), key=lambda t: t.untyped_storage().nbytes())
            specs = [_spec(name, tensor, start) for name, tensor in members.items()]
            block = block_of(specs, stop - start)
            blocks.append((block, byte_view(whole, start, stop - start)))
    return blocks


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    check_text(name, "a tensor's name")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor: pass tensors")
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not plain or tensor.device.type == "meta":
        raise TypeError(
            f"tensor {name!r} ({tensor.layout}, {tensor.dtype}, on {tensor.device}) is not a plain "
            "strided tensor with data: convert it first"
        )
    if hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(
            f"tensor {name!r} is a {type(tensor).__name__}, a wrapper around other tensors: store "
            "those instead"
        )
    dtype_name(tensor, name)
    return tensor.detach().resolve_conj().resolve_neg()


def _storage_address(name: str, tensor: torch.Tensor, stop: int) -> int:
    """Return the address of a tensor's storage, checking that it has `stop` bytes.

    Raises TypeError for a tensor without memory, as in a transform of torch.func, and ValueError if
    the memory was freed.
    """
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # a fake tensor, which reports another device
            raise NotImplementedError("its storage is on the meta device")
        address, nbytes = storage.data_ptr(), storage.nbytes()
    except RuntimeError as error:  # NotImplementedError is one
        raise TypeError(
            f"tensor {name!r} is a {type(tensor).__name__} without data: store plain tensors, "
            "outside of torch.func transforms and fake tensors"
        ) from error
    if nbytes < stop:
        raise ValueError(
            f"the storage of tensor {name!r} has {nbytes:,} bytes, but its data needs {stop:,}: it "
            "was freed by resize_, as FSDP does between uses; store it while it has its data"
        )
    return address


def _spec(name: str, tensor: torch.Tensor, block_start: int) -> TensorSpec:
    offset = int(tensor.storage_offset()) * tensor.element_size() - block_start
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return TensorSpec(name, dtype_name(tensor, name), shape, stride, max(offset, 0))


def _merge(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, list[str]]]:
    merged: list[tuple[int, int, list[str]]] = []
    for start, stop, name in sorted(spans):
        if merged and start < merged[-1][1]:
            first, last, names = merged[-1]
            merged[-1] = (first, max(last, stop), [*names, name])
        else:
            merged.append((start, stop, [name]))
    return merged


def pack_tensors(key: str, tensors: Any) -> tuple[Packing, dict[str, torch.Tensor]]:
    """Return the packing of tensors in a group, and the bytes of its blocks.

    Raises TypeError or ValueError.
    """
    check_key(key)
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"{key!r} is a {type(tensors).__name__}: pass a tensor, or a dict of tensors"
        )
    sources = {block.name: (block, data) for block, data in blocks_of(tensors)}
    packing = pack([block for block, _ in sources.values()])
    return packing, {name: data for name, (_, data) in sources.items()}


def packed_spec(key: str, packing: Packing, names: Iterable[str]) -> GroupSpec:
    """Return the spec of a group whose tensors are laid out by `packing`."""
    by_name = {t.name: t for t in packing.specs()}
    return group_of(key, [by_name[name] for name in names], packing.nbytes)
