"""One daemon thread for blocking calls of one kind.

`asyncio.to_thread` is not used: the default executor's threads are waited for at
exit, and a call that hangs in the kernel would then hang kvtop's quitting.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Worker:
    """Runs calls one after the other on its own daemon thread.

    Args:
        name: Name of the thread, for py-spy and debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], _T]) -> _T:
        """The result of `function`, or what it raises; waits for earlier calls first."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def job() -> None:
            if future.cancelled():
                return
            result, error = None, None
            try:
                result = function()
            except BaseException as caught:  # carried over to the caller
                error = caught
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return await future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Let the thread end after its current call; does not wait for it."""
        self._jobs.put(None)
        self._thread = None
