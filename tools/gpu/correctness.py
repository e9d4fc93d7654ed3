"""Correctness on a GPU: tests, stream order, memory, rejected uses and failures."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from tierstore import (
    OffloadModel,
    OffloadOptimizer,
    TierStore,
    disable_offload,
    dispatch_model,
    offload_activations,
)
from tierstore.errors import CaptureError
from tierstore.tiers.device_tier import DeviceTier
from tools.bench.apart import kill
from tools.gpu.bench import Bench
from tools.gpu.lines import (
    Failed,
    Figures,
    Goal,
    Group,
    Line,
    Postponed,
    Unavailable,
    format_figures,
)

NONE_WRONG = Goal("wrong", at_most=0)
TURNOVER = Goal("turnover", at_least=1.5)
"""Minimum for groups to reuse each other's memory."""
SLACK = 1.1
"""Allowed ratio of reserved to accounted memory, because allocators round up."""


class Correctness:
    """The lines of this part, and their shared helpers."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.device = bench.device
        self.accelerator = bench.accelerator
        self.rows = bench.scaled(16 << 20, 8 << 10)  # float32 numbers in a group

    def delay_stream(self) -> None:
        """Delay the following work in the current stream."""
        self.accelerator.delay(0.02)

    def store(self, place: Path, *, groups: float, ram: float = 32) -> TierStore:
        """Open a store whose budgets hold `groups` groups on the device and `ram` in RAM."""
        one = 4 * self.rows * 9 // 8 + 4096  # a slot may be larger than its group
        return TierStore(
            int(ram * one),
            place / "store",
            device=self.device,
            device_budget=int(groups * one),
        )

    # Streams ---------------------------------------------------------------------------------

    def put_constants(self, store: TierStore, sizes: Sequence[int]) -> None:
        """Put groups of one tensor each, filled with the number of the group."""
        for number, size in enumerate(sizes):
            store.put(f"{number}", torch.full((size,), number + 1.0), durable=False)

    def two_streams(self, sizes: Sequence[int], rounds: int) -> Figures:
        """Run two threads whose streams read groups later than the threads release them.

        `wrong` counts reads of values of another group, `astray` store calls that changed a
        thread's stream. `turnover` is the bytes copied to the device / the bytes of all groups.
        """
        wrong: list[torch.Tensor] = []
        astray = [0, 0]
        failures: list[BaseException] = []
        with self.bench.folder() as place, self.store(place, groups=3) as store:
            self.put_constants(store, sizes)
            together = threading.Barrier(2)

            def work(which: int) -> None:
                try:
                    self.accelerator.module.set_device(self.device)
                    stream = torch.Stream(self.device)
                    with stream:
                        together.wait()
                        for turn in range(rounds):
                            number = (turn * (which + 1) + which) % len(sizes)
                            with store.acquire(f"{number}") as lease:
                                astray[which] += torch.accelerator.current_stream() != stream
                                self.delay_stream()
                                wrong.append((lease.tensor != number + 1).any())
                            astray[which] += torch.accelerator.current_stream() != stream
                    stream.synchronize()
                except BaseException as error:
                    together.abort()  # the other thread may be waiting
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = sum(int(each) for each in wrong)
            turnover = store.stats().bytes_onloaded / (4 * sum(sizes))
        if failures:
            raise failures[0]
        return {
            "wrong": found,
            "astray": sum(astray),
            "readings": len(wrong),
            "turnover": turnover,
        }

    def equal_sizes(self) -> Figures:
        """Use groups of one size, which reuse each other's memory."""
        return self.two_streams([self.rows] * 8, self.bench.scaled(200, 24))

    def unequal_sizes(self) -> Figures:
        """Use groups of different sizes, whose memory is reallocated."""
        sizes = [self.rows * part // 8 for part in (8, 5, 7, 3, 6, 4, 8, 5)]
        return self.two_streams(sizes, self.bench.scaled(200, 24))

    def without_release(self) -> Figures:
        """Run the control: the store does not learn when the device has finished with a group."""
        with mock.patch.object(DeviceTier, "used_on", lambda tier, entry, event: None):
            return self.two_streams([self.rows] * 8, self.bench.scaled(200, 64))

    # Memory ----------------------------------------------------------------------------------

    def running_ahead(self) -> Figures:
        """Measure reserved memory while backward is slow and the CPU runs far ahead of it."""
        width, layers = self.bench.scaled(4096, 64), 24
        rows = self.bench.scaled(8192, 512)
        net = nn.Sequential(*(Slow(width, self.delay_stream) for _ in range(layers))).to(
            self.device
        )
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        x = torch.randn(rows, width, device=self.device)
        one = x.nbytes
        budget = 4 * one + (1 << 16)
        self.accelerator.reset()
        base = self.accelerator.reserved()
        with (
            self.bench.folder() as place,
            TierStore(
                4 * layers * one + (1 << 20),
                place / "store",
                device=self.device,
                device_budget=budget,
            ) as store,
        ):
            with offload_activations(store, min_size=4096, model=net):
                loss = net(x).square().mean()
            loss.backward()
            self.accelerator.synchronize()
            peak = self.accelerator.peak_reserved() - base
        # Memory of a layer itself: its input, its output and the gradients of both, twice.
        allowed = budget + 8 * one + 2 * net[0].inner.weight.nbytes
        return {
            "peak_reserved_mb": peak / 1e6,
            "allowed_mb": allowed / 1e6,
            "to_allowed": peak / allowed,
        }

    def autocast(self) -> Figures:
        """Cast float32 weights to bfloat16, group by group."""
        width, layers = self.bench.scaled(4096, 128), 16
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        one = net[0].weight.nbytes
        x = torch.randn(8, width, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            try:
                x @ x.T
            except NotImplementedError as error:
                raise Unavailable(f"{self.device.type} has no kernels for autocast") from error
        budget = 3 * one + (1 << 16)
        with (
            self.bench.folder() as place,
            TierStore(
                2 * layers * one, place / "store", device=self.device, device_budget=budget
            ) as store,
        ):
            dispatch_model(net, store)
            self.accelerator.reset()
            base = self.accelerator.reserved()
            with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
                for _ in range(2):
                    net(x)
            self.accelerator.synchronize()
            peak = self.accelerator.peak_reserved() - base
            disable_offload(net)
        allowed = budget + one  # up to two casts, each half the bytes of its group
        return {"peak_reserved_mb": peak / 1e6, "to_allowed": peak / allowed}

    # Rejected uses ---------------------------------------------------------------------------

    def scaler(self) -> Figures:
        """Use a GradScaler on the device with gradients on the CPU."""
        with self.bench.folder() as place, self.store(place, groups=8) as store:
            net = nn.Linear(64, 64)
            model = OffloadModel(net, store)
            optimizer = OffloadOptimizer(model, store, torch.optim.SGD, lr=0.1)
            scaler = torch.amp.GradScaler(self.device.type)
            x = torch.randn(4, 64, device=self.device)
            scaler.scale(model(x).square().mean()).backward()
            refused = 0
            try:
                scaler.step(optimizer)
            except RuntimeError as error:
                refused = int("bfloat16" in str(error))
            model.disable()
        return {"refused": refused}

    def capture(self) -> Figures:
        """Use a store during a graph capture, and afterwards."""
        with self.bench.folder() as place, self.store(place, groups=8) as store:
            self.put_constants(store, [1024])
            refused = 0
            with self._capturing():
                try:
                    store.acquire("0")
                except CaptureError:
                    refused = 1
            with store.acquire("0") as lease:
                wrong = int((lease.tensor != 1).any())
        return {"refused": refused, "wrong": wrong}

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        module = self.accelerator.module
        if self.device.type == "cuda":
            graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device=self.device)
            self.accelerator.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                x.add_(1)  # torch warns of an empty graph
                yield
            return
        if not hasattr(module, "begin_capture"):
            raise Unavailable(f"{self.device.type} has no capture")
        with torch.Stream(self.device):
            module.begin_capture(capture_error_mode="thread_local")
            try:
                yield
            finally:
                with suppress(RuntimeError):  # the capture may have been invalidated, as expected
                    module.end_capture()

    # Failures --------------------------------------------------------------------------------

    def forked(self) -> Figures:
        """Measure how much of a store's memory two forked processes inherit."""
        if self.device.type != "cuda":
            raise Unavailable("only CUDA registers memory")
        with self.bench.folder() as place, self.store(place, groups=4) as store:
            self.put_constants(store, [self.rows] * 8)
            for number in range(8):
                store.get(f"{number}")
            held = store.stats().used_bytes["HOST"]
            before = anonymous_bytes()
            grown = [in_a_fork(anonymous_bytes) - before + held for _ in range(2)]
            with store.acquire("3") as lease:
                wrong = int((lease.tensor != 4).any())
        # Memory of a fork beyond the rest of the process, as a share of the store's memory.
        return {"share": max(grown) / held, "held_mb": held / 1e6, "wrong": wrong}

    def out_of_memory(self) -> Figures:
        """Run a module out of device memory while the store holds unleased groups."""
        width = self.bench.scaled(4096, 128)
        net = nn.Sequential(*(Wide(width) for _ in range(8))).eval()
        one = net[0].inner.weight.nbytes
        x = torch.randn(8, width, device=self.device)
        with torch.no_grad():
            expected = x
            for layer in net:
                expected = F.linear(expected, layer.inner.weight.to(self.device))
            expected = expected.cpu()
        with (
            self.bench.folder() as place,
            TierStore(
                16 * one, place / "store", device=self.device, device_budget=8 * one + (1 << 16)
            ) as store,
            torch.no_grad(),
        ):
            dispatch_model(net, store)
            net(x)
            self.accelerator.synchronize()
            gc.collect()
            self.accelerator.module.empty_cache()
            net[0].extra = 4 * one
            finished, same = 0, 0
            with self.accelerator.limited(self.accelerator.reserved() + one):
                try:
                    found = net(x).cpu()
                    finished, same = 1, int(torch.equal(found, expected))
                except torch.OutOfMemoryError:
                    pass
            disable_offload(net)
        return {"finished": finished, "wrong": 1 - same if finished else 0}

    def closing(self) -> Figures:
        """Close a store while the device has yet to read leased memory."""
        found = []
        for _ in range(self.bench.scaled(10, 3)):
            with self.bench.folder() as place:
                with self.store(place, groups=3) as store:
                    self.put_constants(store, [self.rows] * 4)
                    for number in range(4):
                        with store.acquire(f"{number}") as lease:
                            self.delay_stream()
                            found.append((lease.tensor != number + 1).any())
                self.delay_stream()
        return {"wrong": sum(int(each) for each in found), "readings": len(found)}

    def opening(self) -> Figures:
        """Measure leaks of stores that were opened, used and closed."""

        def once() -> None:
            with self.bench.folder() as place, self.store(place, groups=2) as store:
                self.put_constants(store, [1024] * 3)
                store.get("1")

        for _ in range(3):
            once()
        before = self._held()
        for _ in range(self.bench.scaled(200, 10)):
            once()
        after = self._held()
        growth = {f"more_{name}": after[name] - before[name] for name in before}
        return {**growth, "more_mb_in_all": growth.pop("more_resident_mb")}

    def _held(self) -> Mapping[str, float]:
        self.accelerator.reset()
        return {
            "reserved": self.accelerator.reserved(),
            "allocated": self.accelerator.allocated(),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "resident_mb": anonymous_bytes() / 1e6,
        }

    # Lines -----------------------------------------------------------------------------------

    def groups(self) -> Sequence[Group]:
        """All lines."""
        in_order = [NONE_WRONG, Goal("astray", at_most=0), TURNOVER]
        wrong = [Goal("wrong", at_least=1)]
        within = [Goal("to_allowed", at_most=SLACK)]
        refused = Goal("refused", at_least=1)
        kinds = ("reserved", "allocated", "threads", "files")
        nothing_more = [Goal(f"more_{kind}", at_most=0) for kind in kinds]
        order = [
            Line("equal groups", "two streams read after the release", self.equal_sizes, in_order),
            Line("unequal groups", "the same, with six sizes", self.unequal_sizes, in_order),
            Line("without the event of a release", "the control", self.without_release, wrong),
        ]
        memory = [
            Line(
                "running ahead",
                "relative to the memory of a layer",
                self.running_ahead,
                within,
                seconds=8,
            ),
            Line("autocast", "relative to the budget and two casts", self.autocast, within),
        ]
        refusals = [
            Line("GradScaler", "on the device", self.scaler, [refused]),
            Line("capture", "of a graph", self.capture, [refused, NONE_WRONG]),
        ]
        failures = [
            Line(
                "forks",
                "the store's memory in forked processes",
                self.forked,
                [Goal("share", at_most=0.1), NONE_WRONG],
            ),
            Line(
                "out of memory",
                "a module that runs out gets the store's idle memory",
                self.out_of_memory,
                [Goal("finished", at_least=1), NONE_WRONG],
            ),
            Line("closing", "with work pending", self.closing, [NONE_WRONG]),
            Line(
                "opening",
                "200 stores, and what they leak",
                self.opening,
                [*nothing_more, Goal("more_mb_in_all", at_most=32)],
                seconds=8,
            ),
        ]
        return [
            Group("order", order),
            Group("memory", memory),
            Group("refusals", refusals),
            Group("failures", failures),
        ]


# Modules and process queries ----------------------------------------------------------------------


class Later(torch.autograd.Function):
    """Identity whose backward is delayed on the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, delay: Callable[[], None]) -> torch.Tensor:
        ctx.delay = delay
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.delay()
        return gradients[0], None


class Slow(nn.Module):
    """A layer whose backward is slow on the device and fast on the CPU."""

    def __init__(self, width: int, delay: Callable[[], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.delay = delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Later.apply(self.inner(x), self.delay))


class Wide(nn.Module):
    """A layer that allocates `extra` bytes while it runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.extra = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _ = torch.empty(self.extra, dtype=torch.uint8, device=x.device)
        return self.inner(x)


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes, including pages shared by fork."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Anonymous: +(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) << 10


def in_a_fork(question: Callable[[], int]) -> int:
    """Return the result of `question` in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writer, str(question()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("a forked process has failed")
    return int(text)


# The tests ----------------------------------------------------------------------------------------


class Suite:
    """Runs the tests of this repository on the device."""

    SECONDS = 120.0
    """With 16 cores, on an H100."""
    ENDING = 15.0
    """Seconds for pytest to exit after an interrupt and to report its results."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def words(self, place: Path) -> list[str]:
        """Return the pytest command: the default lane, or in a trial the adapter tests only.

        A run of the tests may start a trial while it uses all cores.
        """
        small = self.bench.small
        cores = 0 if small else len(os.sched_getaffinity(0))
        return [
            *(sys.executable, "-m", "pytest", "--device", self.bench.device.type),
            *("-n", str(cores), "-q", "-p", "no:cacheprovider", "--basetemp", str(place / "tests")),
            "--timeout=120",  # a hanging test prints the stacks of all threads
            *["tests/device/test_accelerators.py"] * small,
        ]

    def run(self) -> Figures:
        """Return the number of tests by outcome. Raises Failed, with the output, if any failed."""
        for package in ("pytest", "hypothesis", "pytest_timeout", "xdist"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed")
        # A test marked `alone` would wait for the test that runs this.
        kept = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_XDIST")}
        left = self.bench.ends - time.monotonic() - 2 * self.ENDING
        with self.bench.folder() as place, (place / "output").open("w+") as output:
            words = self.words(place)
            tests = subprocess.Popen(words, env=kept, stdout=output, stderr=subprocess.STDOUT)
            cut = False
            try:
                tests.wait(max(0, min(2 * self.SECONDS, left)))
            except subprocess.TimeoutExpired:
                cut = True
                tests.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    tests.wait(self.ENDING)
            finally:
                kill(tests)
            output.seek(0)
            return outcome(output.read(), tests.returncode, cut)


def outcome(text: str, status: int, cut: bool) -> Figures:
    """Parse the output of pytest. Raises the matching error if the run was not successful."""
    if status == 4:  # usage error, for example an old version without --device
        raise Unavailable("; ".join(re.findall(r"error: .*", text)) or text[-300:])
    found = dict.fromkeys(("passed", "failed", "skipped", "error"), 0.0)
    for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", text[-300:]):
        found[kind] = float(number)
    if cut:
        raise Postponed(f"time: it was cut after {format_figures(found)}\n{text[-8000:]}")
    if status:
        raise Failed(text[-8000:], found)
    return found


def suite(bench: Bench) -> Sequence[Group]:
    """Return the line of the tests."""
    goals = [Goal("failed", at_most=0), Goal("error", at_most=0), Goal("passed", at_least=1)]
    line = Line("tests", "pytest --device", Suite(bench).run, goals, seconds=Suite.SECONDS)
    return [Group("tests", [line])]


def groups(bench: Bench) -> Sequence[Group]:
    """Return the lines of this part."""
    return Correctness(bench).groups()
