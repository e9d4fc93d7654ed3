"""Load a checkpoint into a model without reading it: each weight becomes a map of its file.

The model may be on the meta device, as built by `accelerate.init_empty_weights()` or
`torch.device("meta")`. Its Parameter objects are never replaced. A mapped weight takes no memory
until it is used, and the store registers it in place.
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
from tierstore.adapters.recomputing import Value, first_few, recompute_buffers
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
"""Maximum bytes of a map shared by consecutive tensors of a file.

A process is limited to about 65,000 maps, and a map lives as long as any tensor that shows it.
"""


@dataclass(frozen=True, eq=False)
class _Wanted:
    """A parameter or persistent buffer of the model, with all its names."""

    tensor: torch.Tensor
    names: list[str]

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)

    @property
    def may_stay(self) -> bool:
        """True if the checkpoint may omit it: a buffer that has a value in the model."""
        return not self.is_parameter and self.tensor.device.type != "meta"


@dataclass(frozen=True)
class _Match:
    """The checkpoint tensor for each tensor of the model, in the order of `wanted`."""

    found: list[FileTensor | None]
    unexpected: list[str]


def load_weights(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    *,
    strict: bool,
    store: TierStore | None = None,
) -> dict[int, torch.dtype]:
    """Point every parameter and persistent buffer of `model` at the checkpoint's value.

    `checkpoint` is a `.safetensors` file, a directory with one or with shards, an index file, or
    the URL of one of these; remote files are fetched to the directory of `store` once. No weight is
    read: each becomes a private, copy-on-write map of its file on the CPU, with its own storage. A
    tensor with several names takes the value of the first name that the checkpoint has.

    Returns the original dtype, by tensor `id`, of each tensor whose dtype in the file differs. Such
    a tensor shows the file's dtype now; the caller casts it.

    Raises ValueError if the checkpoint does not match the model (with `strict`, also if it has
    other tensors), TransferError or InvalidHeaderError if it cannot be read. The model is then
    unchanged.
    """
    _check_no_pickle(checkpoint)
    files = read_checkpoint(checkpoint)
    wanted = _wanted(model)
    match = _best_match(model, wanted, files)
    _check(os.fspath(checkpoint), model, wanted, match)
    _check_unexpected(checkpoint, match.unexpected, strict)
    with torch.inference_mode(False), torch.no_grad():  # tensors that autograd may use later
        values = recompute_buffers(model)
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
            f"{path} is a torch pickle, which can run code when it is loaded: convert it with "
            "safetensors.torch.save_model, or save the model again with save_pretrained, and pass "
            "the .safetensors file",
            path=str(path),
        )


# Tensors of the model ----------------------------------------------------------------------------


def _wanted(model: nn.Module) -> list[_Wanted]:
    found: dict[int, _Wanted] = {}
    for name, tensor in named_weights_of(model):
        found.setdefault(id(tensor), _Wanted(tensor, [])).names.append(name)
    return list(found.values())


# Tensors of the checkpoint -----------------------------------------------------------------------


def _best_match(model: nn.Module, wanted: list[_Wanted], files: list[CheckpointFile]) -> _Match:
    """Return the match with the fewest missing tensors, preferring the checkpoint's own names.

    The names in a base model's checkpoint lack the prefix that a model with a head adds.
    """
    matches = []
    for rename in _namings(model):
        tensors = {rename(t.name): t for file in files for t in file.tensors}
        if len(tensors) == sum(len(file.tensors) for file in files):
            ties = _written_ties(files, rename) | _ties_of(model)
            matches.append(_match(wanted, tensors, ties))
    return min(matches, key=lambda match: len(_missing(wanted, match)))


def _namings(model: nn.Module) -> list[Callable[[str], str]]:
    """Return functions that map checkpoint names to model names, the likeliest first."""
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
    """Return tied names from file metadata, as a map from an omitted name to the stored one.

    `safetensors.torch.save_model` writes this metadata.
    """
    ties = {}
    for file in files:
        held = {tensor.name for tensor in file.tensors}
        for left_out, kept in file.metadata.items():
            if kept in held and left_out not in held:
                ties[rename(left_out)] = rename(kept)
    return ties


def _ties_of(model: nn.Module) -> dict[str, str]:
    """Return names that the model declares as tied to others, even if the objects differ."""
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


# Checks ------------------------------------------------------------------------------------------


def _check(path: str, model: nn.Module, wanted: list[_Wanted], match: _Match) -> None:
    unfit = [
        f"{one.names[0]!r} {why}"
        for one, tensor in zip(wanted, match.found, strict=True)
        if tensor is not None and (why := _misfit(one, tensor))
    ]
    problems = [f"it cannot fill {first_few(unfit)}"] if unfit else []
    missing = _missing(wanted, match)
    if missing:
        problems.append(f"it has no {first_few(repr(one.names[0]) for one in missing)}")
    real = [one for one in missing if one.tensor.device.type != "meta"]
    if real:
        problems.append(
            f"{len(real)} of these have values in the model, but the checkpoint must provide every "
            "parameter"
        )
    if problems:
        raise ValueError(
            f"{path} does not fit this {type(model).__name__}: {'; '.join(problems)}. "
            "Build the model from the checkpoint's own config and class, and tie weights that have "
            "several names (model.tie_weights()); or load it with its own library, such as with "
            "from_pretrained, and call dispatch_model"
        )


def _misfit(one: _Wanted, tensor: FileTensor) -> str:
    """Return why a tensor of the model cannot show one of the file; empty if it can."""
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
    names = first_few(map(repr, unexpected))
    what, them, were = (
        ("a weight", "it", "It was") if len(unexpected) == 1 else ("weights", "them", "They were")
    )
    listed = f"{os.fspath(checkpoint)} has {what} that the model lacks: {names}"
    if strict:
        raise ValueError(f"{listed}. Pass strict=False to ignore {them}")
    warnings.warn(f"{listed}. {were} ignored", stacklevel=4)


# Maps of the files -------------------------------------------------------------------------------


def _maps(
    store: TierStore | None, files: list[CheckpointFile], names: set[str]
) -> dict[str, torch.Tensor]:
    """Return the named tensors of the checkpoint as maps of its files, or of fetched copies."""
    maps: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = [tensor for tensor in file.tensors if tensor.name in names]
        if file.remote is not None:
            if store is None:
                raise ValueError(f"{file.path} is in an object store: pass a store to fetch it to")
            maps.update(engine_of(store).groups.fetch_tensors(file, tensors))
            continue
        try:
            for run in _runs(tensors):
                maps.update(_map_run(file.path, run))
            unchanged = FileStamp.of(os.stat(file.path)) == file.stamp
        except OSError as error:
            raise transfer_error(error, "mapping", key=None, path=file.path) from error
        except TruncatedFileError:  # the file is now shorter than its header says
            unchanged = False
        if not unchanged:
            raise StaleCheckpointError(
                f"{file.path} was changed while it was being loaded: load it again when it is "
                "complete",
                path=file.path,
            )
    return maps


def _runs(tensors: list[FileTensor]) -> Iterator[list[FileTensor]]:
    """Yield the tensors of one file by offset, in runs that share a map."""
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
    """Point each tensor at its value. If one fails, restore all."""
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
            f"{before[-1].name!r} cannot be loaded, as autograd has saved it: load the weights "
            "right after building the model"
        ) from error
