"""What is remembered of one engine."""

from __future__ import annotations

from collections import deque

from kvtop.detect.freshness import is_fresh
from kvtop.detect.requests_track import RequestsTrack
from kvtop.detect.series import Buckets, CounterLog, Trend, trend
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.watch import BlockWatch, both, xor
from kvtop.model.blocks import BlockCounts, BlockState
from kvtop.model.snapshot import Engine, EngineMetrics, Pool, SourceStatus

COLUMNS = (
    "allocated",
    "freed",
    "touched",
    "evicted",
    "alloc_failures",
    "preemptions",
    "preempted_blocks",
    "preempted_tokens",
    "steps",
)
"""Probe counters kept over time, in the order of the rows."""
ENDED = len(COLUMNS)
"""Column of the requests that are no more."""
FAST_PIECES = 24
"""Pieces that the window of fast growth in host memory is cut into."""
SLOW_PIECES = 18
"""Pieces that half an hour is cut into for slow growth."""
_SLOW_S = 1800.0
_LOG_S = 300.0
_PROBE_STOPS_AT = 10
"""Errors of its own after which a probe stops itself (`ProbeInfo.errors`)."""
_FLOORS = 60
LAST_FLOORS = 12
"""Idle moments that are also looked at by themselves."""
_TO_ONE = bytes([0]) + bytes([1]) * 255


def _mark(state: BlockState) -> bytes:
    table = bytearray(256)
    table[state] = 1
    return bytes(table)


_GHOST = _mark(BlockState.GHOST)
_HELD = _mark(BlockState.HELD)
_OWNED = bytes(0 if s in (BlockState.GHOST, BlockState.NULL) else 255 for s in range(256))


class PoolTrack:
    """Blocks of one pool that are not where they should be."""

    def __init__(self) -> None:
        self.ghosts = BlockWatch()
        self.held = BlockWatch()
        self.mismatches = BlockWatch()
        self.ghost_floor: int | None = None
        """Least number of ghosts over the idle readings in a row; without columns only."""
        self.ghost_floor_readings = 0

    def clear(self) -> None:
        """Forget what was seen before a gap."""
        for watch in (self.ghosts, self.held, self.mismatches):
            watch.clear()
        self.ghost_floor, self.ghost_floor_readings = None, 0

    def update(self, pool: Pool, *, time_s: float, mono_s: float, step: int, idle: bool) -> None:
        """Take one reading."""
        counts, states = pool.counts, pool.states
        if idle and counts.ghost:
            floor = self.ghost_floor
            self.ghost_floor = counts.ghost if floor is None else min(floor, counts.ghost)
            self.ghost_floor_readings += 1
        else:
            self.ghost_floor, self.ghost_floor_readings = None, 0

        def watch(blocks: BlockWatch, mask: bytes | None) -> None:
            blocks.update(mask, time_s=time_s, mono_s=mono_s, step=step, idle=idle)

        if states is None:
            for unknown in (self.ghosts, self.held, self.mismatches):
                unknown.clear()
            return
        watch(self.ghosts, states.translate(_GHOST) if counts.ghost else None)
        watch(self.held, states.translate(_HELD) if counts.held else None)
        refs, tables = pool.refs, pool.tables
        mask = None
        if (
            refs is not None
            and tables is not None
            and refs != tables
            and len(refs) == len(tables) == len(states)
        ):
            mask = both(xor(refs, tables), states.translate(_OWNED)).translate(_TO_ONE)
            mask = mask if mask.count(0) != len(mask) else None
        watch(self.mismatches, mask)


