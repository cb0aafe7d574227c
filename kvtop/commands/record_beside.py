"""What a headless recording does beside writing ticks: stacks when a finding begins, block tables.

Each runs as a task of its own: no snapshot waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from kvtop.errors import KvtopError
from kvtop.flame.auto import AutoCapture
from kvtop.flame.capture import Plan, Recording
from kvtop.flame.record import failed, recorded
from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Finding, Snapshot
from kvtop.session.chosen import Chooser

SECONDS = 30.0
"""Length of a capture."""
RATE_HZ = 200
"""Its samples a second."""
_END_S = 7.0
"""Longest wait for py-spy at the end."""


class Sink(Protocol):
    """A recorder, or the black box."""

    def detail(self, engine_pid: int | None, detail: Detail) -> object:
        """Keep a block table."""

    def capture(self, capture: StackCapture) -> object:
        """Keep captured stacks."""


class Asked(Protocol):
    """Where block tables come from."""

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        """One table, asked now; a failure is in `Detail.error`."""


class Beside:
    """Captures and block tables of one recording.

    Args:
        sinks: Where they go.
        stream: Gives block tables.
        rules: Rules of the findings that start a capture; empty: none does.
        say: Tells the user.
        plan: Length and rate of captures; its pid is replaced.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        stream: Asked,
        rules: frozenset[str],
        say: Callable[[str], None],
        plan: Plan | None = None,
    ) -> None:
        self._sinks = sinks
        self._stream = stream
        self._auto = AutoCapture(rules) if rules else None
        self._say = say
        self._plan = plan or Plan(0, SECONDS, RATE_HZ)
        self._chooser = Chooser()
        self._tables: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[None] | None = None
        self._recording: Recording | None = None

    def take(self, snapshot: Snapshot, findings: tuple[Finding, ...]) -> None:
        """Look at the next snapshot; returns at once."""
        wanted = self._chooser.wanted(snapshot, findings)
        if wanted and (self._tables is None or self._tables.done()):
            self._tables = _start(self._ask(wanted))
        if self._auto is None:
            return
        finding = self._auto.wanted(findings, snapshot.mono_s)
        if finding is None or finding.engine_pid is None:
            return
        if self._taking is None or self._taking.done():
            self._taking = _start(self._capture(finding.engine_pid, finding.rule))

    async def _ask(self, wanted: list[tuple[Engine, str]]) -> None:
        for engine, name in wanted:
            detail = await self._stream.request_detail(engine, name)
            for sink in self._sinks:
                sink.detail(engine.pid, detail)

    async def _capture(self, pid: int, why: str) -> None:
        # Threads that wait are what a stall is about.
        idle = why.startswith("health.")
        plan = Plan(pid, self._plan.seconds, self._plan.rate_hz, idle=idle)
        began = time.time()
        self._say(f"{why}: taking stacks of process {pid} for {plan.seconds:g} s")
        try:
            self._recording = Recording(plan)
            capture = await self._recording.run()
            kept = await asyncio.to_thread(recorded, capture, why)
            self._say("; ".join([f"recorded {kept.samples} stacks for {why}", *capture.warnings]))
        except KvtopError as error:
            kept = failed(plan, began, error, why)
            self._say(f"no stacks for {why}: {error.line()}")
        for sink in self._sinks:
            sink.capture(kept)

    async def close(self) -> None:
        """End what runs; of a capture under way the stacks so far are kept.

        py-spy is told to end at once, and killed if it does not.
        """
        if self._taking is not None and not self._taking.done() and self._recording is not None:
            self._recording.finish()
            await asyncio.wait({self._taking}, timeout=_END_S)
        tasks = {task for task in (self._tables, self._taking) if task and not task.done()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_S)


def _start(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(_ended)
    return task


def _ended(task: asyncio.Task[None]) -> None:
    """What goes wrong beside a recording must not end it; asyncio need not print it either."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
