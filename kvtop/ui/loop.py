"""The event loop around the app: signals in, and out without waiting for anything that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence

from kvtop.errors import ExitCode
from kvtop.ui.app import KvtopApp
from kvtop.ui.terminal import Guard

CLOSE_S = 1.5
"""Longest wait for sources at the end."""
RECORD_S = 1.0
"""Longest wait for the disk of a recording; what it committed is safe anyway."""
_KILL_AFTER_S = 3.0
"""After a signal the process ends by then, whatever hangs."""


def run_app(app: KvtopApp, guard: Guard, signals: Sequence[int]) -> int:
    """Run the app on an event loop of its own; threads that hang are left behind.

    Args:
        app: What is run.
        guard: Gives the terminal back.
        signals: Numbers of signals that end the app.

    Returns:
        0 when the user quit, 128 + the number of the signal that ended it.

    Raises:
        BaseException: What ended the app, after the terminal was given back.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        code = loop.run_until_complete(_main(app, guard, signals))
    finally:
        # Not asyncio.run: it would wait for every thread, and one may hang in a driver.
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(Exception):
            loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        loop.close()
    if app.fault is not None:
        raise app.fault
    return code


async def _main(app: KvtopApp, guard: Guard, signals: Sequence[int]) -> int:
    loop = asyncio.get_running_loop()
    ended: list[int] = []

    def end(number: int) -> None:
        ended.append(number)
        _kill_later(number, guard)
        app.exit(128 + number)

    for number in signals:
        loop.add_signal_handler(number, end, number)
    try:
        code = await app.run_async()
    finally:
        guard.restore()
        app.notes += app.desk.close(RECORD_S)
        await app.close_feed(CLOSE_S)
        for number in signals:
            loop.remove_signal_handler(number)
    if ended:
        return 128 + ended[0]
    return int(ExitCode.OK) if code is None else code


def _kill_later(number: int, guard: Guard) -> None:
    """End the process even if the event loop or the terminal hangs."""

    def kill() -> None:
        guard.restore()
        os._exit(128 + number)

    timer = threading.Timer(_KILL_AFTER_S, kill)
    timer.daemon = True
    timer.start()
