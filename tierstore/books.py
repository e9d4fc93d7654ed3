"""What a store believes: the planner, the carrier, and who waits, in agreement.

This is the only module that knows both planner and carrier. Every step follows one pattern: ask
the planner, and hand its instructions to the carrier, so that their order is kept. The carrier's
threads report back in the same way. Nothing here waits but `_wait`, between steps.

The planner can be made anew at any time. What is true of a group is known elsewhere: which copies
the carrier has made and is making, which version of a key readers see, and what is lent. If a step
was cut short, whatever the planner believed by then is forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch

from tierstore.lessons import Lessons
from tierstore.model.errors import (
    BudgetError,
    CaptureError,
    ClosedError,
    DuplicateKeyError,
    StoreTimeoutError,
    UnknownKeyError,
)
from tierstore.model.groups import GroupSpec, Source, name_of, version_id
from tierstore.model.journal import Use
from tierstore.model.locks import RLock
from tierstore.model.moves import Copy
from tierstore.model.tiers import Access, Hold, Tier
from tierstore.observer import Observer
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.records import Found, State
from tierstore.plan.schedule import LearnedOrder
from tierstore.settings import Settings
from tierstore.steps import step
from tierstore.transfer.cargo import Cargo
from tierstore.transfer.carrier import ThreadCarrier
from tierstore.transfer.directory import ObjectDirectory
from tierstore.transfer.disk import FileStamp
from tierstore.transfer.objects import object_name
from tierstore.transfer.streams import is_captured
from tierstore.transfer.workers import weakly
from tierstore.waiting import LOOK_AGAIN, Request, WaitingRoom, Want, Wish

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Lent(Use):
    """The store's side of a lease, and later a note of it.

    It is of the copy on the fastest tier, or `held` in host memory. `stream` is where the device
    uses what was lent, as far as is known: if the lease is lost, whoever finds it is on another.
    """

    access: Access = Access.READ
    held: Hold | None = None
    stream: torch.Stream | None = None


class Books:
    """The part of a store that knows what is where, and who wants what."""

    def __init__(self, settings: Settings) -> None:
        self.device = settings.device
        self.held_for_good = 0  # bytes of host memory
        self._lock = RLock()
        self._torn = False  # a step has begun, and is not over
        self._pid = os.getpid()
        self._settings = settings
        self._planner = self._new_planner()
        self._waiting = WaitingRoom(
            self._ready, lambda: self._planner.idle(), self._refuse_the_hopeless
        )
        self._versions: dict[str, str] = {}  # key -> the version that readers see
        self._putting: dict[str, None] = {}  # versions that nobody sees yet
        self._out: dict[Lent, None] = {}  # what was not given back yet
        self._resting: dict[Lent, Lent] = {}  # what of it is not used at this moment
        self._numbers = itertools.count(1)
        self._lessons = Lessons()
        self._closing = False  # nothing new may begin; what there is, is being saved
        self._closed = False
        self._directory = ObjectDirectory(settings.disk_dir)
        try:
            self._carrier = self._new_carrier()
        except BaseException:
            self._directory.close()
            raise
        self._finalizer = weakref.finalize(
            self, _shut_down, self._carrier, self._directory, self._pid
        )
        try:
            journal, times = self._carrier.journal, self._carrier.times
            self._observer = Observer(journal, times, self._lessons.ran)
            self._recover()
            self._observer.level(self._planner.used)
        except BaseException:
            self._finalizer()
            raise

    def _new_planner(self) -> Planner:
        schedule = LearnedOrder()
        policy = policy_named(self._settings.policy, schedule)
        told = self.device.type != "cpu"
        return Planner(self._settings.budgets, policy, schedule, time.monotonic, told=told)

    def _new_carrier(self) -> ThreadCarrier:
        # Its threads must not keep a forgotten store alive.
        report, ending = (weakly(weakref.WeakMethod(m)) for m in (self._arrived, self._ending))
        given = self._settings
        moved, verify = self._lessons.moved, given.verify
        return ThreadCarrier(
            given.device, given.budgets, self._directory, verify, report, ending, moved
        )

    def _recover(self) -> None:
        for stored in self._directory.objects():
            version = version_id(stored.key, 0)
            spec = stored.spec(version)
            source = stored.source(self._directory.path_of(stored.key))
            self._carrier.add(Cargo(version, spec, source, stored.packing, single=stored.single))
            self._planner.register(version, spec.nbytes, backed=False)
            self._carrier.saver.add_file(stored.key)
            self._versions[stored.key] = version
        budget, held = self._planner.budgets[Tier.DISK], self._planner.used[Tier.DISK]
        if budget is not None and held > budget:
            raise BudgetError(
                self._directory.path,
                Tier.DISK.name,
                held,
                budget,
                "raise disk_budget, or remove groups with tierstore-inspect rm",
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TierStore belongs to its process: open another one, with a disk_dir of its own, in "
            "the process that is to have it"
        )

    # Keys and versions -------------------------------------------------------------------------

    def _know(
        self,
        key: str,
        spec: GroupSpec,
        source: Source,
        stamps: Mapping[str, FileStamp],
        *,
        single: bool,
    ) -> None:
        version = self._new_version(key)
        spec = GroupSpec(version, spec.tensors, spec.nbytes)
        order = self._newest_so_far()
        self._carrier.add(
            Cargo(version, spec, source, single=single, stamps=stamps, order=order, backed=True)
        )
        self._planner.register(version, spec.nbytes, backed=True)
        self._versions[key] = version

    def _refuse_duplicate(self, key: str) -> None:
        if key in self._versions:
            raise DuplicateKeyError(key)

    def _new_version(self, key: str) -> str:
        return version_id(key, next(self._numbers))

    def _newest_so_far(self) -> int:
        return next(self._numbers)

    def _lookup(self, key: str) -> str:
        version = self._versions.get(key)
        if version is None:
            damage = None
            with suppress(ValueError, AttributeError):  # there cannot be such a key
                damage = self._directory.damaged.get(object_name(key))
            raise damage or UnknownKeyError(key)
        return version

    def _check_open(self, *, saving: bool = False) -> None:
        if self._ended() or (self._closing and not saving):
            raise ClosedError("the store is closed: open a new TierStore on its disk_dir")
        self._check_process()

    def _ended(self) -> bool:
        """Whether the store was closed, by `close` or by the end of the interpreter."""
        return self._closed or self._carrier.stopped

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                "this process was forked from the one that opened the store: open a TierStore of "
                "its own, with another disk_dir, after the fork"
            )

    # Waiting -----------------------------------------------------------------------------------

    def _wait(
        self,
        request: Request,
        attempt: Callable[[Request], T | None],
        timeout: float | None = None,
    ) -> T:
        """Try until `attempt`, as a step, gives something; sleep until something has changed.

        Whatever is raised, the request is given up. Raises StoreTimeoutError after so many seconds.
        """
        try:
            ends = None if timeout is None else time.monotonic() + timeout
            while (result := self._try(request, attempt)) is None:
                left = LOOK_AGAIN if ends is None else ends - time.monotonic()
                if left <= 0:
                    raise StoreTimeoutError(request.key, request.want.value, timeout or 0.0)
                request.bell.wait(min(left, LOOK_AGAIN))
            return result
        except BaseException:
            self._give_up(request)
            raise

    async def _wait_async(self, request: Request, attempt: Callable[[Request], T | None]) -> T:
        """`_wait` for coroutines: never blocks the event loop."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        request.listener = loop, woken
        try:
            while True:
                woken.clear()
                if (result := self._try(request, attempt)) is not None:
                    return result
                # Not asyncio.wait_for: in Python 3.11 it may lose a cancellation.
                alarm = loop.call_later(LOOK_AGAIN, woken.set)
                try:
                    await woken.wait()
                finally:
                    alarm.cancel()
        except BaseException:
            self._give_up(request)
            raise

    @step
    def _try(self, request: Request, attempt: Callable[[Request], T | None]) -> T | None:
        result = attempt(request)
        if result is None and self._resting and not self._is_coming(request):
            self._call_in()
            result = attempt(request)
        if result is None:
            self._waiting.tried_in_vain(request)
        else:
            self._waiting.leave(request)
        return result

    @step
    def _give_up(self, request: Request) -> None:
        """Leave nothing of a request behind."""
        if self._ended():
            request.version = ""
            return
        self._waiting.leave(request)
        self._observer.gave_up(request)
        if request.loan is not None:
            self._take_away(request.loan)
        wish, request.version = request.wish, ""
        self._take_back(wish)

    def _take_back(self, wish: Wish) -> None:
        """See that the planner pursues a wish no more."""
        if wish.version in self._planner:
            if wish.want is Want.HOLD and wish.purpose is not None:
                self._planner.withdraw_fetch(wish.version, wish.purpose)
            elif wish.want is not Want.SAVE:
                self._planner.withdraw(wish.version)
            self._deliver()
        self._putting.pop(wish.version, None)

    def _collect_lost(self) -> None:
        """Take back what only garbage had."""
        for wish in self._waiting.lost_wishes():
            self._take_back(wish)

    def _take_away(self, loan: Lent) -> None:
        """Take back what was lent, but did not reach the caller."""
        raise NotImplementedError

    def _ready(self, request: Request) -> bool:
        """Whether to try again can make a difference for a request that waits."""
        raise NotImplementedError

    def _refuse_the_hopeless(self, request: Request, held: set[str]) -> None:
        """Raise: whoever could give the room (or the group) back is waiting too."""
        raise NotImplementedError

    # Leases that rest ---------------------------------------------------------------------------

    @step
    def _rest(self, loan: Lent) -> bool:
        if self._ended() or loan not in self._out or self._waiting.anybody():
            return False
        if loan.access is not Access.READ or loan.held is not None:
            return False
        if self._carrier.times is not None:
            loan.stream = self.current_stream()
            mark = self._carrier.times.mark(loan.stream)
            self._carrier.used_on(loan.version, mark.event)
        self._resting[loan] = loan
        return True

    def _resume(self, loan: Lent) -> bool:
        self._refuse_capture()
        # Who takes it out of there has it: this caller, or one who calls it in.
        if self._resting.pop(loan, None) is None:
            return False
        self._order_after_arrival(self._carrier.cargo(loan.version), self.current_stream())
        loan.stream = self.current_stream()
        return True

    def _refuse_capture(self) -> None:
        """Raise CaptureError, before anything is done, where a graph is being captured."""
        if is_captured(self.device):
            raise CaptureError

    def current_stream(self) -> torch.Stream | None:
        """The stream of the caller's device work; None on the CPU."""
        if self.device.type == "cpu":
            return None
        return torch.accelerator.current_stream(self.device)

    def _order_after_arrival(self, cargo: Cargo, stream: torch.Stream | None) -> None:
        """What the stream does from now on, it does when the group is there."""
        if cargo.arrival is not None and stream is not None:
            stream.wait_event(cargo.arrival)

    def _is_coming(self, request: Request) -> bool:
        """Whether what a request waits for is on its way: then it lacks no room."""
        if request.want is Want.LEASE:
            return self._planner.state_of(request.version) in (State.RESERVED, State.ARRIVING)
        return request.want is Want.SAVE

    def _call_in(self) -> None:
        """Take back what is lent and not used: somebody would have to wait."""
        while self._resting:
            loan, _ = self._resting.popitem()
            self._take_away(loan)

    # Between the planner and the carrier -------------------------------------------------------

    def _deliver(self) -> None:
        """Hand the planner's instructions on, in order, and wake whoever waits.

        What is over at once makes the planner instruct more, until nothing is.
        """
        while instructions := self._planner.instructions():
            for copy, error in self._carrier.accept(instructions):
                self._note_end(copy, error)
        self._observer.level(self._planner.used)
        self._waiting.changed()

    @step
    def _ending(self, copy: Copy) -> None:
        self._planner.ending(copy.key, copy.dst, copy.src)
        self._deliver()

    @step
    def _arrived(self, copy: Copy, error: BaseException | None) -> None:
        self._note_end(copy, error)
        self._carrier.moved(copy)
        self._deliver()

    def _note_end(self, copy: Copy, error: BaseException | None) -> None:
        if error is None:
            timed = copy.dst is not Tier.DEVICE  # else it is queued
            self._planner.arrived(copy.key, copy.dst, copy.src, timed=timed)
        else:
            self._planner.failed(copy.key, copy.dst, copy.src, error)

    # Mending -----------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Make the books anew from what there is, after a step was cut short.

        What was learned of the order of use is lost, and so are hints. Whoever waits asks again.
        """
        if self._ended():
            return
        self._carrier.catch_up()
        self._carrier.mend()
        for wish in self._waiting.lost_wishes():
            self._putting.pop(wish.version, None)
        planner = self._new_planner()
        planner.take_stock(self._what_there_is())
        for tier, nbytes in self._planner.peak.items():
            planner.peak[tier] = max(planner.peak[tier], nbytes)
        self._planner = planner
        for request in self._waiting.requests():
            if request.want in (Want.LEASE, Want.HOLD):
                request.version = ""
        self._waiting.count_again((lent.caller, lent.version) for lent in self._out)
        self.held_for_good = sum(
            self._carrier.cargo(lent.version).spec.nbytes
            for lent in self._out
            if lent.held is not None and lent.caller is None
        )
        self._deliver()

    def _what_there_is(self) -> Iterator[Found]:
        lent: dict[str, list[Lent]] = {}
        for loan in self._out:
            lent.setdefault(loan.version, []).append(loan)
        moving = self._carrier.moving()
        for version, cargo in self._carrier.all_cargo():
            loans = lent.get(version, [])
            moves = tuple((copy.src, copy.dst) for copy in moving if copy.key == version)
            yield Found(
                version,
                cargo.spec.nbytes,
                tuple(sorted({*cargo.tiers, *(dst for _, dst in moves)})),
                moves,
                tuple((n.access, n.caller is None) for n in loans if n.held is None),
                next((n.held for n in loans if n.held is not None), None),
                backed=cargo.backed,
                guided=cargo.guided,
                kept=cargo.kept,
                shown=self._versions.get(name_of(version)) == version,
                claimed=version in self._putting,
            )


def _shut_down(carrier: ThreadCarrier, directory: ObjectDirectory, pid: int) -> None:
    # A forked child has neither the threads nor the lock. And a thread that a dead disk has stopped
    # may still write, some day: until then nobody else may have the directory.
    if os.getpid() == pid and carrier.stop():
        directory.close()
