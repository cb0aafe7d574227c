"""Snapshots of a simulated engine in the same process, in simulated time.

The probe's own code reads the engine, but directly, without thread or socket, and every
time in the snapshot is simulated. With a `FreeClock` hours can be judged in seconds.
"""

from __future__ import annotations

import os

from kvtop.demo.engine import EngineCore
from kvtop.model.blocks import count_states
from kvtop.model.snapshot import (
    Counters,
    Engine,
    EngineMetrics,
    Group,
    Phase,
    Pool,
    ProbeInfo,
    Request,
    Snapshot,
    SourceState,
    SourceStatus,
)
from kvtop.probe.answer import COLUMNS, Rows
from kvtop.probe.cut import Capture, Raw
from kvtop.probe.facts import EngineFacts
from kvtop.probe.ledger import Ledger
from kvtop.probe.version import VERSION
from kvtop.probe.watch import Watch

_SERVER = "demo"


class Observer:
    """Looks at one engine again and again.

    Args:
        engine: Must not step while a snapshot is taken.
        host: Host name in the snapshots.
    """

    def __init__(self, engine: EngineCore, host: str = "demo") -> None:
        self._engine = engine
        self._host = host
        self._start_s = engine.clock.wall() - engine.clock.now_s
        self._facts = EngineFacts(engine)
        self._watch = Watch(self._facts)
        self._capture = Capture(self._facts, self._watch)
        self._ledger = Ledger(self._facts)
        self._rows = Rows(self._facts, self._ledger)
        self._identity = self._facts.identity(0)
        self._gone_since: dict[str, float] = {}
        self._stepped = (0, engine.clock.now_s)
        self._before: tuple[float, dict[str, float]] | None = None
        self._watch.watch()

    def close(self) -> None:
        """Leave the engine as it was."""
        self._watch.unwatch()

    def snapshot(self) -> Snapshot:
        """Everything at this moment; `mono_s` is simulated time."""
        now_s = self._engine.clock.now_s
        raw = self._cut(now_s)
        steps = raw.step
        if steps != self._stepped[0]:
            self._stepped = (steps, now_s)
        identity = self._identity
        pid = os.getpid()
        engine = Engine(
            engine=0,
            pid=pid,
            server=_SERVER,
            api_pids=(pid,),
            process_state="S",
            model=identity["model"],
            vllm_version=identity["vllm_version"],
            block_size=identity["block_size"],
            block_bytes=identity["block_bytes"],
            max_model_len=identity["max_model_len"],
            max_num_seqs=identity["max_num_seqs"],
            prefix_caching=identity["prefix_caching"],
            state="running" if raw.rows else "idle",
            groups=tuple(Group(**group) for group in identity["groups"]),
            pools=tuple(
                Pool(
                    count_states(bytes(pool.states)),
                    pool.free_queue,
                    bytes(pool.states),
                    bytes(pool.refs),
                    bytes(pool.holders),
                    pool.label,
                )
                for pool in self._ledger.pools
            ),
            counters=Counters(**raw.counters),
            requests=self._requests(raw, now_s),
            metrics=self._metrics(now_s),
            probe=ProbeInfo(
                version=VERSION,
                step=steps,
                scan_us=None,
                cost_percent=None,
                point="boundary",
                cut_time_s=raw.time_s,
                step_age_s=now_s - self._stepped[1],
                verified_age_s=0.0,
                drift=self._ledger.drift,
                errors=self._watch.errors,
            ),
            simulated=True,
        )
        sources = tuple(
            SourceStatus(name, kind, SourceState.OK, self._start_s, value_time_s=raw.time_s)
            for name, kind in (
                ("nvml", "nvml"),
                (f"metrics {_SERVER}", "metrics"),
                (f"engine {pid}", "engine"),
                (f"clients {pid}", "clients"),
            )
        )
        return Snapshot(
            time_s=raw.time_s,
            mono_s=now_s,
            host=self._host,
            version=VERSION,
            sources=sources,
            gpus=tuple(self._engine.gpus.read(now_s)),
            engines=(engine,),
            demo=True,
        )

    def _cut(self, now_s: float) -> Raw:
        raw = None
        while raw is None:
            raw = self._capture.slice(on_engine=True)
        raw.time_s, raw.mono_s = self._start_s + now_s, now_s
        self._ledger.apply(raw, _go_on)
        return raw

    def _requests(self, raw: Raw, now_s: float) -> tuple[Request, ...]:
        clients = self._engine.output_processor.request_states
        out = []
        gone: dict[str, float] = {}
        for row in self._rows.make(raw, _go_on):
            values = dict(zip(COLUMNS, row, strict=True))
            values["phase"] = Phase(values["phase"])
            if values["id"] in clients:
                out.append(Request(**values, client="live"))
                continue
            since_s = gone[values["id"]] = self._gone_since.get(values["id"], now_s)
            out.append(Request(**values, client="gone", client_gone_s=now_s - since_s))
        self._gone_since = gone
        return tuple(out)

    def _metrics(self, now_s: float) -> EngineMetrics:
        page = self._engine.metrics
        counters = dict(page.counters)
        counters["finished"] = sum(page.success.values())
        then_s, before = self._before or (now_s, counters)
        self._before = (now_s, counters)
        span_s = now_s - then_s

        def rate(name: str) -> float | None:
            return (counters[name] - before[name]) / span_s if span_s > 0 else None

        queries = counters["prefix_cache_queries"] - before["prefix_cache_queries"]
        hits = counters["prefix_cache_hits"] - before["prefix_cache_hits"]
        total = counters["prefix_cache_queries"]
        cache = self._engine.vllm_config.cache_config
        return EngineMetrics(
            kv_used_percent=100 * page.gauges["kv_cache_usage_perc"],
            running=int(page.gauges["num_requests_running"]),
            waiting=int(page.gauges["num_requests_waiting"]),
            waiting_capacity=int(page.waiting_by_reason["capacity"]),
            waiting_deferred=int(page.waiting_by_reason["deferred"]),
            prefix_hit_percent=100 * hits / queries if queries > 0 else None,
            prefix_hit_total_percent=(
                100 * counters["prefix_cache_hits"] / total if total > 0 else None
            ),
            preemptions_total=counters["num_preemptions"],
            preemptions_s=rate("num_preemptions"),
            prompt_tokens_total=counters["prompt_tokens"],
            prompt_tokens_s=rate("prompt_tokens"),
            generation_tokens_total=counters["generation_tokens"],
            generation_tokens_s=rate("generation_tokens"),
            finished_total=dict(page.success),
            finished_s=rate("finished"),
            num_blocks=cache.num_gpu_blocks,
            block_size_tokens=cache.block_size,
            prefix_caching=cache.enable_prefix_caching,
            kv_size_tokens=cache.num_gpu_blocks * cache.block_size,
            sleep_state="awake",
        )


def _go_on() -> None:
    """The probe rests between pieces of work to let an engine run; none runs here."""
