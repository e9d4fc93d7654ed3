"""Sizes as people write them, and the memory that a process may use."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.model.sizes import (
    PAGE,
    available_memory,
    parse_size,
    round_up,
    slot_bytes,
    usable_memory,
)

POWERS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (1, 1),
        (8 * 2**30, 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8GiB", 2**33),
        ("8 gib", 2**33),
        ("  1.5 KB ", 1500),
        ("0.5KiB", 512),
        ("700B", 700),
        ("50%", 500),
        ("100%", 1000),
        ("12.5 %", 125),
        (0.25, 250),
        (1.0, 1000),
    ],
)
def test_size_is_parsed_to_bytes(written: Any, nbytes: int) -> None:
    assert parse_size(written, total=1000) == nbytes


AMBIGUOUS = ["8", "0.5", "1", "8G", "8M", "8Gb/s", "8 giga", "GB", "", "  ", "1e9", "1e9B", "8,5GB"]
IMPOSSIBLE = ["-8GB", "+8GB", "0GB", "0.0001B", "0%", "101%", "nan%", "inf", "NaNGB", "½GB", "٨GB"]


@pytest.mark.parametrize("written", AMBIGUOUS + IMPOSSIBLE)
def test_ambiguous_or_empty_size_raises(written: str) -> None:
    with pytest.raises(ValueError, match=r"write|pass|use"):
        parse_size(written, total=1000)


@pytest.mark.parametrize("written", [0, -1, 0.0, 1.5, -0.5, float("nan"), float("inf"), 1e-9])
def test_number_that_is_no_size_raises(written: float) -> None:
    with pytest.raises(ValueError, match="pass"):
        parse_size(written, total=1000)


@pytest.mark.parametrize("written", [True, False, None, b"8GB", [8], 8 + 0j])
def test_size_of_another_type_raises(written: Any) -> None:
    with pytest.raises(TypeError, match="a size must be an int of bytes"):
        parse_size(written)


@pytest.mark.parametrize("written", ["0", "0GB", "0.0", 0])
def test_size_of_zero_raises(written: Any) -> None:
    with pytest.raises(ValueError, match="it must be more than 0"):
        parse_size(written)


def test_size_error_shows_how_to_write_it() -> None:
    with pytest.raises(ValueError, match="write '8GB' for gigabytes"):
        parse_size("8")


def test_auto_is_accepted_only_where_offered() -> None:
    assert parse_size(" AUTO ", auto=7) == 7
    with pytest.raises(ValueError, match="not supported"):
        parse_size("auto")


def test_share_is_a_fraction_of_usable_memory() -> None:
    assert parse_size("50%") == int(0.5 * usable_memory())


@given(st.integers(1, 2**60), st.sampled_from(sorted(POWERS)), st.randoms())
def test_whole_numbers_are_exact_in_any_letter_case(number: int, unit: str, rnd: Any) -> None:
    written = "".join(rnd.choice([c.lower(), c.upper()]) for c in f"{number}{unit}")
    assert parse_size(written) == number * POWERS[unit]


@given(st.text(max_size=12))
def test_any_text_is_a_positive_size_or_a_value_error(text: str) -> None:
    try:
        nbytes = parse_size(text, total=1000, auto=5)
    except ValueError:
        return
    assert type(nbytes) is int
    assert nbytes > 0


@given(st.integers(0, 2**62), st.integers(1, 2**20))
def test_round_up_is_the_smallest_multiple_not_below(nbytes: int, multiple: int) -> None:
    rounded = round_up(nbytes, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - nbytes < multiple


# Usable memory, in made-up trees ------------------------------------------------------------------

MACHINE = psutil.virtual_memory().total


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_limit_without_cgroups_is_the_machines(tmp_path: Path) -> None:
    assert usable_memory(tmp_path) == MACHINE


@pytest.mark.parametrize(("limit", "usable"), [(5 * PAGE, 5 * PAGE), (2 * MACHINE, MACHINE)])
def test_memory_limit_v2_is_read(tmp_path: Path, limit: int, usable: int) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/job/memory.max", f"{limit}\n")
    assert usable_memory(tmp_path) == usable


def test_memory_limit_v2_tightest_ancestor_binds(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/job/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/memory.max", "40960\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "81920\n")
    assert usable_memory(tmp_path) == 40960


def test_memory_limit_v2_in_a_container_root_is_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "40960\n")
    assert usable_memory(tmp_path) == 40960


def test_memory_limit_v1_reads_the_memory_controller(tmp_path: Path) -> None:
    lines = "12:cpu,cpuacct:/a\n11:hugetlb,memory:/docker/job\n1:name=systemd:/b\n"
    write(tmp_path, "proc/self/cgroup", lines)
    write(tmp_path, "sys/fs/cgroup/memory/docker/job/memory.limit_in_bytes", "40960\n")
    write(tmp_path, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4096\n")
    assert usable_memory(tmp_path) == 40960


def test_memory_limit_v1_unlimited_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "11:memory:/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert usable_memory(tmp_path) == MACHINE


def test_memory_limit_path_outside_the_mount_is_found(tmp_path: Path) -> None:
    """Name a path above the mounted one, as /proc may in a cgroup namespace."""
    write(tmp_path, "proc/self/cgroup", "0::/../../elsewhere\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "40960\n")
    assert usable_memory(tmp_path) == 40960


V1 = "sys/fs/cgroup/memory/job/"
V2 = "sys/fs/cgroup/job/"


def test_available_memory_v1_excludes_other_users(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "11:memory:/job\n")
    write(tmp_path, V1 + "memory.limit_in_bytes", "1000000\n")
    write(tmp_path, V1 + "memory.usage_in_bytes", "700000\n")
    assert available_memory(tmp_path) == 300_000
    stat = "active_file 1\ntotal_inactive_file 50000\ntotal_active_file 7000\ntotal_shmem 9999\n"
    write(tmp_path, V1 + "memory.stat", stat)
    assert available_memory(tmp_path) == 357_000


def test_available_memory_v2_excludes_other_users(tmp_path: Path) -> None:
    """Leave the group above with less than the tightest limit allows."""
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, V2 + "memory.max", "1000000\n")
    write(tmp_path, V2 + "memory.current", "100000\n")
    assert available_memory(tmp_path) == 900_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "2000000\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "1990000\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", "inactive_file 300\nactive_file 4000\nshmem 8\n")
    assert available_memory(tmp_path) == 14_300
    assert usable_memory(tmp_path) == 1_000_000, "the control: a limit is not the free memory"


def test_available_memory_full_group_is_zero(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job\n")
    write(tmp_path, V2 + "memory.max", "1000000\n")
    write(tmp_path, V2 + "memory.current", "1000001\n")
    assert available_memory(tmp_path) == 0


def test_slot_is_hardly_larger_than_its_group() -> None:
    chance = random.Random(0)
    for nbytes in [*range(1, 3 * PAGE, 7), *(chance.randrange(1, 1 << 36) for _ in range(2000))]:
        slot = slot_bytes(nbytes)
        assert slot % PAGE == 0
        assert 0 <= slot - nbytes < max(PAGE, nbytes / 64)
        assert slot_bytes(slot) == slot, "a slot's size must be a slot size"
        assert slot_bytes(max(nbytes - 1, 1)) <= slot


def test_slot_sizes_are_few() -> None:
    """Allow at most 64 slot sizes between two powers of two.

    Below half a megabyte, every multiple of the page; from 16 MiB on, one in eight pages.
    """
    assert len({slot_bytes(nbytes) for nbytes in range(8 << 20, (16 << 20) + 1, PAGE)}) <= 65
    large = range(64 << 20, 65 << 20, PAGE)
    assert len({slot_bytes(nbytes) for nbytes in large}) <= len(large) // 8 + 1
    assert all(slot_bytes(nbytes) - nbytes < 8 * PAGE for nbytes in large)
    assert [slot_bytes(n * PAGE) for n in range(1, 129)] == [n * PAGE for n in range(1, 129)]
