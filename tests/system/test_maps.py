"""The file bytes behind a tensor, and maps that show them."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.helpers.events import before
from tests.store.helpers import (
    PAGE,
    assert_group,
    assert_same,
    files_below,
    open_store,
    pages,
    push_out,
    random_tensor,
)
from tierstore import TierStore
from tierstore.errors import TransferError
from tierstore.model.groups import Extent
from tierstore.system.maps import AddressSpace, map_file

NPAGES = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data"
    file.write_bytes(bytes(range(256)) * (NPAGES * PAGE // 256))
    return file


def mapped(path: Path, flags: int = mmap.MAP_PRIVATE) -> torch.Tensor:
    """Return the whole file as a tensor that maps it."""
    with open(path, "r+b") as file:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        return torch.frombuffer(
            mmap.mmap(file.fileno(), 0, flags=flags, prot=protection), dtype=torch.uint8
        )


def found(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> Extent | None:
    """Return the file bytes that a part of a tensor maps."""
    part = tensor[start:stop]
    return AddressSpace().extent_at(part.data_ptr(), part.numel())


# Looking at one's own address space --------------------------------------------------------------


@pytest.mark.parametrize("looked_at", [False, True], ids=["untouched", "read"])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, NPAGES * PAGE), (0, 1), (PAGE - 1, PAGE + 1), (123, 3 * PAGE + 7)]
)
def test_private_map_is_found_to_the_byte(
    start: int, stop: int, looked_at: bool, path: Path
) -> None:
    tensor = mapped(path)
    if looked_at:
        assert tensor.sum() > 0
    assert found(tensor, start, stop) == Extent(str(path), start, stop - start)


def test_map_offset_is_respected(path: Path) -> None:
    with open(path, "rb") as file:
        part = mmap.mmap(file.fileno(), 2 * PAGE, access=mmap.ACCESS_COPY, offset=3 * PAGE)
    tensor = torch.frombuffer(part, dtype=torch.uint8)
    assert found(tensor, 5, 9) == Extent(str(path), 3 * PAGE + 5, 4)


@pytest.mark.parametrize("at", [0, PAGE - 1, 2 * PAGE, NPAGES * PAGE - 1])
def test_single_written_byte_is_noticed(at: int, path: Path) -> None:
    tensor = mapped(path)
    tensor[at] += 1
    assert found(tensor) is None
    assert found(tensor, at, at + 1) is None
    for page in range(NPAGES):
        begin = page * PAGE
        untouched = page != at // PAGE
        assert (found(tensor, begin, begin + PAGE) is not None) == untouched
    assert path.read_bytes()[at] == at % 256, "the file itself changed"


def test_byte_written_with_its_old_value_is_noticed(path: Path) -> None:
    """Without reading the file, it is indistinguishable from a changed one."""
    tensor = mapped(path)
    tensor[0] = int(tensor[0])
    assert found(tensor) is None


def replace(path: Path) -> None:
    path.with_suffix(".new").write_bytes(path.read_bytes())
    os.replace(path.with_suffix(".new"), path)


def forget(path: Path) -> None:
    path.unlink()


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


@pytest.mark.parametrize("change", [replace, forget, link_elsewhere])
def test_deleted_file_is_not_found(change: Callable[[Path], None], path: Path) -> None:
    tensor = mapped(path)
    space = AddressSpace()
    change(path)
    assert space.extent_at(tensor.data_ptr(), 100) is None
    if change is not link_elsewhere:
        assert found(tensor) is None
    else:
        assert found(tensor) == Extent(str(path.with_suffix(".old")), 0, NPAGES * PAGE)


def test_memory_that_is_no_private_map_is_not_found(path: Path) -> None:
    assert found(torch.zeros(NPAGES * PAGE, dtype=torch.uint8)) is None
    assert found(mapped(path, mmap.MAP_SHARED)) is None
    assert AddressSpace().extent_at(0, 1) is None
    tensor = mapped(path)
    assert AddressSpace().extent_at(tensor.data_ptr(), 0) is None
    assert AddressSpace().extent_at(tensor.data_ptr(), NPAGES * PAGE + 1) is None
    assert AddressSpace().extent_at(tensor.data_ptr() + NPAGES * PAGE - 1, 2) is None


@pytest.mark.parametrize("name", ["two words", " leading", "new\nline", "back\\slash", "ünïcödé"])
def test_files_of_any_name_are_found(name: str, path: Path) -> None:
    place = path.parent / name
    path.rename(place)
    assert found(mapped(place)) == Extent(str(place), 0, NPAGES * PAGE)


def test_file_named_like_a_deleted_one_is_found(path: Path) -> None:
    """The kernel marks removed files this way; a name may end like that, too."""
    place = path.parent / "data (deleted)"
    path.rename(place)
    extent = found(mapped(place))
    assert extent is None or extent == Extent(str(place), 0, NPAGES * PAGE)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENFILE, errno.EIO])
def test_pages_that_cannot_be_checked_are_not_trusted(number: int, path: Path) -> None:
    """Without write tracking, the weights must be stored."""
    tensor = mapped(path)
    assert found(tensor) is not None

    def refuse(name: object, *_: object) -> None:
        if str(name).endswith("pagemap"):
            raise OSError(number, os.strerror(number))

    with before("open", refuse):
        assert found(tensor) is None


# Maps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1), (1, PAGE), (PAGE, PAGE), (5000, 9000)])
def test_map_shows_the_file_and_never_changes_it(offset: int, nbytes: int, path: Path) -> None:
    whole = path.read_bytes()
    view = map_file(str(path), offset, nbytes)
    assert bytes(view) == whole[offset : offset + nbytes]
    view[0] = 255 - view[0]
    assert bytes(view)[1:] == whole[offset + 1 : offset + nbytes]
    assert path.read_bytes() == whole
    again = torch.frombuffer(map_file(str(path), offset, nbytes), dtype=torch.uint8)
    assert found(again) == Extent(str(path), offset, nbytes)


def test_map_follows_no_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(TransferError, match="link"):
        map_file(str(tmp_path / "link"), 0, 1)


# Registering -------------------------------------------------------------------------------------


def weights() -> dict[str, torch.Tensor]:
    return {
        "weight": random_tensor(torch.bfloat16, 64, 65),
        "bias": random_tensor(torch.float32, 33),
        "large": pages(2, 3),
    }


@pytest.fixture
def loaded(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint as `from_pretrained` loads it: every tensor is a map of the file."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(weights(), path)
    tensors = safetensors.torch.load_file(path)
    return {name: tensors[name] for name in weights()}


def files_of(tensors: dict[str, torch.Tensor]) -> set[str | None]:
    """Return the files that the tensors map."""
    space = AddressSpace()
    extents = [
        space.extent_at(t.data_ptr(), t.numel() * t.element_size()) for t in tensors.values()
    ]
    return {extent and extent.path for extent in extents}


def assert_kept(store: TierStore, expected: dict[str, torch.Tensor]) -> None:
    push_out(store, "block")
    before = store.stats().bytes_read
    assert_group(store.get("block"), expected)
    assert store.stats().bytes_read > before


def test_weights_mapped_from_a_file_are_used_in_place(
    loaded: dict[str, torch.Tensor], disk_dir: Path, tmp_path: Path
) -> None:
    assert files_of(loaded) == {str(tmp_path / "model.safetensors")}, "nothing is mapped"
    with open_store(disk_dir) as store:
        before = files_below(disk_dir)
        homes = store.register("block", loaded)
        assert_kept(store, weights())
        assert files_below(disk_dir) == before
    assert_group(homes, weights())
    assert files_of(homes) == {str(tmp_path / "model.safetensors")}


@pytest.mark.parametrize("change", ["one element", "cast", "a copy"])
def test_changed_tensors_alone_are_written(
    change: str, loaded: dict[str, torch.Tensor], disk_dir: Path
) -> None:
    if change == "one element":
        loaded["large"][5] += 1
    elif change == "cast":
        loaded["large"] = loaded["large"].half()
    else:
        loaded["large"] = loaded["large"].clone()
    expected = {name: tensor.clone() for name, tensor in loaded.items()}
    with open_store(disk_dir) as store:
        homes = store.register("block", loaded)
        size = loaded["large"].numel() * loaded["large"].element_size()
        assert size <= store.stats().bytes_written <= size + PAGE
        assert_kept(store, expected)
        assert_group(homes, expected)
        assert {tensor.device.type for tensor in homes.values()} == {"cpu"}
    with open_store(disk_dir) as store:
        again = store.register("block", loaded)
        assert store.stats().bytes_written == 0
        assert_group(again, expected)
        assert_kept(store, expected)


@pytest.mark.parametrize("change", [replace, forget])
def test_weights_of_a_deleted_file_are_written(
    change: Callable[[Path], None],
    loaded: dict[str, torch.Tensor],
    disk_dir: Path,
    tmp_path: Path,
) -> None:
    change(tmp_path / "model.safetensors")
    with open_store(disk_dir) as store:
        homes = store.register("block", loaded)
        assert store.stats().bytes_written > 0
        assert files_of(homes) != {str(tmp_path / "model.safetensors")}
        assert_kept(store, weights())
        assert_group(homes, weights())


def test_host_view_changes_stay_with_their_owner(
    loaded: dict[str, torch.Tensor], disk_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    loaded["bias"] = loaded["bias"] + 1
    with open_store(disk_dir) as store:
        homes = store.register("block", loaded)
        kept = {name: tensor.clone() for name, tensor in homes.items()}
        for tensor in homes.values():
            tensor.view(torch.uint8).zero_()
        assert_kept(store, kept)
    assert file.read_bytes() == raw
    assert stat.S_ISREG(file.stat().st_mode)


def test_equal_content_is_written_once(disk_dir: Path) -> None:
    with open_store(disk_dir) as store:
        for key in ("block", "other", "third"):
            homes = store.register(key, {"x": pages(3, 2)})
            assert_same(homes["x"], pages(3, 2))
        assert 2 * PAGE <= store.stats().bytes_written < 4 * PAGE
