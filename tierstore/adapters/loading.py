"""A checkpoint's weights put into a model without being read: each becomes a map of its file.

The model may be on the meta device, as `accelerate.init_empty_weights()` or `torch.device("meta")`
build it. Its Parameter objects stay the same ones. What shows a file's bytes takes no memory until
it is used, and the store adopts it as it is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tierstore.adapters.codecs.memory import has_address
from tierstore.adapters.codecs.plain import assign
from tierstore.adapters.codecs.wrapper import is_wrapper
from tierstore.adapters.compat import Library, first_answer, joined_answers
from tierstore.adapters.contents import named_modules_of, named_weights_of
from tierstore.adapters.recomputing import Value, recomputed, some
from tierstore.engine.checkpoints import CheckpointFile, read_checkpoint
from tierstore.errors import StaleCheckpointError, TransferError, TruncatedFileError
from tierstore.model.groups import FileTensor
from tierstore.model.weight_files import is_pickle
from tierstore.progress import bar
from tierstore.store import TierStore, engine_of
from tierstore.system.files import FileStamp, transfer_error
from tierstore.system.maps import map_file
from tierstore.system.views import DTYPES

SHARED_MAP_BYTES = 64 << 20
"""Tensors that follow each other in a file share a map up to this size. A process may only have
some 65,000 maps, and a map stays as long as any tensor that shows it."""


@dataclass(frozen=True, eq=False)
class _Wanted:
    """A parameter or persistent buffer of the model, with every name that it has."""

    tensor: torch.Tensor
    names: list[str]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def may_stay(self) -> bool:
        """Whether the model has a value for it that the checkpoint may leave out."""
        return not self.is_parameter and self.tensor.device.type != "meta"


@dataclass(frozen=True)
class _Match:
    """Which tensor of the checkpoint each of the model's gets, in the order of `wanted`."""

    found: list[FileTensor | None]
    unexpected: list[str]


def load_weights(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    strict: bool,
    store: TierStore | None = None,
) -> dict[int, torch.dtype]:
    """Let every parameter and persistent buffer of `model` show the checkpoint's value.

    `checkpoint` is a `.safetensors` file, a directory with one or with shards, an index file, or a
    URL of one of these; what lies in an object store is fetched to the directory of `store`, once.
    No weight is read: each becomes a private, copy-on-write map of its file, on the CPU, with a
    storage of its own. Where one tensor has several names, the first that the checkpoint knows
    counts.

    Returns the dtype that a tensor had, by its `id`, where the file has another: it shows the
    file's dtype now, and is the caller's to convert.

    Raises ValueError if the checkpoint does not fit the model (with `strict`, also if it holds
    more), TransferError or InvalidHeaderError if it cannot be read. Then the model is as it was.
    """
    _check_no_pickle(checkpoint)
    files = read_checkpoint(checkpoint)
    wanted = _wanted(model)
    match = _best_match(model, wanted, files)
    _check(model, wanted, match)
    _check_unexpected(checkpoint, match.unexpected, strict)
    with torch.inference_mode(False), torch.no_grad():  # tensors that autograd may use later
        values = recomputed(model)
        maps = _maps(store, files, {tensor.name for tensor in match.found if tensor is not None})
        values += [
            Value(one.names[0], one.tensor, maps[tensor.name])
            for one, tensor in zip(wanted, match.found, strict=True)
            if tensor is not None
        ]
        before = {id(v.tensor): v.tensor.dtype for v in values if v.tensor.dtype != v.shown.dtype}
        _assign_all(values)
    return before


def _check_no_pickle(checkpoint: str | os.PathLike[str]) -> None:
    path = Path(checkpoint)
    if is_pickle(path.name) and path.is_file():
        raise TransferError(
            f"{path} is a torch pickle, which can run code when it is read: convert it with "
            "safetensors.torch.save_model, or save the model again with save_pretrained, and pass "
            "the .safetensors file",
            path=str(path),
        )


# What the model wants ----------------------------------------------------------------------------


