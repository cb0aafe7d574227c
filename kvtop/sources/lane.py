"""A thread that runs blocking calls one at a time, and that may hang without harm."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class StuckError(Exception):
    """A call has not come back.

    Args:
        seconds: How long it has been running.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:.0f} s")
        self.seconds = seconds


class _Job(Generic[T]):
    """One call, and the loop that waits for it."""

    def __init__(
        self,
        call: Callable[[], T],
        loop: asyncio.AbstractEventLoop,
        started_s: float,
    ) -> None:
        self.call = call
        self.loop = loop
        self.started_s = started_s
        self.future: asyncio.Future[T] = loop.create_future()

    def run(self) -> Callable[[], None]:
        """Make the call; what is returned delivers its outcome, on the loop."""
        try:
            value = self.call()
        except Exception as error:
            return functools.partial(self._deliver, self.future.set_exception, error)
        return functools.partial(self._deliver, self.future.set_result, value)

    def _deliver(self, set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not self.future.done():
            set_outcome(outcome)


class Lane:
    """One daemon thread. While a call of it hangs no other is started in it.

    The thread is a daemon and nobody joins it: leaving the program never waits for it.

    Args:
        name: Of the thread.
        monotonic: Clock, seconds.
    """

    def __init__(self, name: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._monotonic = monotonic
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: _Job[Any] | None = None

    @property
    def busy(self) -> bool:
        """A call is running."""
        return self._current is not None

    async def call(self, call: Callable[[], T], deadline_s: float) -> T:
        """Run a call in the thread.

        Args:
            call: Blocking function.
            deadline_s: How long to wait for it. It goes on in the thread after that.

        Raises:
            StuckError: It, or an earlier call, has not come back.
            Exception: Whatever the call raises.
        """
        job = self.start(call)
        try:
            await asyncio.wait({job.future}, timeout=deadline_s)
        finally:
            if not job.future.done():
                job.future.cancel()
        if job.future.cancelled():
            raise StuckError(self._monotonic() - job.started_s)
        return job.future.result()

    def start(self, call: Callable[[], T]) -> _Job[T]:
        """Hand a call to the thread and do not wait.

        Raises:
            StuckError: An earlier call has not come back.
        """
        current = self._current
        if current is not None:
            raise StuckError(self._monotonic() - current.started_s)
        job = _Job(call, asyncio.get_running_loop(), self._monotonic())
        self._current = job
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def end(self) -> None:
        """Let the thread end after its call, if that ever returns. Does not wait."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            deliver = job.run()
            # Free before the waiter wakes, who may start the next call at once.
            self._current = None
            # The loop may be gone by the time a hung call returns.
            with contextlib.suppress(RuntimeError):
                job.loop.call_soon_threadsafe(deliver)
