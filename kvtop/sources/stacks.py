"""Top Python frames of vLLM processes, sampled with py-spy.

Starting py-spy costs as much as taking ten samples, so it is not started for each: one run
of `py-spy record` takes the samples of some seconds. Measured on vLLM 0.32: a start is
about 13 ms of CPU time, a sample about 1 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kvtop.model.snapshot import Stacks
from kvtop.sources.base import SourceError
from kvtop.sources.stacks_parse import Slice, parse_dump, parse_record, stacks_of
from kvtop.sources.stacks_spy import GoneError, TransientError, dump, find_py_spy, record

WINDOW_S = 60.0
"""Age at which samples are dropped."""
RATE_HZ = 2
"""Samples a second of a process that is looked at alone; of several, half as many of each."""
SLICES_S = (2, 4, 8, 10)
"""Lengths of the runs of py-spy, the last one again and again: short at first, since what a run
has seen is known at its end."""
MAX_TARGETS = 8
"""Most processes sampled at a time; engines before workers before API servers."""
DUMP_DEADLINE_S = 1.5
"""For one `py-spy dump`; it takes about 0.05 s on a quiet machine."""
TRIES = 3
"""Tries for one dump: a busy process moves on while it is read, so one often fails."""
PATIENCE = 3
"""Failed runs in a row of one process before its older samples are no longer shown."""
REST_S = 1.0
"""Pause after a run that failed, and least time between two."""
LONG_REST_S = 10.0
"""Pause after a failure that does not pass by itself."""

_ORDER = {"engine": 0, "worker": 1, "api": 2}


class _Follower:
    """Samples one process until it is told to end."""

    def __init__(self, source: StacksSource, pid: int, role: str) -> None:
        self.stacks: Stacks | None = None
        """What the window shows. None: nothing yet, or no more."""
        self.error: SourceError | None = None
        """Why the newest attempt has failed. None: it has not."""
        self.tried = asyncio.Event()
        """Set after the first attempt."""
        self._source = source
        self._pid = pid
        self._role = role
        self._window: deque[Slice] = deque()
        self._runs = 0
        self._failures = 0
        self._spent_s = 0.0
        self.task = asyncio.ensure_future(self._follow())

    async def end(self) -> None:
        """End the run that is under way."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.task

    async def _follow(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                taken = await self._take()
            except GoneError as error:
                self._forget(SourceError(str(error)))
                rest = REST_S
            except SourceError as error:
                self._forget(error)
                rest = LONG_REST_S
            except (TransientError, ValueError) as error:
                self._failed(SourceError(str(error), "it is asked again by itself"))
                rest = REST_S
            else:
                first = self.stacks is None
                self._add(taken)
                # The look at the start takes no time; a run that took none is not made at once.
                rest = 0.0 if first else max(begun + REST_S - time.monotonic(), 0.0)
            self.tried.set()
            await asyncio.sleep(rest)

    async def _take(self) -> Slice:
        """The first samples at once, then those of some seconds."""
        py_spy = self._source.py_spy()
        if not self._window:
            return await self._look(py_spy)
        seconds, rate = self._source.slice_of(self._runs)
        begun = self._source.clock()
        ended = await record(py_spy, self._pid, rate, seconds)
        self._runs += 1
        self._spent_s += ended.cpu_s
        times = (begun, self._source.clock())
        # It takes one sample less than asked for.
        taken = parse_record(ended.written, ended.said, self._pid, rate * seconds - 1, times)
        if taken.active:
            return taken
        look = await self._look(py_spy)
        # A thread may have begun to run just now; that is for the next slice.
        waiting = look.waiting or look.active
        return replace(taken, waiting=waiting, time_s=look.time_s)

    async def _look(self, py_spy: str) -> Slice:
        """All threads at one moment; a run that the process outran is made again at once."""
        started = time.monotonic()
        for left in reversed(range(TRIES)):
            try:
                ended = await dump(py_spy, self._pid, DUMP_DEADLINE_S)
                self._spent_s += ended.cpu_s
                return parse_dump(ended.written, self._source.clock())
            except TransientError:
                if left == 0 or time.monotonic() - started > DUMP_DEADLINE_S / 2:
                    raise
        raise AssertionError("unreachable")

    def _add(self, taken: Slice) -> None:
        self.error, self._failures = None, 0
        cost, self._spent_s = self._spent_s, 0.0
        self._window.append(replace(taken, cost_s=cost))
        while self._window[0].time_s < taken.time_s - WINDOW_S:
            self._window.popleft()
        self.stacks = stacks_of(self._pid, self._role, tuple(self._window))

    def _failed(self, error: SourceError) -> None:
        self._failures += 1
        self.error = error
        if self._failures >= PATIENCE:
            self._forget(error)

    def _forget(self, error: SourceError) -> None:
        self.error, self.stacks = error, None
        self._window.clear()
        self._runs = 0


class StacksSource:
    """Samples processes, and only while `enabled`.

    Implements `Source[tuple[Stacks, ...]]`. Sampling goes on between two reads; a read
    only tells what is known, and starts and ends runs. While it is not enabled, no
    process of py-spy is there, and nothing is returned.

    Args:
        targets: Role (`engine`, `worker`, `api`) by pid.
        clock: Unix time, for the samples.
        locate: Finds py-spy.
    """

    name = "stacks"
    kind = "stacks"
    period_s = 1.0
    deadline_s = 6.0
    target_pid: int | None = None

    def __init__(
        self,
        targets: Mapping[int, str] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        locate: Callable[[], str | None] = find_py_spy,
    ) -> None:
        self.targets: Mapping[int, str] = dict(targets or {})
        """Role by pid; may be replaced at any time."""
        self.only: Sequence[int] = ()
        """Pids of the targets that are looked at now. Empty: all."""
        self.enabled = True
        """False: read nothing, start nothing."""
        self.clock = clock
        """Unix time."""
        self.slices_s: Sequence[int] = SLICES_S
        """Lengths of the runs, seconds; the last one is repeated."""
        self._locate = locate
        self._followers: dict[int, _Follower] = {}

    async def read(self) -> tuple[Stacks, ...]:
        """The top frames of all windows. Waits for the first samples of new targets.

        A process that ends, or that cannot be read, hides no other.

        Raises:
            SourceError: py-spy is missing, or no target could be read.
        """
        targets = self._chosen()
        gone = [self._followers.pop(pid) for pid in list(self._followers) if pid not in targets]
        await asyncio.gather(*(follower.end() for follower in gone))
        if not targets:
            return ()
        self.py_spy()
        for pid, role in targets.items():
            if pid not in self._followers:
                self._followers[pid] = _Follower(self, pid, role)
        followers = [self._followers[pid] for pid in targets]
        waits = [asyncio.ensure_future(one.tried.wait()) for one in followers]
        try:
            await asyncio.wait(waits, timeout=2 * DUMP_DEADLINE_S)
        finally:
            for wait in waits:
                wait.cancel()
        stacks = tuple(one.stacks for one in followers if one.stacks is not None)
        errors = [one.error for one in followers if one.error is not None]
        if errors and not stacks:
            raise errors[0]
        return stacks

    def _chosen(self) -> dict[int, str]:
        """The targets that are sampled now, in the order in which they are told."""
        if not self.enabled:
            return {}
        targets = dict(self.targets)
        pids = [pid for pid in self.only if pid in targets] if self.only else list(targets)
        pids.sort(key=lambda pid: (_ORDER.get(targets[pid], 9), pid))
        return {pid: targets[pid] for pid in pids[:MAX_TARGETS]}

    def slice_of(self, number: int) -> tuple[int, int]:
        """Seconds and samples a second of a process's next run.

        Args:
            number: Runs of that process so far.
        """
        seconds = self.slices_s[min(number, len(self.slices_s) - 1)]
        return seconds, RATE_HZ if len(self._followers) <= 1 else RATE_HZ // 2

    def py_spy(self) -> str:
        """Path of py-spy.

        Raises:
            SourceError: It is missing.
        """
        path = self._locate()
        if path is None:
            raise SourceError("py-spy is not installed", "pip install py-spy beside kvtop")
        return path

    async def close(self) -> None:
        """End all runs."""
        followers = list(self._followers.values())
        self._followers.clear()
        await asyncio.gather(*(follower.end() for follower in followers))