def _wanted(model: nn.Module) -> list[_Wanted]:
    found: dict[int, _Wanted] = {}
    for name, tensor in named_weights_of(model):
        found.setdefault(id(tensor), _Wanted(tensor, [])).names.append(name)
    return list(found.values())


# What the checkpoint holds of it -----------------------------------------------------------------


def _best_match(model: nn.Module, wanted: list[_Wanted], files: list[CheckpointFile]) -> _Match:
    """The match under the checkpoint's own names, or under others if then less is missing.

    A checkpoint of a base model lacks a prefix that the names of a model with a head have.
    """
    matches = []
    for rename in _namings(model):
        tensors = {rename(t.name): t for file in files for t in file.tensors}
        if len(tensors) == sum(len(file.tensors) for file in files):
            ties = _written_ties(files, rename) | _ties_of(model)
            matches.append(_match(wanted, tensors, ties))
    return min(matches, key=lambda match: len(_missing(wanted, match)))


def _namings(model: nn.Module) -> list[Callable[[str], str]]:
    """How names in the checkpoint may turn into names of the model, the likeliest first."""
    namings: list[Callable[[str], str]] = [lambda name: name]
    base = first_answer(Library.base_prefix, model)
    if base:
        prefix = f"{base}."
        if isinstance(getattr(model, base, None), nn.Module):
            namings.append(lambda name: prefix + name)
        else:
            namings.append(lambda name: name.removeprefix(prefix))
    return namings


def _written_ties(files: list[CheckpointFile], rename: Callable[[str], str]) -> dict[str, str]:
    """For a name that a file leaves out, the name of the same tensor in it, as it tells.

    `safetensors.torch.save_model` writes this.
    """
    ties = {}
    for file in files:
        held = {tensor.name for tensor in file.tensors}
        for left_out, kept in file.metadata.items():
            if kept in held and left_out not in held:
                ties[rename(left_out)] = rename(kept)
    return ties


def _ties_of(model: nn.Module) -> dict[str, str]:
    """Names in a model that always show the same tensor as others, whichever objects there are."""
    ties = {}
    for prefix, module in named_modules_of(model):
        lead = f"{prefix}." if prefix else ""
        known = joined_answers(Library.tied_names, module)
        ties.update({lead + name: lead + other for name, other in known.items()})
    return ties


def _match(
    wanted: list[_Wanted], tensors: Mapping[str, FileTensor], ties: Mapping[str, str]
) -> _Match:
    known: set[str] = set()
    found = []
    for one in wanted:
        names = [*one.names, *(ties[name] for name in one.names if name in ties)]
        known.update(one.names)
        found.append(next((tensors[name] for name in names if name in tensors), None))
    unexpected = [tensor.name for name, tensor in tensors.items() if name not in known]
    return _Match(found, unexpected)


def _missing(wanted: list[_Wanted], match: _Match) -> list[_Wanted]:
    pairs = zip(wanted, match.found, strict=True)
    return [one for one, tensor in pairs if tensor is None and not one.may_stay]


# Whether it fits ---------------------------------------------------------------------------------


def _check(model: nn.Module, wanted: list[_Wanted], match: _Match) -> None:
    unfit = [
        f"{one.names[0]!r} {why}"
        for one, tensor in zip(wanted, match.found, strict=True)
        if tensor is not None and (why := _misfit(one, tensor))
    ]
    problems = [f"it does not fit {some(unfit)}"] if unfit else []
    missing = _missing(wanted, match)
    if missing:
        problems.append(f"it lacks {some(repr(one.names[0]) for one in missing)}")
    real = [one for one in missing if one.tensor.device.type != "meta"]
    if real:
        problems.append(
            f"{len(real)} of these have a value in the model, but every parameter must come from "
            "the checkpoint"
        )
    if problems:
        raise ValueError(
            f"the checkpoint is none of this {type(model).__name__}: {'; '.join(problems)}. "
            "Build the model from the checkpoint's own config and class, and tie weights that have "
            "several names (model.tie_weights()); or load it in its own way, as from_pretrained "
            "does, and call dispatch_model"
        )


