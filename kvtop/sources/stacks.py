"""Top Python frames of vLLM processes, sampled with py-spy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvtop.model.snapshot import Stacks
from kvtop.sources.base import SourceError
from kvtop.sources.stacks_parse import Dump, parse_dump, stacks_of
from kvtop.sources.stacks_spy import (
    GoneError,
    TransientError,
    children_cpu_s,
    dump,
    find_py_spy,
)

WINDOW = 60
"""Dumps kept of each process."""
MAX_TARGETS = 8
"""Most processes sampled a round; engines before workers before API servers."""
RUN_DEADLINE_S = 1.5
"""For one run of py-spy; it takes about 0.02 s on a quiet machine."""
TRIES = 3
"""Runs of py-spy for one dump: a busy process moves on while it is read, so a run often fails."""
PATIENCE = 3
"""Failed dumps in a row of one process before its older ones are no longer shown."""

_ORDER = {"engine": 0, "worker": 1, "api": 2}


class StacksSource:
    """Samples processes, at most once a second, and only while `enabled`.

    Implements `Source[tuple[Stacks, ...]]`. While it is not enabled, `read` starts no
    process and returns nothing.

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
        self.enabled = True
        """False: read nothing, start nothing."""
        self._clock = clock
        self._locate = locate
        self._windows: dict[int, deque[Dump]] = {}
        self._failures: dict[int, int] = {}
        self._last_s: float | None = None

    async def read(self) -> tuple[Stacks, ...]:
        """One dump of each target; the top frames of all windows.

        A process that ends, or that cannot be read, hides no other.

        Raises:
            SourceError: py-spy is missing, or no target could be read.
        """
        if not self.enabled:
            self._windows.clear()
            self._failures.clear()
            return ()
        targets = dict(self.targets)
        for pid in [pid for pid in self._windows if pid not in targets]:
            self._forget(pid)
        if not targets:
            return ()
        now = time.monotonic()
        if self._last_s is not None and now - self._last_s < self.period_s * 0.95:
            return self._stacks(targets)
        self._last_s = now
        py_spy = self._locate()
        if py_spy is None:
            raise SourceError("py-spy is not installed", "pip install py-spy beside kvtop")
        errors: list[SourceError] = []
        for pid in sorted(targets, key=lambda pid: (_ORDER.get(targets[pid], 9), pid))[
            :MAX_TARGETS
        ]:
            if not self.enabled:
                return ()
            error = await self._sample(py_spy, pid)
            if error is not None:
                errors.append(error)
        stacks = self._stacks(targets)
        if errors and not stacks:
            raise errors[0]
        return stacks

    async def _sample(self, py_spy: str, pid: int) -> SourceError | None:
        """Adds one dump to the window of a process; the error where that cannot be."""
        try:
            sample = await self._dump(py_spy, pid)
        except GoneError as error:
            self._forget(pid)
            return SourceError(str(error))
        except SourceError as error:
            self._forget(pid)
            return error
        except (TransientError, ValueError) as error:
            self._failures[pid] = self._failures.get(pid, 0) + 1
            if self._failures[pid] >= PATIENCE:
                self._windows.pop(pid, None)
            return SourceError(str(error), "it is asked again by itself")
        self._failures.pop(pid, None)
        self._windows.setdefault(pid, deque(maxlen=WINDOW)).append(sample)
        return None

    async def _dump(self, py_spy: str, pid: int) -> Dump:
        """One dump; a run that the process outran is made again at once."""
        started = time.monotonic()
        cpu = children_cpu_s()
        for left in reversed(range(TRIES)):
            try:
                taken = parse_dump(await dump(py_spy, pid, RUN_DEADLINE_S), self._clock())
                # Runs that failed before it are part of what it has cost.
                return replace(taken, cost_s=children_cpu_s() - cpu)
            except TransientError:
                if left == 0 or time.monotonic() - started > RUN_DEADLINE_S / 2:
                    raise
        raise AssertionError("unreachable")

    def _forget(self, pid: int) -> None:
        self._windows.pop(pid, None)
        self._failures.pop(pid, None)

    def _stacks(self, targets: Mapping[int, str]) -> tuple[Stacks, ...]:
        found = (stacks_of(pid, targets[pid], tuple(w)) for pid, w in self._windows.items())
        return tuple(
            sorted(
                (stacks for stacks in found if stacks is not None),
                key=lambda stacks: (_ORDER.get(stacks.role, 9), stacks.pid),
            )
        )

    async def close(self) -> None:
        """Nothing is held between two reads."""
        self._windows.clear()
