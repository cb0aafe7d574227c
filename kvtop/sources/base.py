"""What every source has in common: the protocol, its one error, and the poll loop.

A source reads one thing. `poll` asks it again and again and turns whatever happens,
a value, a failure, no answer, a fault of kvtop's own, into a `Reading`, so that
nothing downstream ever sees an exception.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from kvtop.model.snapshot import SourceState, SourceStatus

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MAX_BACKOFF_S = 10.0
"""Longest wait between two attempts on a failing source."""
MIN_REST_S = 0.05
"""Shortest rest between two reads, so that a slow source cannot keep the loop busy."""


class SourceError(Exception):
    """A source could not read, for a reason that can be told to the user.

    Args:
        reason: What is wrong, one plain line.
        remedy: What to do about it, one plain line; empty when there is nothing to do.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Source(Protocol[T_co]):
    """One thing that can be read over and over."""

    @property
    def name(self) -> str:
        """Unique, as in `SourceStatus.name`."""

    @property
    def kind(self) -> str:
        """As in `SourceStatus.kind`."""

    @property
    def period_s(self) -> float:
        """Seconds between two reads when nothing else is asked for."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which a read is given up."""

    @property
    def target_pid(self) -> int | None:
        """The process it looks at. None: not about one process."""

    async def read(self) -> T_co:
        """Read once.

        Raises:
            SourceError: It could not be read, and this is why. Anything else that is
                raised counts as a fault of kvtop's own.
        """

    async def close(self) -> None:
        """Give back what is held. Never raises, never waits long."""


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """The outcome of one attempt to read a source."""

    status: SourceStatus
    """How the source is doing; `value_time_s` in it is when `value` was taken."""
    value: T | None
    """The newest value there is; older than this attempt when `status` is FAILED."""
    time_s: float
    """Wall clock at the end of the attempt."""
    mono_s: float
    """Monotonic clock at the end of the attempt."""


class Clock(Protocol):
    """Time, injected so that tests and replay decide what it is."""

    def time(self) -> float:
        """Unix seconds."""

    def monotonic(self) -> float:
        """Seconds that never go backwards."""

    async def sleep(self, seconds: float, /) -> None:
        """Wait."""


class SystemClock:
    """The clock of this machine."""

    def time(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds that never go backwards."""
        return time.monotonic()

    async def sleep(self, seconds: float, /) -> None:
        """Wait without holding the event loop."""
        await asyncio.sleep(seconds)


def one_line(text: str, limit: int = 200) -> str:
    """Make text from outside fit for a status: one line, no control characters, bounded.

    Args:
        text: Anything.
        limit: Most characters kept; more are cut and marked with `...`.
    """
    words = "".join(c if c.isprintable() else " " for c in text[: limit * 4]).split()
    line = " ".join(words)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def seconds(value: float) -> str:
    """A short time for a sentence: `3 s`, `0.5 s`."""
    return f"{value:g} s"


class _Poller(Generic[T]):
    """State of one poll loop between its attempts."""

    def __init__(self, source: Source[T], clock: Clock, stale: Callable[[T], str] | None) -> None:
        self.source = source
        self.clock = clock
        self.stale = stale
        self.value: T | None = None
        self.value_time_s: float | None = None
        self.state = SourceState.STARTING
        self.since_s = clock.time()
        self.failures = 0
        self.stuck: asyncio.Task[T] | None = None

    def reading(self, state: SourceState, reason: str = "", remedy: str = "") -> Reading[T]:
        now = self.clock.time()
        if state is not self.state:
            self.state, self.since_s = state, now
        status = SourceStatus(
            name=self.source.name,
            kind=self.source.kind,
            state=state,
            since_s=self.since_s,
            reason=reason,
            remedy=remedy,
            value_time_s=self.value_time_s,
            period_s=self.source.period_s,
            target_pid=self.source.target_pid,
        )
        return Reading(status, self.value, now, self.clock.monotonic())

    async def attempt(self) -> Reading[T]:
        try:
            value = await self._within(self.source.deadline_s)
            reason = self.stale(value) if self.stale else ""
        except SourceError as error:
            self.failures += 1
            return self.reading(SourceState.FAILED, one_line(error.reason), one_line(error.remedy))
        except Exception as error:
            self.failures += 1
            text = one_line(f"{type(error).__name__}: {error}", 160)
            return self.reading(
                SourceState.FAILED,
                f"kvtop failed while reading {self.source.name}: {text}",
                "this is a fault of kvtop; please report it",
            )
        self.failures = 0
        self.value, self.value_time_s = value, self.clock.time()
        return self.reading(SourceState.STALE if reason else SourceState.OK, reason)

    async def _within(self, deadline_s: float) -> T:
        """Read with a deadline.

        Not `asyncio.wait_for`: on Python 3.10 and 3.11 it can swallow a cancellation that
        comes together with the result, and it waits for a read that ignores its own
        cancellation. Such a read is left behind here, and no second one is started
        beside it.
        """
        if self.stuck is not None and self.stuck.done():
            self.stuck = None
        if self.stuck is None:
            read: Coroutine[Any, Any, T] = self.source.read()
            task = asyncio.ensure_future(read)
        else:
            task = self.stuck
        try:
            done, _ = await asyncio.wait({task}, timeout=deadline_s)
        except asyncio.CancelledError:
            _abandon(task)
            raise
        if done and self.stuck is None and not task.cancelled():
            return task.result()
        if not done and self.stuck is None:
            _abandon(task)
            self.stuck = task
        raise SourceError(f"no answer within {seconds(deadline_s)}", "it is asked again by itself")


def _abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a read that nobody waits for; whatever it still raises is of no interest."""
    task.cancel()
    task.add_done_callback(lambda t: None if t.cancelled() else (t.exception(), None)[1])


async def poll(
    source: Source[T],
    clock: Clock,
    publish: Callable[[Reading[T]], None],
    *,
    interval: Callable[[], float] | None = None,
    stale: Callable[[T], str] | None = None,
) -> NoReturn:
    """Read a source for ever and publish every outcome.

    The first thing published is a STARTING reading, before the first read. A failing
    source keeps its last value and is asked less and less often: the pause doubles with
    each failure, to `MAX_BACKOFF_S` at most, and is back to normal after one success.

    Args:
        source: What to read. It is not closed here.
        clock: For time stamps and pauses. The deadline runs on the event loop.
        publish: Called with every reading, on the event loop; must not raise.
        interval: Seconds between two starts of a read, asked before each pause.
            None: the source's own period.
        stale: Says in one plain line why a value that was read is out of date all the
            same, or "" when it is not. None: values are never stale.

    Raises:
        asyncio.CancelledError: It was cancelled; this is the only way out.
    """
    poller = _Poller(source, clock, stale)
    publish(poller.reading(SourceState.STARTING))
    while True:
        started = clock.monotonic()
        publish(await poller.attempt())
        pause = max(MIN_REST_S, interval() if interval else source.period_s)
        if poller.failures:
            pause = max(pause, min(MAX_BACKOFF_S, pause * 2.0 ** min(poller.failures - 1, 16)))
        await clock.sleep(max(MIN_REST_S, started + pause - clock.monotonic()))
