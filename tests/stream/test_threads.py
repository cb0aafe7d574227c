"""Blocking calls off the event loop: results, errors, and quitting while one hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from kvtop.stream.threads import Worker


async def test_result_and_thread() -> None:
    worker = Worker("a thread")
    assert await worker.call(lambda: threading.current_thread().name) == "a thread"
    worker.close()


async def test_error_is_carried_over() -> None:
    worker = Worker("w")
    with pytest.raises(ZeroDivisionError):
        await worker.call(lambda: 1 // 0)
    assert await worker.call(lambda: 2) == 2
    worker.close()


async def test_loop_goes_on_while_a_call_blocks() -> None:
    worker, gate = Worker("w"), threading.Event()
    task = asyncio.ensure_future(worker.call(gate.wait))
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    assert await task is True
    worker.close()


def test_a_hung_call_does_not_hold_up_the_exit() -> None:
    code = (
        "import asyncio, time\n"
        "from kvtop.stream.threads import Worker\n"
        "async def main():\n"
        "    task = asyncio.ensure_future(Worker('w').call(lambda: time.sleep(3600)))\n"
        "    await asyncio.sleep(0.05)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == 0
