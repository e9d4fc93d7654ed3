"""Faults that the system itself makes: full disks, limits, read-only mounts, interrupted calls."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.faults.facilities import mounted, program, run
from tests.faults.scenarios import SCENARIOS, World, tensors_of, value_of
from tests.faults.sweeping import ONE_IN_THREE, Sweep, no_fault
from tests.helpers.processes import output_of
from tests.lanes import by_lane
from tests.store.helpers import files_below
from tierstore import TierStore

SYNCED = [name for name in SCENARIOS if name not in ("opening a new directory",)]
PAGE = 4096

# A full disk --------------------------------------------------------------------------------------


def remount(at: Path, options: str) -> None:
    run(program("mount"), "-o", f"remount,{options}", at)


@contextmanager
def tmpfs(at: Path) -> Iterator[Path]:
    with mounted("-t", "tmpfs", "-o", "size=64m,nr_inodes=4096", "tmpfs", at=at) as directory:
        yield directory


def room_left(at: Path, what: str, spare: int) -> Callable[[World], object]:
    """Leave this many pages, or names, free."""

    @contextmanager
    def full(world: World) -> Iterator[int]:
        status = os.statvfs(at)
        if what == "pages":
            used = (status.f_blocks - status.f_bfree) * status.f_frsize // PAGE
            remount(at, f"size={max(used + spare, 1) * PAGE}")
        else:
            remount(at, f"nr_inodes={status.f_files - status.f_ffree + spare}")
        try:
            yield len(world.errors)
        finally:
            remount(at, "size=64m,nr_inodes=4096")

    return full


@ONE_IN_THREE
@pytest.mark.needs("root", "tmpfs")
@pytest.mark.parametrize("name", SCENARIOS)
def test_full_disk_raises_and_loses_nothing(name: str, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small") as at:
        sweep = Sweep(name, at)
        for spare in range(0, 12, by_lane(11, 5, 1)):
            sweep.surely_meets(f"{spare} pages left", room_left(at, "pages", spare))
        for spare in range(0, 6, by_lane(4, 4, 1)):
            sweep.surely_meets(f"{spare} names left", room_left(at, "names", spare))


# Limits of the process ----------------------------------------------------------------------------


def limited(kind: int, value: Callable[[], int]) -> Callable[[World], object]:
    """Lower a limit of the process inside the block."""

    @contextmanager
    def lower(world: World) -> Iterator[None]:
        soft, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (value(), hard))
        try:
            yield
        finally:
            resource.setrlimit(kind, (soft, hard))

    return lower


def next_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


@ONE_IN_THREE
@pytest.mark.needs("limits")
@pytest.mark.parametrize("name", SCENARIOS)
def test_process_out_of_descriptors_raises(name: str, tmp_path: Path) -> None:
    sweep = Sweep(name, tmp_path)
    sweep.surely_meets("nothing", no_fault)  # so that late imports are done
    for spare in range(0, 12, by_lane(8, 4, 1)):
        lower = limited(resource.RLIMIT_NOFILE, lambda spare=spare: next_descriptor() + spare)
        sweep.surely_meets(f"{spare} descriptors left", lower)


@ONE_IN_THREE
@pytest.mark.needs("limits")
@pytest.mark.parametrize("name", SYNCED)
def test_file_size_limit_raises(name: str, tmp_path: Path) -> None:
    sweep = Sweep(name, tmp_path)
    for size in range(0, 6 * PAGE, by_lane(3 * PAGE, 3 * PAGE, 1000)):
        lower = limited(resource.RLIMIT_FSIZE, lambda size=size: size)
        sweep.surely_meets(f"files of up to {size} bytes", lower)


FEW = """
import resource, sys, torch
from tests.helpers.engine import mutable
from tierstore import TierStore
from tierstore.model.tiers import HostAccess
store = TierStore("64MB", sys.argv[1], device="cpu")
kept = []
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
for number in range(250):
    kept.append(store.register(f"w{number}", {"a": torch.full((2000,), float(number))}))
    mutable(store).create(f"s{number}", {"a": torch.full((1000,), float(number))})
    mutable(store).move_to_disk([f"s{number}"])
    kept.append(mutable(store).view_on_disk(f"s{number}"))
for number in range(250):
    assert bool((kept[2 * number]["a"] == number).all())
    assert bool((kept[2 * number + 1]["a"] == number).all())
    assert bool((store.get(f"w{number}")["a"] == number).all())
