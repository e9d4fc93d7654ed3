"""The pretend accelerator keeps its promises; other tests rely on it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.device import pretend
from tests.helpers.processes import run_python
from tierstore.system import mapping
from tierstore.tiers.arena import RegisteredArena
from tierstore.tiers.pinned import RegisteredMemory

pytestmark = [
    pytest.mark.pretend_only("itself"),
    pytest.mark.full("kernels and devices are tested alike", keep="a third"),
]


@pytest.fixture
def device() -> Iterator[ModuleType]:
    """Return the device module, with empty queue and cache, and counters at zero.

    It runs nothing before a caller waits for it.
    """
    module = pretend.load()
    module.set_slowness(None)
    gc.collect()
    for index in range(2):
        module.synchronize(index)
        module.set_memory_limit(None, index)
    module.empty_cache()
    module.reset_counters()
    module.reset_peak_memory_stats()
    module.reset_peak_pinned()
    yield module
    module.start_over()
    for index in range(2):
        module.synchronize(index)
        module.set_memory_limit(None, index)
    module.set_pinned_limit(None)
    module.set_registered_limit(None)
    module.fail_registrations(0)


@pytest.fixture
def side(device: ModuleType) -> torch.Stream:
    return torch.Stream(device="pretend:0")


def pinned(*size: int) -> torch.Tensor:
    return torch.randn(*size).pin_memory()


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.cpu().view(torch.uint8) == 0xFF).all())


# ------------------------------------------------------------- torch integration


def test_torch_reports_two_devices(device: ModuleType) -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("pretend")
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module("pretend") is device
    assert torch.zeros(1, device="pretend").device == torch.device("pretend:0")


def test_current_device_can_be_changed(device: ModuleType) -> None:
    with torch.accelerator.device_index(1):
        assert torch.zeros(1, device="pretend").device == torch.device("pretend:1")
        assert device.current_device() == 1
    assert device.current_device() == 0
    device.set_device("pretend:1")
    assert torch.zeros(1, device="pretend").get_device() == 1
    device.set_device(0)


def test_third_device_raises(device: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no device 2"):
        torch.zeros(1, device="pretend:2")


MISMATCHES: list[Callable[[torch.Tensor, torch.Tensor], object]] = [
    lambda a, b: a + b,
    lambda a, b: a @ b,
    lambda a, b: functional.linear(a, b),
    lambda a, b: torch.cat([a, b]),
    lambda a, b: a.add_(b),
    lambda a, b: functional.embedding(torch.zeros(1, dtype=torch.long, device=a.device), b),
    lambda a, b: functional.conv1d(a[None], b[None]),
    lambda a, b: functional.layer_norm(a, (4,), b[0], b[1]),
    lambda a, b: functional.scaled_dot_product_attention(a[None], b[None], b[None]),
    lambda a, b: torch.where(a > 0, a, b),
]


@pytest.mark.parametrize("operation", range(len(MISMATCHES)))
@pytest.mark.parametrize(
    ("left", "right"),
    [("cpu", "pretend"), ("pretend", "cpu"), ("pretend:0", "pretend:1")],
)
def test_mixed_devices_raise(device: ModuleType, operation: int, left: str, right: str) -> None:
    a, b = torch.randn(4, 4).to(left), torch.randn(4, 4).to(right)
    with pytest.raises(RuntimeError, match="same device"):
        MISMATCHES[operation](a, b)


def test_cpu_scalars_and_indices_are_allowed(device: ModuleType) -> None:
    x = torch.randn(4, 4)
    y = x.to("pretend")
    assert torch.equal((y * torch.tensor(2.0)).cpu(), x * 2)
    index = torch.tensor([2, 0])
    assert torch.equal(y[index].cpu(), x[index])
    assert torch.equal(y[index.to("pretend")].cpu(), x[index])
    with pytest.raises(RuntimeError, match="same device"):
        x[index.to("pretend")]
    with pytest.raises(RuntimeError, match="same device"):
        y[index] = x[index]


# ---------------------------------------------------------------------- memory


def test_bytes_and_peak_are_exact_for_each_device(device: ModuleType) -> None:
    before = [device.memory_allocated(0), device.memory_allocated(1)]
    a = torch.empty(1001, dtype=torch.uint8, device="pretend:0")
    b = torch.empty(77, device="pretend:1")
    assert device.memory_allocated(0) - before[0] == 1001
    assert device.memory_allocated(1) - before[1] == 308
    c = a + 1
    del a, c
    assert device.memory_allocated(0) == before[0]
    assert device.max_memory_allocated(0) - before[0] == 2002
    assert torch.accelerator.max_memory_allocated(1) - before[1] == 308
    device.reset_peak_memory_stats()
    assert device.max_memory_allocated(0) == before[0]
    del b


def test_operations_take_no_hidden_device_memory(device: ModuleType) -> None:
    x = torch.randn(64, 64, device="pretend")
    device.reset_peak_memory_stats()
    before = device.memory_allocated()
    y = x @ x
    assert device.max_memory_allocated() - before == y.nbytes
    y += x
    y.t()[3:].mul_(2)
    assert device.max_memory_allocated() - before == y.nbytes


def test_memory_limit_raises_out_of_memory(device: ModuleType) -> None:
    used = device.memory_allocated(0)
    device.set_memory_limit(used + 4000, 0)
    a = torch.empty(1000, device="pretend:0")
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1, device="pretend:0")
    torch.empty(5000, device="pretend:1")
    assert device.mem_get_info(0) == (0, used + 4000)
    del a
    assert torch.empty(1000, device="pretend:0").numel() == 1000


def test_new_and_freed_blocks_are_poisoned(device: ModuleType) -> None:
    assert torch.empty(8, device="pretend").isnan().all()
    assert torch.empty(8, pin_memory=True).isnan().all()


def test_block_freed_before_a_side_stream_reads_is_poison(
    device: ModuleType, side: torch.Stream
) -> None:
    source = torch.randn(8, device="pretend")
    device.synchronize()
    target = torch.zeros(8).pin_memory()
    with side:
        target.copy_(source, non_blocking=True)
    del source  # no record_stream: its memory may be reused
    side.synchronize()
    assert target.isnan().all()
    assert device.stale_copies() == 1


def test_record_stream_keeps_a_freed_block(device: ModuleType, side: torch.Stream) -> None:
    value = torch.randn(8)
    source = value.to("pretend")
    target = torch.zeros(8).pin_memory()
    with side:
        target.copy_(source, non_blocking=True)
    source.record_stream(side)
    allocated, active = device.memory_allocated(), device.memory_active()
    del source
    assert device.memory_allocated() == allocated - 32
    assert device.memory_active() == active
    side.synchronize()
    assert device.memory_active() == active - 32
    assert torch.equal(target, value)
    assert device.stale_copies() == 0


def test_recorded_block_is_awaited_before_out_of_memory(
    device: ModuleType, side: torch.Stream
) -> None:
    source = torch.randn(1000, device="pretend")
    target = torch.zeros(1000).pin_memory()
    with side:
        target.copy_(source, non_blocking=True)
    source.record_stream(side)
    device.set_memory_limit(device.memory_allocated() + 100)
    del source
    again = torch.empty(1000, device="pretend")
    assert side.query()
    assert again.device.type == "pretend"


def test_queued_copy_into_a_freed_block_is_harmless(device: ModuleType, side: torch.Stream) -> None:
    host = pinned(1000)
    with side:
        target = host.to("pretend", non_blocking=True)
    del target, host
    side.synchronize()
    assert device.memory_active() == device.memory_allocated()


def test_freed_memory_is_reused_by_the_same_stream(device: ModuleType) -> None:
    value = torch.randn(1000)
    first = value.to("pretend")
    doubled, place = first * 2, first.data_ptr()
    reserved = device.memory_reserved()
    del first  # the kernel that reads it has not run
    second = torch.ones(1000, device="pretend")
    assert second.data_ptr() == place
    assert device.memory_reserved() == reserved
    assert torch.equal(doubled.cpu(), value * 2)
    assert (second == 1).all()


def test_freed_memory_is_not_reused_by_another_stream(
    device: ModuleType, side: torch.Stream
) -> None:
    first = torch.empty(1000, device="pretend")
    place = first.data_ptr()
    del first
    with side:
        other = torch.empty(1000, device="pretend")
    assert other.data_ptr() != place
    assert device.memory_reserved() == 8000
    assert torch.empty(900, device="pretend").data_ptr() == place
    assert torch.empty(500, device="pretend").data_ptr() != place  # would waste too much


@pytest.mark.parametrize("recorded", (False, True))
def test_memory_read_by_another_stream_is_kept_if_recorded(
    recorded: bool, device: ModuleType, side: torch.Stream
) -> None:
    value = torch.randn(1000)
    source, host = value.to("pretend"), torch.zeros(1000).pin_memory()
    place = source.data_ptr()
    with side:
        host.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(side)
    del source
    again = torch.full((1000,), 7.0, device="pretend")
    assert (again.data_ptr() == place) != recorded
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert torch.equal(host, value if recorded else torch.full((1000,), 7.0))
    assert torch.empty(1000, device="pretend").data_ptr() == place or not recorded


def test_cached_memory_is_released_before_out_of_memory(device: ModuleType) -> None:
    device.set_memory_limit(8000)
    first, second = torch.empty(1000, device="pretend"), torch.empty(500, device="pretend")
    del first
    assert (device.memory_allocated(), device.memory_reserved()) == (2000, 6000)
    third = torch.empty(1500, device="pretend")  # requires releasing the cache
    assert (device.memory_allocated(), device.memory_reserved()) == (8000, 8000)
    del second, third
    device.reset_peak_memory_stats()
    assert device.max_memory_reserved() == 8000
    device.empty_cache()
    assert (device.memory_reserved(), device.max_memory_reserved()) == (0, 8000)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2001, device="pretend")
    assert torch.empty(2000, device="pretend").numel() == 2000


def test_cached_memory_with_unfinished_work_is_awaited(device: ModuleType) -> None:
    device.set_memory_limit(8000)
    first = torch.ones(2000, device="pretend")
    del first
    assert not torch.accelerator.current_stream().query()
    assert torch.empty(1000, device="pretend").numel() == 1000
    assert torch.accelerator.current_stream().query()


# ---------------------------------------------------------------------- pinned


def test_pinned_memory_is_exact_aligned_and_counted(device: ModuleType) -> None:
    before = device.pinned_bytes()
    a = torch.empty(1001, dtype=torch.uint8, pin_memory=True)
    b = torch.randn(77).pin_memory()
    assert a.is_pinned()
    assert b[3:].is_pinned()
    assert not torch.randn(3).is_pinned()
    assert not torch.randn(3, device="pretend").is_pinned()
    assert a.data_ptr() % 4096 == 0
    assert b.data_ptr() % 4096 == 0
    assert device.pinned_bytes() - before == 1001 + 308
    del a
    assert device.pinned_bytes() - before == 308
    assert device.peak_pinned_bytes() - before == 1001 + 308
    device.reset_peak_pinned()
    assert device.peak_pinned_bytes() - before == 308
    del b


def test_pinned_limit_raises(device: ModuleType) -> None:
    device.set_pinned_limit(device.pinned_bytes() + 100)
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(101, dtype=torch.uint8, pin_memory=True)


def test_memory_of_the_caller_can_be_registered(device: ModuleType, side: torch.Stream) -> None:
    slab = torch.randn(2048)
    before = device.pinned_bytes()
    device.register_host(slab.data_ptr(), slab.nbytes)
    assert slab[100:].is_pinned()
    assert device.pinned_bytes() - before == slab.nbytes
    with side:
        copy = slab.to("pretend", non_blocking=True)
    assert copy.isnan().all()
    device.unregister_host(slab.data_ptr())
    assert not slab.is_pinned()
    assert device.pinned_bytes() == before
    assert torch.equal(copy.cpu(), slab)
    with pytest.raises(RuntimeError):
        device.unregister_host(slab.data_ptr())


def test_queued_copy_keeps_its_pinned_source(device: ModuleType, side: torch.Stream) -> None:
    value = torch.randn(16)
    before = device.pinned_bytes()
    with side:
        target = value.pin_memory().to("pretend", non_blocking=True)
    assert device.pinned_bytes() - before == 64
    side.synchronize()
    assert device.pinned_bytes() == before
    assert torch.equal(target.cpu(), value)


def test_failed_registration_raises_and_is_counted(device: ModuleType) -> None:
    slab = torch.zeros(4096, dtype=torch.uint8)
    place, before = slab.data_ptr(), device.pinned_bytes()
    device.set_registered_limit(4095)
    with pytest.raises(RuntimeError, match="out of memory"):
        device.register_host(place, 4096)
    device.set_registered_limit(None)
    device.fail_registrations(1)
    assert device.cudart().cudaHostRegister(place, 4096, 0) == 2
    assert (device.registrations(), device.registered_bytes()) == (2, 0)
    device.register_host(place, 4096)
    assert (device.registrations(), device.registered_bytes()) == (3, 4096)
    assert device.pinned_bytes() == before + 4096
    assert device.cudart().cudaHostRegister(place + 100, 10, 0) == 712
    assert device.cudart().cudaHostRegister(place - 10, 20, 0) == 712
    device.unregister_host(place)
    assert device.cudart().cudaHostUnregister(place) == 713
    assert (device.registered_bytes(), device.unregistered_in_use()) == (0, 0)


def test_unregistering_memory_in_use_is_counted(device: ModuleType) -> None:
    slab = torch.randn(1024)
    device.register_host(slab.data_ptr(), slab.nbytes)
    moved = slab.to("pretend", non_blocking=True)
    device.unregister_host(slab.data_ptr())
    assert device.unregistered_in_use() == 1
    assert torch.equal(moved.cpu(), slab)


CHANGES = {
    "munmap": lambda libc, address: libc.munmap(address, 8192),
    "mmap": lambda libc, address: libc.mmap(address, 8192, *ANONYMOUS, -1, 0),
    "mremap": lambda libc, address: libc.mremap(address, 8192, 4096, 0, None),
    "madvise": lambda libc, address: libc.madvise(address, 8192, mmap.MADV_DONTNEED),
}
ANONYMOUS = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10)


@pytest.mark.parametrize("call", CHANGES)
def test_registered_memory_unmapped_is_detected(
    call: str, device: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    """The device continues with the pages that it locked, as a GPU was seen to do."""
    if not device.watches_maps():
        pytest.skip("maps are watched on x86-64 with glibc")
    libc = mapping.libc
    address = libc.mmap(None, 8192, ANONYMOUS[0], ANONYMOUS[1] & ~0x10, -1, 0)
    memory = torch.frombuffer((ctypes.c_uint8 * 8192).from_address(address), dtype=torch.uint8)
    memory.fill_(7)
    device.register_host(address, 8192)
    CHANGES[call](libc, address)
    assert f"{call} of 8192 bytes" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="where registered memory is"):
        device.synchronize()
    libc.mmap(address, 8192, *ANONYMOUS, -1, 0)
    memory.fill_(9)
    assert memory.is_pinned()
    assert (memory.to("pretend").cpu() == 7).all()
    assert device.cudart().cudaHostRegister(address, 4096, 0) == 712
    with pytest.raises(RuntimeError, match="launched after error 712"):
        torch.ones(1, device="pretend")
    assert device.forget_unmapped() == 1
    assert (memory.to("pretend").cpu() == 9).all(), "the control: it is ordinary memory"
    libc.munmap(address, 8192)
    assert capfd.readouterr().err == ""


def test_arena_registers_its_memory(device: ModuleType) -> None:
    """A path that otherwise only CUDA takes."""
    arena = RegisteredArena(3 * 4096, RegisteredMemory(device))
    slot = arena.take(2 * 4096)
    memory = arena.fill(slot)
    assert memory.is_pinned()
    assert (device.registrations(), device.registered_bytes()) == (1, 2 * 4096)
    memory.fill_(3)
    moved = memory.to("pretend", non_blocking=True)
    slot.pending.append(torch.accelerator.current_stream().record_event())
    arena.release(slot)
    device.fail_registrations(1)
    with pytest.warns(RuntimeWarning, match="could not page-lock"):
        del memory
        memory = arena.fill(arena.take(3 * 4096))  # the other slot must go first
    assert not memory.is_pinned()
    assert (device.registered_bytes(), device.unregistered_in_use()) == (0, 0)
    assert (moved == 3).all()
    arena.close()


# --------------------------------------------------------------------- streams


def test_copy_not_waited_for_has_not_run(device: ModuleType, side: torch.Stream) -> None:
    host = pinned(16)
    with side:
        target = host.to("pretend", non_blocking=True)
    assert not side.query()
    assert target.isnan().all()
    assert not side.query()
    torch.accelerator.current_stream().wait_stream(side)
    assert torch.equal(target.cpu(), host)
    assert side.query()


def test_wait_event_runs_only_work_before_the_event(device: ModuleType, side: torch.Stream) -> None:
    host = pinned(16)
    with side:
        first = host.to("pretend", non_blocking=True)
        event = side.record_event()
        second = host.to("pretend", non_blocking=True)
    assert not event.query()
    torch.accelerator.current_stream().wait_event(event)
    assert not event.query()  # a query or a queued wait runs nothing
    assert torch.equal(first.cpu(), host)
    assert event.query()
    assert second.isnan().all()
    side.synchronize()
    assert torch.equal(second.cpu(), host)


def test_event_synchronize_and_reuse_work(device: ModuleType, side: torch.Stream) -> None:
    event = torch.Event(device="pretend:0")
    assert event.query()
    host = torch.zeros(16).pin_memory()
    for value in (1.0, 2.0):
        source = torch.full((16,), value, device="pretend")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            host.copy_(source, non_blocking=True)
            event.record(side)
        assert not event.query()
        assert not (host == value).any()
        event.synchronize()
        assert event.query()
        assert (host == value).all()


def test_finished_wait_leaves_nothing_queued(device: ModuleType, side: torch.Stream) -> None:
    host = pinned(16)
    with side:
        host.to("pretend", non_blocking=True)
        event = side.record_event()
    current = torch.accelerator.current_stream()
    current.wait_event(event)
    after = current.record_event()
    assert not current.query()
    assert not after.query()
    event.synchronize()
    assert after.query()
    assert current.query()


def test_waits_reach_through_several_streams(device: ModuleType) -> None:
    streams = [torch.Stream(device="pretend:0") for _ in range(3)]
    host = pinned(16)
    with streams[0]:
        target = host.to("pretend", non_blocking=True)
    for earlier, later in pairwise(streams):
        later.wait_stream(earlier)
    assert not streams[2].query()
    torch.accelerator.current_stream().wait_stream(streams[2])
    assert torch.equal(target.cpu(), host)


def test_streams_that_wait_for_each_other_lose_no_wait(device: ModuleType) -> None:
    first, second, third = (torch.Stream(device="pretend:0") for _ in range(3))
    place, host = torch.zeros(16, device="pretend"), torch.zeros(16).pin_memory()
    device.synchronize()
    with first:
        place.fill_(1)
    begun = first.record_event()
    second.wait_event(begun)
    read_mark = second.record_event()
    third.wait_event(begun)
    with third:
        host.copy_(place, non_blocking=True)
    first.wait_event(read_mark)
    first.wait_stream(third)
    with first:
        place.fill_(2)
    second.wait_stream(first)
    second.synchronize()
    third.synchronize()
    assert (host == 1).all()


def test_operation_runs_its_own_stream_first(device: ModuleType, side: torch.Stream) -> None:
    host = pinned(16)
    target = host.to("pretend", non_blocking=True)
    with side:
        other = host.to("pretend", non_blocking=True)
        assert target.isnan().all()  # the default stream has not run
    assert torch.equal((target + 0).cpu(), host)
    with side:
        assert torch.equal(other.cpu(), host)


def test_host_buffer_reused_too_early_corrupts(device: ModuleType, side: torch.Stream) -> None:
    host = pinned(16)
    with side:
        target = host.to("pretend", non_blocking=True)
    host.fill_(7)
    side.synchronize()
    assert (target == 7).all()


def test_download_is_lazy(device: ModuleType) -> None:
    value = torch.randn(16)
    host = value.to("pretend").to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert host.isnan().all()
    device.synchronize()
    assert torch.equal(host, value)


def test_copies_that_cuda_would_stage_run_at_once(device: ModuleType) -> None:
    value = torch.randn(16)
    assert torch.equal(value.to("pretend", non_blocking=True).cpu(), value)
    assert torch.accelerator.current_stream().query()
    grid = torch.randn(4, 4).pin_memory()
    moved = grid.t().to("pretend", torch.float16, non_blocking=True)
    assert torch.accelerator.current_stream().query()
    assert torch.equal(moved.cpu(), grid.t().half())


def test_copy_that_converts_on_the_device_is_late(device: ModuleType) -> None:
    value = pinned(16)
    halves = value.to("pretend", torch.float16, non_blocking=True)
    assert not torch.accelerator.current_stream().query()
    assert torch.equal(halves.cpu(), value.half())


def test_blocking_copies_come_after_their_stream(device: ModuleType) -> None:
    target = torch.zeros(4, device="pretend")
    target.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    target.copy_(torch.full((4,), 2.0))
    assert (target == 2).all()


def test_streams_are_current_for_one_thread(device: ModuleType, side: torch.Stream) -> None:
    seen = []
    with side:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream(0) == side
    assert torch.accelerator.current_stream() == seen[0] != side
    torch.accelerator.set_stream(side)
    assert torch.accelerator.current_stream("pretend:0") == side
    torch.accelerator.set_stream(seen[0])


def test_threads_copy_and_compute_concurrently(device: ModuleType) -> None:
    before = [device.memory_allocated(0), device.memory_allocated(1), device.pinned_bytes()]
    wrong = []

    def work(place: str) -> None:
        stream = torch.Stream(device=place)
        for _ in range(50):
            value = torch.randn(100, 10)
            with stream:
                moved = value.pin_memory().to(place, non_blocking=True)
                event = stream.record_event()
            torch.accelerator.current_stream(place).wait_event(event)
            back = (moved @ moved.t()).to("cpu", non_blocking=True)
            torch.accelerator.current_stream(place).synchronize()
            if not torch.equal(back, value @ value.t()):
                wrong.append(place)

    threads = [threading.Thread(target=work, args=(f"pretend:{i % 2}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for index in range(2):
        device.synchronize(index)
    after = [device.memory_allocated(0), device.memory_allocated(1), device.pinned_bytes()]
    assert after == before


def test_devices_have_separate_streams(device: ModuleType) -> None:
    stream = torch.Stream(device="pretend:1")
    host = pinned(16)
    with stream:
        assert device.current_device() == 1
        target = host.to("pretend:1", non_blocking=True)
    device.synchronize(0)
    assert not stream.query()
    torch.accelerator.synchronize(1)
    assert torch.equal(target.cpu(), host)


def test_copy_counters_are_exact(device: ModuleType) -> None:
    x = torch.randn(10, 10)
    y = x.to("pretend")
    y[2:4].copy_(x[2:4])
    assert device.copied("h2d") == 400 + 80
    (y @ y).relu_().sum()
    assert device.copied("d2h") == 0
    y.cpu()
    assert device.copied("d2h") == 400
    y.to("pretend:1")
    assert device.copied("d2d") == 400
    device.reset_counters()
    assert [device.copied(kind) for kind in pretend.KINDS] == [0, 0, 0]


# ---------------------------------------------------------------- work that is late


def test_kernel_runs_later_than_its_call(device: ModuleType, side: torch.Stream) -> None:
    x = torch.ones(16, device="pretend")
    device.synchronize()
    host = torch.zeros(16).pin_memory()
    doubled = x * 2
    event = torch.accelerator.current_stream().record_event()
    with side:
        host.copy_(doubled, non_blocking=True)
    side.synchronize()
    assert host.isnan().all()
    assert not event.query()
    side.wait_event(event)
    with side:
        host.copy_(doubled, non_blocking=True)
    side.synchronize()
    assert (host == 2).all()
    assert event.query()


@pytest.mark.parametrize("waits", (False, True))
def test_write_without_waiting_for_a_reader_corrupts(
    waits: bool, device: ModuleType, side: torch.Stream
) -> None:
    source, host = torch.ones(16, device="pretend"), torch.zeros(16).pin_memory()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host.copy_(source, non_blocking=True)
        read = side.record_event()
    if waits:
        torch.accelerator.current_stream().wait_event(read)
    source.fill_(2)
    torch.accelerator.current_stream().synchronize()
    side.synchronize()
    assert (host == (1 if waits else 2)).all()


def test_host_runs_ahead(device: ModuleType) -> None:
    x = torch.ones(16, device="pretend")
    depths = []
    for slowness in (0, 1, 8, None):
        device.synchronize()
        device.seed(1)
        device.set_slowness(slowness)
        for _ in range(200):
            x.add_(1)
        depths.append(device.queued_tasks())
    assert depths[0] == 0
    assert depths == sorted(depths)
    assert depths[1] < 50 < 150 < depths[2] < depths[3] == 200
    assert (x == 801).all()


def test_host_with_a_full_queue_waits(device: ModuleType) -> None:
    x = torch.zeros(1, device="pretend")
    for _ in range(1500):
        x.add_(1)
    assert device.queued_tasks() == 1024
    assert x.item() == 1500


def test_repeated_queries_end(device: ModuleType, side: torch.Stream) -> None:
    device.set_slowness()
    for _ in range(20):
        with side:
            pinned(16).to("pretend", non_blocking=True)
        event = side.record_event()
        asked = next(i for i in range(1000) if event.query())
        assert asked < 1000


def race(device: ModuleType, seed: int) -> list[float]:
    """Race sixteen times: one stream adds to a counter, another reads it, without waits."""
    first, second = (torch.Stream(device="pretend:0") for _ in range(2))
    device.set_slowness(None)
    counter, host = torch.zeros(1, device="pretend"), torch.zeros(16).pin_memory()
    device.synchronize()
    device.seed(seed)
    device.set_slowness(2)
    for i in range(16):
        with first:
            counter.add_(1)
        with second:
            host[i : i + 1].copy_(counter, non_blocking=True)
    device.synchronize()
    return host.tolist()


def test_seed_decides_a_race(device: ModuleType) -> None:
    found = [race(device, seed) for seed in range(10)]
    torch.Stream(device="pretend:0")  # moves the pool of streams to another position
    assert found == [race(device, seed) for seed in range(10)]
    assert len({tuple(values) for values in found}) > 5
    assert all(earlier <= later for values in found for earlier, later in pairwise(values))


def run_at_random(seed: int, waits: bool) -> list[list[float]]:
    """Run kernels and copies on four streams, with or without the waits that they need."""
    choose = random.Random(seed)
    streams = [torch.Stream(device="pretend:0") for _ in range(4)]
    tensors = [torch.full((4,), float(i), device="pretend") for i in range(5)]
    hosts = [torch.full((4,), float(i)).pin_memory() for i in range(3)]
    pretend.synchronize()
    last: list[list[torch.Event]] = [[] for _ in tensors + hosts]
    for _ in range(60):
        stream = choose.choice(streams)
        kind = choose.choice(("add", "upload", "download", "fill"))
        to, source, host = choose.choice(range(5)), choose.choice(range(5)), choose.choice(range(3))
        used = {"add": [to, source], "fill": [to], "upload": [to, 5 + host]}.get(
            kind, [source, 5 + host]
        )
        for event in (event for i in used for event in last[i] if waits):
            stream.wait_event(event)
        with stream:
            if kind == "add":
                tensors[to].add_(tensors[source] * 0.5)
            elif kind == "fill":
                tensors[to].fill_(float(choose.randrange(9)))
            elif kind == "upload":
                tensors[to].copy_(hosts[host], non_blocking=True)
            else:
                hosts[host].copy_(tensors[source], non_blocking=True)
        done = stream.record_event()
        for i in used:
            last[i].append(done)
    pretend.synchronize()
    return [t.tolist() for t in [*tensors, *hosts]]


def test_environment_sets_seed_and_slowness(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERSTORE_PRETEND_SLOWNESS", "inf")
    monkeypatch.setenv("TIERSTORE_PRETEND_SEED", "7")
    device.start_over()
    x = torch.ones(16, device="pretend")
    for _ in range(100):
        x.add_(1)
    assert device.queued_tasks() > 100
    assert (x == 101).all()


def test_events_make_every_order_right(device: ModuleType) -> None:
    wrong = 0
    for seed in range(10):
        device.set_slowness(0)
        wanted = run_at_random(seed, waits=True)
        for slowness in (0.5, 2, 20, None):
            device.set_slowness(slowness)
            device.seed(seed)
            assert run_at_random(seed, waits=True) == wanted
            wrong += run_at_random(seed, waits=False) != wanted
    assert wrong > 20


UNFORCED: list[Callable[[torch.Tensor], object]] = [
    lambda x: functional.linear(x, x),
    lambda x: functional.layer_norm(x, (4,)),
    lambda x: functional.conv1d(x[None], x[:, :, None]),
    lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: functional.dropout(x),
    lambda x: functional.embedding(x.argmax(0), x),
    lambda x: torch.arange(7, device=x.device),
    lambda x: torch.mul(x, x, out=x.new_empty(0)),
    lambda x: torch.sort(x),
    lambda x: torch.randn(3, device=x.device),
    lambda x: torch._foreach_add([x, x * 2], 1),
    lambda x: x[torch.tensor([1, 2])],
    lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(2.0)),
    lambda x: x.to("pretend", torch.float16, copy=True),
    lambda x: x.t().contiguous(),
    lambda x: x.untyped_storage().resize_(400),
    lambda x: x.sum().backward(),
]


@pytest.mark.parametrize("operation", range(len(UNFORCED)))
def test_operations_without_host_results_do_not_wait(device: ModuleType, operation: int) -> None:
    x = torch.ones(4, 4, device="pretend").requires_grad_(operation == len(UNFORCED) - 1)
    assert not torch.accelerator.current_stream().query()
    before = device.queued_tasks()
    UNFORCED[operation](x)
    assert device.queued_tasks() > before
    device.synchronize()


def test_operations_with_host_results_wait_for_their_stream(
    device: ModuleType, side: torch.Stream
) -> None:
    x = torch.tensor([0.0, 3.0, 0.0, 4.0]).to("pretend")
    with side:
        other = pinned(16).to("pretend", non_blocking=True)
        event = side.record_event()
    x.add_(1).sub_(1)
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert torch.equal(x[x > 0].cpu(), torch.tensor([3.0, 4.0]))
    assert x.sum().item() == 7
    assert x.unique().numel() == 3
    assert not event.query()
    assert other.isnan().all()


def test_cpu_operands_are_read_at_the_call(device: ModuleType) -> None:
    x, index, factor = torch.arange(4.0).to("pretend"), torch.tensor([1, 2]), torch.tensor(3.0)
    result = x[index] * factor
    index.fill_(0)
    factor.fill_(0)
    assert result.tolist() == [3, 6]


def test_random_numbers_are_drawn_at_the_call(device: ModuleType, side: torch.Stream) -> None:
    torch.manual_seed(5)
    with side:
        first = torch.randn(5, device="pretend")
    second = torch.randn(5, device="pretend")
    second.cpu()  # so the second kernel ran first
    device.synchronize()
    generator = torch.Generator().manual_seed(5)
    for found in (first, second):
        assert torch.equal(found.cpu(), torch.randn(5, generator=generator))


def test_data_error_is_raised_late(device: ModuleType) -> None:
    weight = torch.randn(4, 2, device="pretend")
    bad = torch.tensor([9]).to("pretend")
    functional.embedding(bad, weight)
    with pytest.raises(IndexError):
        device.synchronize()
    device.synchronize()  # it is raised once


def test_shape_error_is_raised_at_the_call(device: ModuleType) -> None:
    a, b = torch.randn(4, 2, device="pretend"), torch.randn(3, 2, device="pretend")
    for wrong in (lambda: a + b, lambda: a @ b, lambda: a.add_(b), lambda: torch.cat([a, b], 1)):
        with pytest.raises(RuntimeError, match=r"size|shape"):
            wrong()


def test_queued_work_keeps_no_tensor(device: ModuleType) -> None:
    x = torch.randn(100, device="pretend")
    y = x * 2
    z = y + 1
    del x, y
    assert device.queued_tasks() > 2
    assert device.memory_allocated() == z.nbytes


def test_several_threads_may_wait_for_one_event(device: ModuleType, side: torch.Stream) -> None:
    x = torch.ones(200, 200, device="pretend")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        for _ in range(50):
            x = x @ x / 200
    event = side.record_event()
    seen: list[bool] = []

    def wait() -> None:
        event.synchronize()
        seen.append(event.query())

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4
    assert (x == 1).all()


def test_elapsed_time_between_events_is_positive(device: ModuleType) -> None:
    stream = torch.accelerator.current_stream()
    x = torch.ones(300, 300, device="pretend")
    first, last = (torch.Event(device="pretend", enable_timing=True) for _ in range(2))
    first.record(stream)
    x.square_()
    last.record(stream)
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) > 0


def copied_in_ms(x: torch.Tensor, y: torch.Tensor, stream: torch.Stream) -> tuple[float, float]:
    """Return the milliseconds of a copy that runs after a pause, by its events and by the clock."""
    first, last = (torch.Event(device="pretend", enable_timing=True) for _ in range(2))
    began = time.monotonic()
    first.record(stream)
    with stream:
        y.copy_(x, non_blocking=True)
    last.record(stream)
    time.sleep(0.02)
    last.synchronize()
    return first.elapsed_time(last), 1e3 * (time.monotonic() - began)


def test_link_with_a_speed_takes_exactly_its_time(device: ModuleType) -> None:
    device.set_slowness(None)
    stream = torch.Stream(device="pretend")
    there = torch.empty(1_000_000, dtype=torch.uint8, device="pretend")
    here = torch.zeros(1_000_000, dtype=torch.uint8).pin_memory()
    device.set_link_speed(1e8)
    for x, y in ((here, there), (there, here)):
        by_events, by_clock = copied_in_ms(x, y, stream)
        assert 10 <= by_events < 15, "it began as soon as it could"
        assert by_clock >= 20
    between, _ = copied_in_ms(there, torch.empty_like(there), stream)
    assert between < 10, "the copy did not use the link"
    device.set_link_speed(None)
    by_events, _ = copied_in_ms(here, there, stream)
    assert by_events >= 20, "the time until some thread ran it counts"


def test_working_device_computes_beside_its_copies(device: ModuleType) -> None:
    stream = torch.Stream(device="pretend")
    here = torch.zeros(2_000_000, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(here, device="pretend")
    began, computed, copied = (torch.Event(device="pretend", enable_timing=True) for _ in range(3))
    device.set_link_speed(1e8)
    with device.working():
        began.record()
        device.occupy(0.01)
        device.occupy(0.01)
        with stream:
            there.copy_(here, non_blocking=True)
        computed.record()
        copied.record(stream)
        assert not computed.query(), "it was not waited for"
        while not (computed.query() and copied.query()):
            time.sleep(0.001)
    assert 20 <= began.elapsed_time(computed) < 30
    assert 20 <= began.elapsed_time(copied) < 30


def test_link_with_a_speed_copies_in_sequence(device: ModuleType) -> None:
    device.set_slowness(None)
    device.set_link_speed(1e8)
    up, other = (torch.Stream(device="pretend") for _ in range(2))
    x = torch.zeros(1_000_000, dtype=torch.uint8).pin_memory()
    ys = [torch.empty_like(x, device="pretend") for _ in range(3)]
    marks = [torch.Event(device="pretend", enable_timing=True) for _ in range(4)]
    marks[0].record(up)
    for number, y in enumerate(ys):
        stream = other if number == 2 else up
        stream.wait_event(marks[number])
        with stream:
            y.copy_(x, non_blocking=True)
        marks[number + 1].record(stream)
    began = time.monotonic()
    marks[3].synchronize()
    assert time.monotonic() - began > 0.02
    took = [a.elapsed_time(b) for a, b in pairwise(marks)]
    assert all(9.9 <= each < 15 for each in took)


# ---------------------------------------------------------------- several devices


def test_thread_begins_on_device_0(device: ModuleType) -> None:
    seen = []
    with torch.accelerator.device_index(1):
        thread = threading.Thread(target=lambda: seen.append(device.current_device()))
        thread.start()
        thread.join()
        assert device.current_device() == 1
    assert seen == [0]


def test_copies_between_devices_wait_on_both_sides(device: ModuleType) -> None:
    value = torch.randn(16)
    first, second = value.to("pretend:0"), torch.zeros(16, device="pretend:1")
    first.add_(1)
    second.add_(5)
    second.copy_(first)
    first.zero_()
    second.mul_(2)
    assert device.queued_tasks(0) and device.queued_tasks(1)
    assert torch.equal(second.cpu(), (value + 1) * 2)
    assert (first == 0).all()


def test_each_device_has_separate_memory(device: ModuleType) -> None:
    a = torch.empty(1000, device="pretend:1")
    del a
    assert (device.memory_allocated(1), device.memory_reserved(1)) == (0, 4000)
    assert device.memory_reserved(0) == 0
    device.set_memory_limit(3999, 1)
    with pytest.raises(torch.OutOfMemoryError, match="pretend:1"):
        torch.empty(1001, device="pretend:1")
    assert torch.empty(1000, device="pretend:0").numel() == 1000


# ------------------------------------------------------------------------ capture


@pytest.fixture
def capture(device: ModuleType, side: torch.Stream) -> Iterator[torch.Stream]:
    """Return the stream of a running capture."""
    with side:
        device.begin_capture()
        yield side
        with suppress(RuntimeError):
            device.end_capture()


def register_and_unregister() -> None:
    memory = torch.ones(1)
    try:
        pretend.register_host(memory.data_ptr(), memory.nbytes)
    except RuntimeError:
        pretend.cudart().cudaGetLastError()  # otherwise the next launch raises it
        raise
    pretend.unregister_host(memory.data_ptr())


HOST_WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "stream": lambda x: torch.accelerator.current_stream().synchronize(),
    "other stream": lambda x: torch.Stream(device="pretend:0").synchronize(),
    "stream's query": lambda x: torch.accelerator.current_stream().query(),
    "event": lambda x: torch.accelerator.current_stream().record_event().synchronize(),
    "event's query": lambda x: torch.accelerator.current_stream().record_event().query(),
    "device": lambda x: torch.accelerator.synchronize(),
    "item": lambda x: x.sum().item(),
    "copy": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "cache": lambda x: torch.accelerator.empty_cache(),
    "registering": lambda x: register_and_unregister(),
}


@pytest.mark.parametrize("what", HOST_WAITS)
def test_capture_rejects_calls_that_wait(what: str, device: ModuleType, side: torch.Stream) -> None:
    x = torch.ones(4, device="pretend")
    with side:
        device.begin_capture()
        with pytest.raises(RuntimeError, match="when stream is capturing"):
            HOST_WAITS[what](x)
        if what != "registering":
            with pytest.raises(RuntimeError, match="previous error during capture"):
                device.end_capture()
        else:
            device.end_capture()
        assert not device.is_current_stream_capturing()
        assert HOST_WAITS[what](x) is not False


def test_captured_work_is_not_run(device: ModuleType, capture: torch.Stream) -> None:
    assert device.is_current_stream_capturing()
    x = torch.ones(4, device="pretend")
    done = capture.record_event()
    device.end_capture()
    assert not device.is_current_stream_capturing()
    assert done.query()
    assert x.isnan().all()


def test_capture_rejects_in_every_thread_by_default(device: ModuleType, side: torch.Stream) -> None:
    found = []

    def work() -> None:
        try:
            found.append(torch.ones(777, device="pretend").sum().item())
        except RuntimeError as error:
            found.append(str(error))

    for mode in ("global", "thread_local"):
        device.empty_cache()
        with side:
            device.begin_capture(capture_error_mode=mode)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            with suppress(RuntimeError):
                device.end_capture()
    assert "allocating device memory" in str(found[0])
    assert found[1] == 777


def test_stream_that_waits_for_captured_work_is_captured(
    device: ModuleType, capture: torch.Stream
) -> None:
    other = torch.Stream(device="pretend:0")
    other.wait_event(capture.record_event())
    with other:
        assert device.is_current_stream_capturing()
    capture.wait_event(other.record_event())
    device.end_capture()
    with other:
        assert not device.is_current_stream_capturing()


def test_capture_waiting_for_work_outside_raises(device: ModuleType, side: torch.Stream) -> None:
    event = torch.accelerator.current_stream().record_event()
    with side:
        device.begin_capture()
        with pytest.raises(RuntimeError, match="uncaptured work"):
            side.wait_event(event)
        with pytest.raises(RuntimeError, match="previous error"):
            device.end_capture()


def test_capture_of_the_default_stream_raises(device: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="other than the default"):
        device.begin_capture()


# --------------------------------------------------------------------- tensors


def test_parameter_data_moves_between_devices(device: ModuleType) -> None:
    layer = nn.Linear(3, 3)
    weight, value = layer.weight, layer.weight.detach().clone()
    layer(torch.randn(2, 3)).sum().backward()
    weight.grad = layer.bias.grad = None
    for place in ("pretend:0", "pretend:1", "cpu", "pretend:0"):
        layer.weight.data = value.to(place)
        layer.bias.data = layer.bias.data.to(place)
        assert layer.weight is weight
        assert weight.device == torch.device(place)
        layer(torch.randn(2, 3).to(place)).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device == weight.device
        weight.grad = layer.bias.grad = None
    assert torch.equal(weight.cpu(), value)


def test_module_to_keeps_parameters(device: ModuleType) -> None:
    layer = nn.Linear(3, 3)
    weight = layer.weight
    assert layer.to("pretend").weight is weight
    assert weight.device == torch.device("pretend:0")


def test_views_share_storage(device: ModuleType) -> None:
    base = torch.arange(24.0).to("pretend")
    grid = base.view(4, 6)
    views = [
        grid,
        base[3:],
        base.as_strided((2, 3), (3, 1)),
        base.view(torch.int32),
        grid.t(),
        base.unfold(0, 4, 2),
        grid.select(0, 1),
        base.detach(),
        torch.view_as_complex(base.view(12, 2)),
        grid.unbind(1)[2],
        base.view(4, 3, 2).permute(2, 0, 1),
        base.split(5)[1],
        grid.diagonal(),
    ]
    for view in views:
        assert view.device == base.device
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    before = device.memory_allocated()
    base.view(4, 6)[1].fill_(-1)
    assert (base[6:12] == -1).all()
    assert device.memory_allocated() == before


def test_storage_can_be_emptied_grown_and_set(device: ModuleType) -> None:
    value = torch.randn(100)
    x = value.to("pretend")
    before = device.memory_allocated()
    x.untyped_storage().resize_(0)
    assert device.memory_allocated() == before - 400
    x.untyped_storage().resize_(400)
    x.copy_(value)
    assert torch.equal(x.cpu(), value)
    y = torch.empty(0, device="pretend")
    y.set_(x.untyped_storage(), 10, (5, 2), (2, 1))
    assert torch.equal(y.cpu(), value[10:20].view(5, 2))
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    assert y.set_().numel() == 0
    assert x.resize_(200)[:100].cpu().equal(value)


def test_out_arguments_are_resized(device: ModuleType) -> None:
    x = torch.randn(4, 4)
    out = torch.empty(0, device="pretend")
    torch.mul(x.to("pretend"), 2, out=out)
    assert torch.equal(out.cpu(), x * 2)
    values, indices = torch.sort(x.to("pretend"), out=(out.resize_(0), out.new_empty(0).long()))
    assert torch.equal(values.cpu(), torch.sort(x).values)
    assert torch.equal(indices.cpu(), torch.sort(x).indices)


def test_random_numbers_equal_the_cpu(device: ModuleType) -> None:
    generator = torch.Generator(device="pretend").manual_seed(3)
    assert generator.device.type == "pretend"
    a = torch.randn(5, device="pretend", generator=generator)
    b = torch.randn(5, device="pretend", generator=generator.manual_seed(3))
    assert torch.equal(a.cpu(), b.cpu())
    assert torch.equal(a.cpu(), torch.randn(5, generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(4)
    c = torch.randn(5, device="pretend")
    state = device.get_rng_state()
    d = torch.rand(5, device="pretend")
    device.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="pretend").cpu(), d.cpu())
    torch.manual_seed(4)
    assert torch.equal(torch.randn(5, device="pretend").cpu(), c.cpu())
    assert torch.randperm(5, device="pretend").sort().values.tolist() == list(range(5))


def test_saved_tensors_load_on_their_device(device: ModuleType, tmp_path) -> None:
    x = torch.randn(5)
    torch.save(x.to("pretend:1"), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt").device == torch.device("pretend:1")
    assert torch.equal(torch.load(tmp_path / "x.pt", map_location="cpu"), x)


def run_with_pretend(code: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", "import torch; from tests.device import pretend;" + code)


@pytest.mark.full("a separate process, about the tests' own device")
def test_load_after_a_backward_pass_raises(device: ModuleType) -> None:
    done = run_with_pretend("torch.ones(1, requires_grad=True).backward(); pretend.load()")
    assert done.stderr.endswith("must come before the first backward pass\n")


@pytest.mark.full("a separate process, about the tests' own device")
def test_process_with_queued_work_exits_cleanly(device: ModuleType) -> None:
    code = (
        "pretend.load(); s = torch.Stream(device='pretend');"
        "x = torch.ones(9, requires_grad=True); (x.to('pretend:1') * 2).sum().backward();"
        "s.__enter__(); y = torch.ones(9).pin_memory().to('pretend', non_blocking=True);"
        "z = s.record_event()"
    )
    done = run_with_pretend(code)
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------ operations


def rotary(x: torch.Tensor) -> torch.Tensor:
    """Apply rotary embeddings with complex numbers, in double, as in Wan and Flux."""
    angles = torch.outer(
        torch.arange(x.shape[-2], dtype=torch.float64, device=x.device),
        torch.arange(x.shape[-1] // 2, dtype=torch.float64, device=x.device) / 7,
    )
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.to(torch.float64).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


OPERATIONS: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
    "conv1d": (functional.conv1d, [(2, 4, 9), (6, 4, 3)]),
    "conv2d": (
        lambda x, w, b: functional.conv2d(x, w, b, 2, 1),
        [(2, 4, 9, 9), (6, 4, 3, 3), (6,)],
    ),
    "conv3d": (functional.conv3d, [(1, 4, 5, 5, 5), (6, 4, 3, 3, 3), (6,)]),
    "grouped conv": (lambda x, w: functional.conv2d(x, w, groups=2), [(2, 4, 9, 9), (6, 2, 3, 3)]),
    "transposed conv": (functional.conv_transpose2d, [(2, 4, 5, 5), (4, 3, 3, 3), (3,)]),
    "linear": (functional.linear, [(5, 4), (3, 4), (3,)]),
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (4,), w, b), [(5, 4), (4,), (4,)]),
    "rms_norm": (lambda x, w: functional.rms_norm(x, (4,), w), [(5, 4), (4,)]),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), [(2, 4, 5), (4,), (4,)]),
    "batch_norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        [(3, 4, 5), (4,), (4,)],
    ),
    "batch_norm with statistics": (
        lambda x, m, v: functional.batch_norm(x, m.detach(), v.detach().square()),
        [(3, 4, 5), (4,), (4,)],
    ),
    "attention": (functional.scaled_dot_product_attention, [(2, 3, 8, 16)] * 3),
    "causal attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 3, 8, 16)] * 3,
    ),
    "masked attention": (
        lambda q, k, v, m: functional.scaled_dot_product_attention(q, k, v, m.detach()),
        [(2, 3, 8, 16)] * 3 + [(8, 8)],
    ),
    "embedding": (
        lambda w: functional.embedding(torch.tensor([[1, 3], [0, 1]]).to(w.device), w),
        [(5, 4)],
    ),
    "softmax": (lambda x: x.softmax(-1), [(5, 4)]),
    "gelu": (lambda x: functional.gelu(x, approximate="tanh"), [(5, 4)]),
    "silu": (functional.silu, [(5, 4)]),
    "cross_entropy": (
        lambda x: functional.cross_entropy(x, torch.tensor([0, 2, 1]).to(x.device)),
        [(3, 4)],
    ),
    "interpolate nearest": (lambda x: functional.interpolate(x, scale_factor=2), [(1, 2, 4, 4)]),
    "interpolate bilinear": (
        lambda x: functional.interpolate(x, size=(7, 5), mode="bilinear"),
        [(1, 2, 4, 4)],
    ),
    "avg_pool": (lambda x: functional.avg_pool2d(x, 2), [(1, 2, 4, 4)]),
    "max_pool": (lambda x: functional.max_pool2d(x, 2), [(1, 2, 4, 4)]),
    "pad": (lambda x: functional.pad(x, (1, 2), mode="replicate"), [(1, 2, 4)]),
    "rotary": (rotary, [(2, 6, 8)]),
    "conj": (lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * 2), [(5, 2)]),
    "einsum": (lambda a, b: torch.einsum("ij,kj->ik", a, b), [(3, 4), (5, 4)]),
    "cat and chunk": (lambda a, b: torch.cat(torch.cat([a, b]).chunk(3)[::-1]), [(3, 4), (3, 4)]),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1), [(5, 4)]),
    "cumsum": (lambda x: x.cumsum(0), [(5, 4)]),
    "std": (lambda x: x.std(-1) + x.var(-1) + x.mean(-1) + x.norm(), [(5, 4)]),
    "expand": (lambda x: x.expand(3, 5, 4).sum(0), [(5, 4)]),
    "gather": (lambda x: x.gather(0, torch.tensor([[0, 1], [2, 0]]).to(x.device)), [(5, 4)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_and_gradient_equal_the_cpu(device: ModuleType, name: str) -> None:
    function, shapes = OPERATIONS[name]
    inputs = [torch.randn(shape) for shape in shapes]
    results = []
    for place in ("cpu", "pretend:1"):
        leaves = [x.clone().to(place).requires_grad_() for x in inputs]
        output = function(*leaves)
        output.square().sum().backward()
        assert output.device == leaves[0].device
        results.append(
            [output.detach().cpu(), *[x.grad.cpu() for x in leaves if x.grad is not None]]
        )
    assert len(results[0]) == len(results[1])
    for wanted, found in zip(*results, strict=True):
        assert torch.equal(wanted, found)
        assert wanted.stride() == found.stride()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool]
)
def test_dtypes_equal_the_cpu(device: ModuleType, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 4) * 3).to(dtype)
    assert torch.equal(x.to("pretend").cpu(), x)
    assert torch.equal(x.to("pretend").float().sum(0).cpu(), x.float().sum(0))


def test_float8_moves(device: ModuleType) -> None:
    x = torch.randn(5, 4).to(torch.float8_e4m3fn)
    assert torch.equal(x.to("pretend").float().cpu(), x.float())


def test_packed_sequences_move(device: ModuleType) -> None:
    x = torch.randn(3, 2, 4)
    packed = nn.utils.rnn.pack_padded_sequence(x.to("pretend"), [3, 2])
    assert packed.data.device.type == "pretend"
    assert packed.batch_sizes.device.type == "cpu"


def test_training_equals_the_cpu(device: ModuleType) -> None:
    results = []
    for place in ("cpu", "pretend:0"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1)).to(
            place
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 8, device=place)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        results.append([p.detach().cpu() for p in net.parameters()])
    for wanted, found in zip(*results, strict=True):
        assert torch.equal(wanted, found)


def test_checkpointing_equals_the_cpu(device: ModuleType) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("pretend")
    x = torch.randn(4, 8, device="pretend", requires_grad=True)
    torch.manual_seed(1)
    net(x).sum().backward()
    wanted, x.grad = x.grad, None
    torch.manual_seed(1)
    torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad.cpu(), wanted.cpu())


def test_inference_mode_and_no_grad_work(device: ModuleType) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    wanted = layer(x)
    layer.to("pretend")
    with torch.inference_mode():
        y = layer(x.to("pretend"))
        assert y.is_inference()
        assert torch.equal(y.view(-1).relu_().view(3, 4).cpu(), wanted.relu())
    with torch.no_grad():
        assert not layer(x.to("pretend")).requires_grad


def test_in_place_change_raises_in_autograd(device: ModuleType) -> None:
    x = torch.randn(4, device="pretend", requires_grad=True)
    y = x.exp()
    y.view(2, 2).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