class EngineTrack:
    """One engine over time.

    Args:
        key: From `engine_key`.
        engine: Its first snapshot.
        mono_s: Monotonic time of that.
        now_s: Wall clock of that.
    """

    def __init__(self, key: str, engine: Engine, mono_s: float, now_s: float) -> None:
        self.key = key
        self.engine = engine
        self.first_mono_s = mono_s
        self.first_s = now_s
        self.mono_s = mono_s
        self.now_s = now_s
        self.pools: dict[str, PoolTrack] = {}
        self.requests = RequestsTrack()
        self.counters = CounterLog(_LOG_S)
        self.pages = CounterLog(_LOG_S)
        """Metrics: preemptions, finished, prompt tokens, generation tokens."""
        self.owned: deque[tuple[float, int]] = deque()
        """Table entries of all requests over the balance window."""
        self.floors: deque[tuple[float, float]] = deque(maxlen=_FLOORS)
        """Free + cached blocks at idle moments."""
        self.floors_from_metrics = False
        self.hit_minutes = Buckets(60.0, 61)
        self.hit_now = Buckets(10.0, 7)
        self.rss: dict[int, tuple[Buckets, Buckets]] = {}
        self.gpu_memory = Buckets(15.0, 81)
        self.probe_fresh = False
        """The probe answered just now."""
        self.probe_new = False
        """And what it said is a new cut."""
        self.metrics_fresh = False
        """The /metrics page was read just now."""
        self.discovery_fresh = False
        """The process table was read just now."""
        self.metrics_source: SourceStatus | None = None
        self.idle = False
        """The newest cut has no live request."""
        self.readings = 0
        """Cuts in a row without a gap."""
        self.had_api = False
        """An API server of it was seen."""
        self.was_alive = False
        """Its process was seen alive."""
        self.restarted_from: int | None = None
        """Pid of the engine whose place it took."""
        self.restarted_mono_s: float | None = None
        """When that was seen, or when its counters began again."""
        self._cut: tuple[float, int] | None = None
        self._cut_seen: tuple[float, int] | None = None
        self.cut_mono_s = mono_s
        """Monotonic time at which the newest cut was first seen."""
        self._value_time_s: float | None = None
        self._reading_mono_s: float | None = None
        self._was_idle = False
        self._prompt_tokens: float | None = None
        self._floor_trends: (
            tuple[tuple[int, tuple[float, float]], tuple[Trend | None, Trend | None]] | None
        ) = None

    @property
    def metrics(self) -> EngineMetrics | None:
        """The metrics of this moment. None: not readable now."""
        return self.engine.metrics if self.metrics_fresh else None

    @property
    def counts(self) -> BlockCounts | None:
        """Counts of the first pool now. None: no probe reading of this moment."""
        return self.engine.blocks if self.probe_fresh else None

    @property
    def step(self) -> int:
        """Scheduler step of the newest cut; 0 without a probe."""
        return self.engine.probe.step if self.engine.probe else 0

    @property
    def kv_used_percent(self) -> float | None:
        """Blocks that are neither free nor cached, share of the pool, 0-100.

        From the probe, else from a gauge that moves. None: neither can be read now.
        """
        counts = self.counts
        if counts is not None:
            return counts.percent(counts.usable - counts.free - counts.cached)
        metrics = self.metrics
        if metrics is None or metrics.gauges_frozen_s is not None:
            return None
        return metrics.kv_used_percent

    def counter_delta(self, name: str, width_s: float) -> float | None:
        """Growth of a probe counter within the last `width_s` seconds."""
        return self.counters.delta(COLUMNS.index(name), width_s)

    def floor_trends(self) -> tuple[Trend | None, Trend | None]:
        """Trends of all idle floors and of the last few. None: too few.

        A leak that began after many sound moments is no trend of all of them for long.
        """
        if not self.floors:
            return None, None
        key = (len(self.floors), self.floors[-1])
        if self._floor_trends is None or self._floor_trends[0] != key:
            every = tuple(self.floors)
            last = trend(every[-LAST_FLOORS:]) if len(every) > LAST_FLOORS else None
            self._floor_trends = (key, (trend(every), last))
        return self._floor_trends[1]

    def append(
        self,
        engine: Engine,
        *,
        now_s: float,
        mono_s: float,
        dt_s: float | None,
        probe_source: SourceStatus | None,
        metrics_source: SourceStatus | None,
        discovery: SourceStatus | None,
        limits: Thresholds,
    ) -> None:
        """Take one snapshot of it."""
        self.engine = engine
        self.mono_s, self.now_s = mono_s, now_s
        self.metrics_source = metrics_source
        self.probe_fresh, self.probe_new = self._probe_freshness(
            engine, probe_source, now_s, limits
        )
        self.metrics_fresh = engine.metrics is not None and (
            metrics_source is None or is_fresh(metrics_source, now_s, limits)
        )
        self.discovery_fresh = discovery is None or is_fresh(discovery, now_s, limits)
        if self.discovery_fresh and engine.alive and engine.api_pids:
            self.had_api = True
        self.was_alive = self.was_alive or engine.alive
        if dt_s is None:
            self._break()
        if self.probe_new:
            self._read_probe(engine, limits)
        if self.metrics_fresh and engine.metrics is not None:
            self._read_metrics(engine, engine.metrics)
        self._read_processes(engine, limits)

    def append_gpu_memory(self, mono_s: float, used_bytes: float | None) -> None:
        """Take what its processes use on all GPUs. None: not known now."""
        if used_bytes is None:
            if len(self.gpu_memory):
                self.gpu_memory.clear()
        else:
            self.gpu_memory.append(mono_s, used_bytes)

    def _probe_freshness(
        self, engine: Engine, source: SourceStatus | None, now_s: float, limits: Thresholds
    ) -> tuple[bool, bool]:
        probe = engine.probe
        # A probe that has stopped itself goes on answering with its last cut.
        if not engine.alive or probe is None or probe.errors >= _PROBE_STOPS_AT:
            return False, False
        if source is None:
            fresh = abs(now_s - probe.cut_time_s) <= limits.stale_s
            value_time_s: float | None = probe.cut_time_s
        else:
            fresh = is_fresh(source, now_s, limits)
            value_time_s = source.value_time_s
        cut = (probe.cut_time_s, probe.step)
        if cut != self._cut_seen:
            self._cut_seen, self.cut_mono_s = cut, self.mono_s
        # While the engine waits for work nothing can change, so an answer is as good as a
        # cut; while it works, only another cut tells anything new.
        new = (
            fresh
            and value_time_s != self._value_time_s
            and (cut != self._cut or probe.point == "idle")
        )
        if new:
            self._cut, self._value_time_s = cut, value_time_s
        return fresh, new

    def _break(self) -> None:
        """What was seen before a gap says nothing about the time in between."""
        for pool in self.pools.values():
            pool.clear()
        self.requests.forget_times(self.mono_s)
        self.counters.clear()
        self.pages.clear()
        self.owned.clear()
        self.hit_now.clear()
        self.gpu_memory.clear()
        self.rss.clear()
        self.readings = 0

    def _read_probe(self, engine: Engine, limits: Thresholds) -> None:
        last = self._reading_mono_s
        if last is not None and self.mono_s - last > max(limits.gap_s, limits.stale_s):
            for pool in self.pools.values():
                pool.clear()
            self.requests.forget_times(self.mono_s)
            self.counters.clear()
            self.owned.clear()
            self.readings = 0
        self._reading_mono_s = self.mono_s
        self.readings += 1
        requests = engine.requests
        if requests is not None:
            self.requests.update(requests, self.mono_s, engine.block_size)
        totals = self.requests.totals
        self.idle = requests is not None and totals.live == 0
        for reading in engine.pools:
            self.pools.setdefault(reading.label, PoolTrack()).update(
                reading, time_s=self.now_s, mono_s=self.mono_s, step=self.step, idle=self.idle
            )
        if engine.counters is not None:
            row = tuple(getattr(engine.counters, name) for name in COLUMNS)
            self.counters.append(self.mono_s, (*row, self.requests.ended))
        if requests is not None and totals.owned is not None:
            if not self.owned or self.mono_s - self.owned[-1][0] >= 0.9:
                self.owned.append((self.mono_s, totals.owned))
            while self.mono_s - self.owned[0][0] > limits.balance_window_s:
                self.owned.popleft()
        else:
            self.owned.clear()
        counts = engine.blocks
        if counts is not None and requests is not None:
            self._floor(self.idle, counts.free + counts.cached, from_metrics=False)

    def _read_metrics(self, engine: Engine, metrics: EngineMetrics) -> None:
        finished = sum(metrics.finished_total.values()) if metrics.finished_total else None
        tokens = metrics.prompt_tokens_total
        if tokens is not None:
            # Without a process to see, counters that fall are all that tells of a restart.
            if engine.pid is None and tokens < (self._prompt_tokens or 0.0):
                self.restarted_mono_s = self.mono_s
            self._prompt_tokens = tokens
        self.pages.append(
            self.mono_s,
            (
                metrics.preemptions_total,
                finished,
                tokens,
                metrics.generation_tokens_total,
            ),
        )
        if metrics.prefix_hit_percent is not None:
            self.hit_minutes.append(self.mono_s, metrics.prefix_hit_percent)
            self.hit_now.append(self.mono_s, metrics.prefix_hit_percent)
        used, blocks = metrics.kv_used_percent, metrics.num_blocks
        if engine.probe is None and used is not None and blocks:
            idle = metrics.running == 0 and metrics.waiting == 0
            self._floor(idle, blocks * (1 - used / 100), from_metrics=True)

    def _floor(self, idle: bool, available: float, *, from_metrics: bool) -> None:
        """An idle moment is a stretch without work; its last value is kept."""
        if from_metrics is not self.floors_from_metrics:
            self.floors.clear()
            self.floors_from_metrics = from_metrics
        if idle and self._was_idle and self.floors:
            self.floors[-1] = (self.floors[-1][0], available)
        elif idle:
            if len(self.floors) == _FLOORS:
                # Every other one goes, so that the same few points reach back further.
                kept = list(self.floors)[::2]
                self.floors.clear()
                self.floors.extend(kept)
            self.floors.append((self.mono_s, available))
        self._was_idle = idle

    def _read_processes(self, engine: Engine, limits: Thresholds) -> None:
        sizes = host_memory(engine) if engine.alive else {}
        for pid in [pid for pid in self.rss if pid not in sizes]:
            del self.rss[pid]
        fast_s = limits.rss_window_s / FAST_PIECES
        for pid, used in sizes.items():
            if pid not in self.rss:
                self.rss[pid] = (
                    Buckets(fast_s, FAST_PIECES + 1),
                    Buckets(_SLOW_S / SLOW_PIECES, SLOW_PIECES + 1),
                )
            for buckets in self.rss[pid]:
                buckets.append(self.mono_s, used)


def host_memory(engine: Engine) -> dict[int, int]:
    """Resident memory by pid, as far as the snapshot tells."""
    sizes: dict[int, int] = dict(getattr(engine, "rss_by_pid", None) or {})
    if engine.pid is not None and engine.rss_bytes is not None:
        sizes[engine.pid] = engine.rss_bytes
    return sizes
