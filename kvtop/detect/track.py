"""A bounded fold over snapshots: all that rules look back on.

`Track.append` is a pure function of the snapshots given so far. Durations come from their
monotonic clock; a record with a gap, a clock that went back, a reading that is old or
missing leave a mark that rules can see, and add no time to anything.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TypeVar

from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.freshness import is_fresh
from kvtop.detect.gpu_track import GpuTrack
from kvtop.detect.thresholds import DEFAULTS, Thresholds
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Engine, Snapshot, SourceStatus, Stacks

_K = TypeVar("_K")
_T = TypeVar("_T", EngineTrack, GpuTrack)

_FORGET_S = 60.0
"""An engine or a GPU that is in no snapshot for this long is forgotten."""


def key_of(pid: int | None) -> str:
    """Name of the source that reads the probe of an engine."""
    return f"engine {pid}"


class Track:
    """What was seen so far.

    Args:
        limits: Thresholds; the track uses those on gaps and on old readings.
    """

    def __init__(self, limits: Thresholds = DEFAULTS) -> None:
        self.limits = limits
        self.engines: dict[str, EngineTrack] = {}
        self.gpus: dict[int, GpuTrack] = {}
        self.now_s = 0.0
        """Wall clock of the newest snapshot."""
        self.mono_s = 0.0
        """Monotonic clock of the newest snapshot."""
        self.dt_s: float | None = None
        """Time since the snapshot before. None: there is none, or a gap lies between."""
        self.snapshot: Snapshot | None = None
        """The newest."""
        self.stacks: dict[int, Stacks] = {}
        """Fresh top frames by pid."""
        self._intervals: deque[float] = deque(maxlen=9)
        self._started = False
        self._pids: dict[tuple[str, int | None], int] = {}

    def append(self, snapshot: Snapshot) -> None:
        """Take one snapshot. One that is not newer than the last begins a new record."""
        if self._started and snapshot.mono_s < self.mono_s:
            self.engines.clear()
            self.gpus.clear()
            self._pids.clear()
            self._intervals.clear()
            self._started = False
        self.dt_s = self._interval(snapshot)
        self._started = True
        self.snapshot = snapshot
        self.now_s, self.mono_s = snapshot.time_s, snapshot.mono_s
        by_target: dict[tuple[str, int | None], SourceStatus] = {
            (source.kind, source.target_pid): source
            for source in snapshot.sources
            if source.target_pid is not None
        }
        by_name = {source.name: source for source in snapshot.sources}
        self.stacks = {
            stack.pid: stack
            for stack in snapshot.stacks
            if abs(snapshot.time_s - stack.time_s) <= 2 * self.limits.stale_s
        }
        for engine in snapshot.engines:
            self._engine(engine, by_target, by_name)
        self._gpus(snapshot, next((s for s in snapshot.sources if s.kind == "nvml"), None))
        self._forget(self.engines)
        self._forget(self.gpus)

    def _forget(self, table: dict[_K, _T]) -> None:
        for key in [k for k, t in table.items() if self.mono_s - t.mono_s > _FORGET_S]:
            del table[key]

    def _interval(self, snapshot: Snapshot) -> float | None:
        if not self._started:
            return None
        dt = snapshot.mono_s - self.mono_s
        usual = median(self._intervals) if self._intervals else dt
        self._intervals.append(dt)
        return None if dt > max(self.limits.gap_s, 3 * usual) else dt

    def _engine(
        self,
        engine: Engine,
        by_target: dict[tuple[str, int | None], SourceStatus],
        by_name: dict[str, SourceStatus],
    ) -> None:
        key = engine_key(engine)
        track = self.engines.get(key)
        if track is None:
            track = self.engines[key] = EngineTrack(key, engine, self.mono_s, self.now_s)
            place = (engine.server, engine.engine)
            if engine.pid is not None:
                before = self._pids.get(place)
                if before is not None and before != engine.pid:
                    track.restarted_from = before
                    track.restarted_mono_s = self.mono_s
                    self.engines.pop(f"pid {before}", None)
        if engine.pid is not None and engine.alive:
            self._pids[(engine.server, engine.engine)] = engine.pid
            # Ranks and places are few; a name that changes must not grow this for ever.
            while len(self._pids) > 1024:
                del self._pids[next(iter(self._pids))]
        track.append(
            engine,
            now_s=self.now_s,
            mono_s=self.mono_s,
            dt_s=self.dt_s,
            probe_source=by_target.get(("engine", engine.pid)) or by_name.get(key_of(engine.pid)),
            metrics_source=self._page_of(engine, by_name),
            discovery=by_name.get("discovery"),
            limits=self.limits,
        )

    def _page_of(self, engine: Engine, by_name: dict[str, SourceStatus]) -> SourceStatus | None:
        named = by_name.get(f"metrics {engine.server}")
        if named is not None or self.snapshot is None:
            return named
        # With one server and one page there is no doubt, however the address is written.
        pages = [source for source in by_name.values() if source.kind == "metrics"]
        servers = {other.server for other in self.snapshot.engines}
        return pages[0] if len(pages) == len(servers) == 1 else None

    def _gpus(self, snapshot: Snapshot, nvml: SourceStatus | None) -> None:
        fresh = nvml is None or is_fresh(nvml, self.now_s, self.limits)
        mine: dict[int, float | None] = {}
        for gpu in snapshot.gpus:
            track = self.gpus.setdefault(gpu.index, GpuTrack(gpu.index, self.mono_s))
            track.append(gpu, mono_s=self.mono_s, dt_s=self.dt_s, fresh=fresh)
            for process in gpu.processes or ():
                if process.engine_pid is None:
                    continue
                so_far = mine.get(process.engine_pid, 0.0)
                mine[process.engine_pid] = (
                    None
                    if so_far is None or process.mem_bytes is None or gpu.error
                    else so_far + process.mem_bytes
                )
        for engine in self.engines.values():
            pid = engine.engine.pid
            engine.append_gpu_memory(
                self.mono_s, mine.get(pid) if fresh and pid is not None else None
            )