store.close()
"""


@pytest.mark.full("binds hundreds of groups; test_readable_again.py meets the same limit")
@pytest.mark.needs("limits")
def test_host_views_need_no_descriptors(quick_dir: Path) -> None:
    """Bind five hundred groups at once, with 200 descriptors."""
    output_of("-c", FEW, quick_dir / "store", timeout=300)


# Read-only places ---------------------------------------------------------------------------------


@pytest.mark.needs("root", "read-only-mounts")
@pytest.mark.parametrize("name", ["opening a new directory", "opening one with groups"])
def test_store_on_a_read_only_mount_raises(name: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    with mounted("--bind", tmp_path / "real", at=tmp_path / "mounted") as at:

        @contextmanager
        def read_only(world: World) -> Iterator[None]:
            remount(at, "ro,bind")
            try:
                yield
            finally:
                remount(at, "rw,bind")
            assert "Read-only file system" in world.errors[0]

        Sweep(name, at).surely_meets("a read-only mount", read_only)


@pytest.mark.needs("root", "read-only-mounts")
def test_checkpoint_on_a_read_only_mount_works(tmp_path: Path) -> None:
    sweep = Sweep("reading a checkpoint", tmp_path)

    @contextmanager
    def read_only(world: World) -> Iterator[None]:
        model = world.place / "model"
        with mounted("--bind", model, at=model):
            remount(model, "ro,bind")
            yield

    sweep.surely_meets("a read-only mount", read_only, untold=True)


@ONE_IN_THREE
@pytest.mark.needs("root", "immutable-files")
@pytest.mark.parametrize("name", ["replacing", "discarding", "closing with unsaved groups"])
@pytest.mark.parametrize("what", ["objects", "tmp", "objects/*", "objects/*/*"])
def test_immutable_files_raise(name: str, what: str, tmp_path: Path) -> None:
    chattr = program("chattr")

    @contextmanager
    def immutable(world: World) -> Iterator[None]:
        paths = sorted(world.disk_dir.glob(what))
        for path in paths:
            run(chattr, "+i", path)
        try:
            yield
        finally:
            for path in paths:
                run(chattr, "-i", path)

    Sweep(name, tmp_path).surely_meets(f"{what} is immutable", immutable)


@ONE_IN_THREE
@pytest.mark.needs("root", "overlay")
@pytest.mark.parametrize("name", SCENARIOS)
def test_store_on_an_overlay_works(name: str, tmp_path: Path) -> None:
    for layer in ("lower", "upper", "work"):
        (tmp_path / layer).mkdir()
    layers = ",".join(f"{layer}dir={tmp_path / layer}" for layer in ("lower", "upper", "work"))
    with mounted("-t", "overlay", "-o", layers, "overlay", at=tmp_path / "mounted") as at:
        Sweep(name, at).surely_meets("nothing", no_fault, untold=True)


@pytest.mark.needs("root", "overlay")
def test_overlay_lower_groups_are_replaced_and_discarded(tmp_path: Path) -> None:
    with TierStore("1MB", tmp_path / "lower" / "store", device="cpu") as store:
        store.put("a", tensors_of(1))
        store.put("b", tensors_of(2))
    before = files_below(tmp_path / "lower")
    for layer in ("upper", "work"):
        (tmp_path / layer).mkdir()
    layers = ",".join(f"{layer}dir={tmp_path / layer}" for layer in ("lower", "upper", "work"))
    with mounted("-t", "overlay", "-o", layers, "overlay", at=tmp_path / "mounted") as at:
        with TierStore("1MB", at / "store", device="cpu") as store:
            assert value_of(store.get("a")) == 1
            store.put("a", tensors_of(3))
            store.discard("b")
        with TierStore("1MB", at / "store", device="cpu") as store:
            assert {key: value_of(store.get(key)) for key in store} == {"a": 3}
    assert files_below(tmp_path / "lower") == before


# System calls that the kernel makes fail ----------------------------------------------------------

WORK = """
import sys, torch
from tierstore import TierStore
with TierStore(204800, sys.argv[1], device="cpu") as store:
    for number in range(3):
        store.put(f"k{number}", torch.full((5000,), float(number)))
    store.flush()
    store.put("filler", torch.zeros(50000), durable=False)
    store.discard("filler")
    for number in range(3):
        assert bool((store.get(f"k{number}") == number).all())
"""


def traced(disk_dir: Path, calls: str, fault: str) -> subprocess.CompletedProcess[str]:
    command = [program("strace"), "-f", "-qq", "--seccomp-bpf", "-o", os.devnull]
    command += ["-e", f"trace={calls}", "-e", f"inject={calls}:{fault}"]
    command += [sys.executable, "-c", WORK, str(disk_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


INTERRUPTED = "preadv,preadv2,pwrite64,fsync,fallocate,ftruncate"


@pytest.mark.full("a process under strace; every lane has one whose reads fail")
@pytest.mark.needs("strace")
def test_interrupted_calls_are_repeated(disk_dir: Path) -> None:
    """Interrupt every third call."""
    done = traced(disk_dir, INTERRUPTED, "error=EINTR:when=2+3")
    assert done.returncode == 0, done.stderr
    with TierStore("1MB", disk_dir, device="cpu") as store:
        found = {key: store.get(key) for key in store}
    assert found.keys() == {"k0", "k1", "k2"}
    for number in range(3):
        assert torch.equal(found[f"k{number}"], torch.full((5000,), float(number)))


@pytest.mark.full("a separate process for each", keep=["preadv,preadv2-error=EIO-TransferError"])
@pytest.mark.needs("strace")
@pytest.mark.parametrize(
    ("call", "fault", "told"),
    [
        ("fallocate", "error=EDQUOT", "DiskFullError"),
        ("preadv,preadv2", "error=EIO", "TransferError"),
    ],
)
def test_failing_system_calls_raise(call: str, fault: str, told: str, disk_dir: Path) -> None:
    """Check the control, too: injected errors arrive."""
    done = traced(disk_dir, call, fault)
    assert done.returncode == 1
    assert told in done.stderr.splitlines()[-1], done.stderr