def _misfit(one: _Wanted, tensor: FileTensor) -> str:
    """Why a tensor of the model cannot show one of the file; empty if it can."""
    shown = one.tensor
    if nn.parameter.is_lazy(shown) or is_wrapper(shown) or not has_address(shown):
        return f"(it is a {type(shown).__name__}, which cannot show a file's bytes)"
    if tuple(shown.shape) != tensor.shape:
        return f"(of shape {list(shown.shape)}, in the file {list(tensor.shape)})"
    dtype = DTYPES[tensor.dtype]
    if one.is_parameter and _kind(dtype) != _kind(shown.dtype):
        return f"(of {shown.dtype}, in the file {dtype}: a quantised checkpoint?)"
    return ""


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _check_unexpected(
    checkpoint: str | os.PathLike[str], unexpected: list[str], strict: bool
) -> None:
    if not unexpected:
        return
    listed = f"{os.fspath(checkpoint)} has what the model has not: {some(map(repr, unexpected))}"
    if strict:
        raise ValueError(f"{listed}. Pass strict=False to leave it out")
    warnings.warn(f"{listed}. It is left out", stacklevel=4)


# Maps of the files -------------------------------------------------------------------------------


def _maps(
    store: TierStore | None, files: list[CheckpointFile], names: set[str]
) -> dict[str, torch.Tensor]:
    """The named tensors of the checkpoint as maps of its files, or of what is fetched of them."""
    maps: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = [tensor for tensor in file.tensors if tensor.name in names]
        if file.remote is not None:
            if store is None:
                raise ValueError(
                    f"{file.path} is in an object store: pass the store to fetch it to"
                )
            maps.update(engine_of(store).groups.fetched(file, tensors))
            continue
        try:
            for run in _runs(tensors):
                maps.update(_map_run(file.path, run))
            unchanged = FileStamp.of(os.stat(file.path)) == file.stamp
        except OSError as error:
            raise transfer_error(error, "mapping", key=None, path=file.path) from error
        except TruncatedFileError:  # it is shorter now than its header says
            unchanged = False
        if not unchanged:
            raise StaleCheckpointError(
                f"{file.path} was changed while it was loaded: load it again when it is complete",
                path=file.path,
            )
    return maps


def _runs(tensors: list[FileTensor]) -> Iterator[list[FileTensor]]:
    """Tensors of one file, by their place in it, cut into what shares a map."""
    run: list[FileTensor] = []
    for tensor in sorted(tensors, key=lambda t: t.extent.offset):
        if run and _end(tensor) - run[0].extent.offset > SHARED_MAP_BYTES:
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run


def _end(tensor: FileTensor) -> int:
    return tensor.extent.offset + tensor.extent.nbytes


def _map_run(path: str, run: list[FileTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    start, nbytes = run[0].extent.offset, _end(run[-1]) - run[0].extent.offset
    mapped = map_file(path, start, nbytes) if nbytes else memoryview(b"")
    for tensor in run:
        yield tensor.name, _mapped(tensor, mapped, tensor.extent.offset - start)


def _mapped(tensor: FileTensor, mapped: memoryview, offset: int) -> torch.Tensor:
    dtype = DTYPES[tensor.dtype]
    count = tensor.extent.nbytes // dtype.itemsize
    if not count:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(tensor.shape)


# Into the model ----------------------------------------------------------------------------------


def _assign_all(values: list[Value]) -> None:
    """Let each tensor show its value; all of them or, if that fails, none."""
    before: list[Value] = []
    try:
        for value in bar(values, "Loading weights", "tensors"):
            before.append(Value(value.name, value.tensor, value.tensor.detach()))
            assign(value.tensor, value.shown)
    except BaseException as error:
        for value in reversed(before):
            assign(value.tensor, value.shown)
        if not isinstance(error, RuntimeError):
            raise
        raise RuntimeError(
            f"{before[-1].name!r} cannot get its value, as a computation has saved it: load the "
            "weights as soon as the model is built"
        ) from error
