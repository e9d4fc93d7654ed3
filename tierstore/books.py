"""What a store believes: the planner, the mover, and who waits, in agreement.

This is the only module that knows both planner and mover. Every step follows one pattern: ask
the planner, and hand its instructions to the mover, so that their order is kept. The mover's
threads report back in the same way. Nothing here waits but `_wait`, between steps.

The planner can be made anew at any time. What is true of a group is known elsewhere: which copies
the mover has made and is making, which version of a key readers see, and what is lent. If a step
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
from typing import NoReturn, TypeVar

import torch

from tierstore.lessons import Lessons
from tierstore.model import events
from tierstore.model.errors import (
    BudgetError,
    CaptureError,
    ClosedError,
    DuplicateKeyError,
    StoreTimeoutError,
    UnknownKeyError,
)
from tierstore.model.groups import NO_GROUP, GroupId, GroupSpec, Source
from tierstore.model.locks import RLock
from tierstore.model.moves import Copy, Instruction
from tierstore.model.tiers import Access, Tier
from tierstore.observe.event_log import EventLog
from tierstore.observe.observer import Observer
from tierstore.plan.planner import Planner
from tierstore.plan.policy import policy_named
from tierstore.plan.records import State
from tierstore.plan.schedule import LearnedOrder
from tierstore.settings import Settings
from tierstore.steps import step
from tierstore.tiers.assembly import StoreTiers, build
from tierstore.tiers.directory import ObjectDirectory
from tierstore.tiers.disk import FileStamp
from tierstore.tiers.entry import GroupEntry
from tierstore.tiers.mover import Mover, Told
from tierstore.tiers.objects import object_name
from tierstore.tiers.streams import is_captured
from tierstore.tiers.workers import weakly
from tierstore.waiting import LOOK_AGAIN, Lent, Request, WaitingRoom, Want, Wish

T = TypeVar("T")


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
        self._versions: dict[str, GroupId] = {}  # key -> the version that readers see
        self._putting: dict[GroupId, None] = {}  # versions that nobody sees yet
        self._out: dict[Lent, None] = {}  # what was not given back yet
        self._resting: dict[Lent, Lent] = {}  # what of it is not used at this moment
        self._numbers = itertools.count(1)
        self._lessons = Lessons()
        self._events = EventLog()
        self._closing = False  # nothing new may begin; what there is, is being saved
        self._closed = False
        self._directory = ObjectDirectory(settings.disk_dir)
        try:
            self._tiers, self._mover = self._new_tiers()
        except BaseException:
            self._directory.close()
            raise
        self._finalizer = weakref.finalize(
            self, _shut_down, self._mover, self._directory, self._pid
        )
        try:
            device = self._tiers.device
            times = None if device is None else device.times
            self._observer = Observer(self._mover.journal, times, self._lessons.ran)
            self._recover()
            self._observer.level(self._planner.used)
        except BaseException:
            self._finalizer()
            raise

    def _new_planner(self) -> Planner:
        schedule = LearnedOrder()
        policy = policy_named(self._settings.policy, schedule)
        told = self.device.type != "cpu"
        return Planner(self._settings.budgets, policy, schedule, told=told)

    def _new_tiers(self) -> tuple[StoreTiers, Mover]:
        # Its threads must not keep a forgotten store alive.
        report, ending = (weakly(weakref.WeakMethod(m)) for m in (self._arrived, self._ending))
        given = self._settings
        told = Told(report, ending, self._lessons.moved)
        return build(
            given.device, given.budgets, self._directory, given.verify, told, given.extra_tiers
        )

    def _recover(self) -> None:
        for stored in self._directory.objects():
            version = GroupId(stored.key, 0)
            spec = stored.spec()
            source = stored.source(self._directory.path_of(stored.key))
            self._mover.add(GroupEntry(version, spec, source, stored.packing, single=stored.single))
            self._tell(events.Registered(version, spec.nbytes))
            self._tiers.disk.add_file(stored.key)
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
        order = self._newest_so_far()
        self._mover.add(
            GroupEntry(
                version, spec, source, single=single, stamps=stamps, order=order, backed=True
            )
        )
        self._tell(events.Registered(version, spec.nbytes, backing=True))
        self._versions[key] = version

    def _refuse_duplicate(self, key: str) -> None:
        if key in self._versions:
            raise DuplicateKeyError(key)

    def _new_version(self, key: str) -> GroupId:
        return GroupId(key, next(self._numbers))

    def _newest_so_far(self) -> int:
        return next(self._numbers)

    def _lookup(self, key: str) -> GroupId:
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

    def _ended(self) -> bool:
        """Whether the store was closed, by `close` or by the end of the interpreter."""
        return self._closed or self._mover.stopped

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
            request.version = NO_GROUP
            return
        self._waiting.leave(request)
        self._observer.gave_up(request)
        if request.loan is not None:
            self._take_away(request.loan)
        wish, request.version = request.wish, NO_GROUP
        self._take_back(wish)

    def _take_back(self, wish: Wish) -> None:
        """See that the planner pursues a wish no more."""
        if wish.version in self._planner:
            if wish.want is Want.HOLD and wish.purpose is not None:
                self._tell(events.HostWithdrawn(wish.version, wish.purpose))
            elif wish.want is not Want.SAVE:
                self._tell(events.Withdrawn(wish.version))
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

    def _refuse_the_hopeless(self, request: Request, held: set[GroupId]) -> None:
        """Raise: whoever could give the room (or the group) back is waiting too."""
        raise NotImplementedError

    # Leases that rest ---------------------------------------------------------------------------

    @step
    def _rest(self, loan: Lent) -> bool:
        if self._ended() or loan not in self._out or self._waiting.anybody():
            return False
        if loan.access is not Access.READ or loan.held is not None:
            return False
        if (device := self._tiers.device) is not None:
            loan.stream = self.current_stream()
            mark = device.times.mark(loan.stream)
            device.used_on(self._mover.entry(loan.version), mark.event)
        self._resting[loan] = loan
        return True

    def _resume(self, loan: Lent) -> bool:
        self._refuse_capture()
        # Who takes it out of there has it: this caller, or one who calls it in.
        if self._resting.pop(loan, None) is None:
            return False
        self._order_after_arrival(self._mover.entry(loan.version), self.current_stream())
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

    def _order_after_arrival(self, entry: GroupEntry, stream: torch.Stream | None) -> None:
        """What the stream does from now on, it does when the group is there."""
        if entry.arrival is not None and stream is not None:
            stream.wait_event(entry.arrival)

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

    # Between the planner and the mover -------------------------------------------------------

    def _tell(self, event: events.Event) -> None:
        """Tell the planner what happened, and see that what it instructs is done."""
        self._deliver(self._handled(event))

    def _handled(self, event: events.Event) -> list[Instruction]:
        """Tell the planner what happened. Returns its instructions, for `_deliver`."""
        now = time.monotonic()
        instructions = self._planner.handle(event, now)
        self._events.add((now, event))
        return instructions

    def _deliver(self, instructions: list[Instruction]) -> None:
        """Hand the planner's instructions on, in order, and wake whoever waits.

        What is over at once makes the planner instruct more, until nothing is.
        """
        while instructions:
            over = self._mover.accept(instructions)
            instructions = [more for copy, error in over for more in self._ended_copy(copy, error)]
        self._observer.level(self._planner.used)
        self._waiting.changed()

    @step
    def _ending(self, copy: Copy) -> None:
        self._tell(events.Ending(copy.key, copy.src, copy.dst))

    @step
    def _arrived(self, copy: Copy, error: BaseException | None) -> None:
        instructions = self._ended_copy(copy, error)
        self._mover.moved(copy)
        self._deliver(instructions)

    def _ended_copy(self, copy: Copy, error: BaseException | None) -> list[Instruction]:
        if error is not None:
            return self._handled(events.Failed(copy.key, copy.src, copy.dst, error))
        timed = copy.dst is not Tier.DEVICE  # else it is queued
        return self._handled(events.Arrived(copy.key, copy.src, copy.dst, timed))

    # Mending -----------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Make the books anew from what there is, after a step was cut short.

        What was learned of the order of use is lost, and so are hints. Whoever waits asks again.
        """
        if self._ended():
            return
        self._mover.catch_up()
        self._mover.mend()
        for wish in self._waiting.lost_wishes():
            self._putting.pop(wish.version, None)
        peak, self._planner = self._planner.peak, self._new_planner()
        self._events.clear()
        instructions = self._handled(events.Recovered(tuple(self._what_there_is())))
        for tier, nbytes in peak.items():
            self._planner.peak[tier] = max(self._planner.peak[tier], nbytes)
        for request in self._waiting.requests():
            if request.want in (Want.LEASE, Want.HOLD):
                request.version = NO_GROUP
        self._waiting.count_again((lent.caller, lent.version) for lent in self._out)
        self.held_for_good = sum(
            self._mover.entry(lent.version).spec.nbytes
            for lent in self._out
            if lent.held is not None and lent.caller is None
        )
        self._deliver(instructions)

    def _what_there_is(self) -> Iterator[events.RecoveredGroup]:
        lent: dict[GroupId, list[Lent]] = {}
        for loan in self._out:
            lent.setdefault(loan.version, []).append(loan)
        moving = self._mover.moving()
        for entry in self._mover.entries():
            version = entry.key
            loans = lent.get(version, [])
            moves = tuple((copy.src, copy.dst) for copy in moving if copy.key == version)
            yield events.RecoveredGroup(
                version,
                entry.spec.nbytes,
                tuple(sorted({*self._mover.tiers_of(entry), *(dst for _, dst in moves)})),
                moves,
                tuple((n.access, n.caller is None) for n in loans if n.held is None),
                next((n.held for n in loans if n.held is not None), None),
                backing=Tier.DISK if entry.backed else None,
                caller_scheduled=entry.guided,
                sticky=entry.kept,
                visible=self._versions.get(version.key) == version,
                claimed=version in self._putting,
            )


def _shut_down(mover: Mover, directory: ObjectDirectory, pid: int) -> None:
    # A forked child has neither the threads nor the lock. And a thread that a dead disk has stopped
    # may still write, some day: until then nobody else may have the directory.
    if os.getpid() == pid and mover.stop():
        directory.close()
