"""A made-up engine for tests of the screen: moving, seeded, and always consistent.

Not a model of vLLM's scheduler (that is `kvtop.demo`): only numbers that add up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from kvtop.model.blocks import BlockState, count_states
from kvtop.model.detail import Detail
from kvtop.model.snapshot import (
    Counters,
    Engine,
    EngineMetrics,
    Frame,
    Gpu,
    GpuProcess,
    Group,
    Phase,
    Pool,
    ProbeInfo,
    Request,
    Snapshot,
    SourceState,
    SourceStatus,
    Stacks,
)

BLOCK_TOKENS = 16
BLOCK_BYTES = 131_072
START_S = 1_764_460_800.0


@dataclass
class _Live:
    id: str
    prompt: int
    limit: int
    born: float
    shared: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    output: int = 0
    preemptions: int = 0

    @property
    def blocks(self) -> list[int]:
        return self.shared + self.own


class FakeEngine:
    """Blocks and requests that change with every `step`.

    Args:
        seed: Equal seeds give equal snapshots.
        blocks: Size of the pool.
        requests: Requests running at once.
        waiting: Requests in the queue.
    """

    def __init__(
        self,
        seed: int = 1,
        blocks: int = 2048,
        requests: int = 24,
        waiting: int = 4,
        engines: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.states = bytearray(blocks)
        self.states[0] = BlockState.NULL
        self.refs = bytearray(blocks)
        self.refs[0] = 1
        self.free = list(range(blocks - 1, 0, -1))
        self.prefixes = [self._take(8) for _ in range(4)]
        self.live: list[_Live] = []
        self.wanted = requests
        self.waiting = waiting
        self.engines = engines
        self.time = START_S
        self.count = 0
        self.stepped = 0
        self.allocated = self.freed = self.touched = self.evicted = 0
        self.step(0.0)

    def _take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(min(count, len(self.free)))]

    def _admit(self) -> None:
        rng = self.random
        self.count += 1
        prompt = int(min(rng.lognormvariate(6.2, 0.8), 6000)) + 20
        one = _Live(
            f"chatcmpl-{rng.getrandbits(64):016x}-{self.count}",
            prompt,
            rng.choice((64, 256, 1024)),
            self.time,
        )
        if rng.random() < 0.4:
            one.shared = list(rng.choice(self.prefixes))
            self.touched += len(one.shared)
        need = -(-prompt // BLOCK_TOKENS) - len(one.shared)
        one.own = self._take(max(need, 1))
        self.allocated += len(one.own)
        self.live.append(one)

    def step(self, seconds: float) -> None:
        """Let time go by."""
        self.time += seconds
        self.stepped += int(30 * seconds) + 1
        rng = self.random
        for one in list(self.live):
            one.output += int(30 * seconds * rng.uniform(0.7, 1.1))
            if one.output >= one.limit:
                self.live.remove(one)
                self.freed += len(one.blocks)
                if rng.random() < 0.7:
                    self.free[:0] = reversed(one.own)
                else:
                    self.free += reversed(one.own)
                continue
            need = -(-(one.prompt + one.output) // BLOCK_TOKENS) - len(one.blocks)
            if need > 0:
                more = self._take(need)
                self.allocated += len(more)
                one.own += more
        while len(self.live) < self.wanted and len(self.free) > 64:
            self._admit()
        self._columns()

    def _columns(self) -> None:
        blocks = len(self.states)
        refs = [0] * blocks
        refs[0] = 1
        for one in self.live:
            for block in one.blocks:
                refs[block] += 1
        old = self.states
        states = bytearray(blocks)
        states[0] = BlockState.NULL
        for block in range(1, blocks):
            if refs[block] > 1:
                states[block] = BlockState.SHARED
            elif refs[block] == 1:
                states[block] = BlockState.USED
            elif old[block] in (BlockState.USED, BlockState.SHARED, BlockState.CACHED):
                states[block] = BlockState.CACHED
        self.states = states
        self.refs = bytearray(min(ref, 255) for ref in refs)

    def _requests(self) -> tuple[Request, ...]:
        rows = [
            Request(
                id=one.id,
                status="RUNNING",
                phase=Phase.PREFILL if one.output < 30 else Phase.DECODE,
                arrival_time_s=one.born,
                age_s=self.time - one.born,
                prompt_tokens=one.prompt,
                output_tokens=one.output,
                max_tokens=one.limit,
                computed_tokens=one.prompt + one.output,
                cached_tokens=len(one.shared) * BLOCK_TOKENS,
                blocks=len(one.blocks),
                shared_blocks=len(one.shared),
                slack_tokens=len(one.blocks) * BLOCK_TOKENS - one.prompt - one.output,
                kv_bytes=len(one.blocks) * BLOCK_BYTES,
                preemptions=one.preemptions,
                owed_blocks=0,
                priority=0,
            )
            for one in self.live
        ]
        rows += [
            Request(
                id=f"cmpl-waiting-{at}",
                status="WAITING",
                phase=Phase.WAITING,
                reason="capacity",
                arrival_time_s=self.time - 2.0 - at,
                age_s=2.0 + at,
                prompt_tokens=900,
                output_tokens=0,
                max_tokens=256,
                computed_tokens=0,
                blocks=0,
            )
            for at in range(self.waiting)
        ]
        return tuple(rows)

    def snapshot(self) -> Snapshot:
        """What a stream would give now."""
        counts = count_states(bytes(self.states))
        used = 100.0 * (counts.used + counts.shared) / counts.usable
        engine = Engine(
            engine=0,
            pid=4740,
            server="127.0.0.1:8000",
            api_pids=(4711,),
            worker_pids=(4801,),
            process_state="S",
            model="Qwen/Qwen3-8B",
            vllm_version="0.32.0",
            block_size=BLOCK_TOKENS,
            block_bytes=BLOCK_BYTES,
            max_model_len=8192,
            max_num_seqs=self.wanted,
            prefix_caching=True,
            state="running",
            groups=(Group(0, "FullAttention", BLOCK_TOKENS),),
            pools=(
                Pool(
                    counts,
                    counts.free + counts.cached,
                    bytes(self.states),
                    bytes(self.refs),
                    bytes(self.refs),
                ),
            ),
            counters=Counters(
                self.allocated, self.freed, self.touched, self.evicted, 0, 0, 0, 0, self.stepped
            ),
            requests=self._requests(),
            metrics=EngineMetrics(
                kv_used_percent=used,
                running=len(self.live),
                waiting=self.waiting,
                prefix_hit_percent=61.5,
                prefix_hit_total_percent=58.0,
                preemptions_total=0.0,
                preemptions_s=0.0,
                generation_tokens_total=1e5 + 30 * self.stepped,
                generation_tokens_s=30.0 * len(self.live) * self.random.uniform(0.8, 1.1),
                prompt_tokens_s=2500.0 * self.random.uniform(0.8, 1.1),
                num_blocks=counts.total,
                block_size_tokens=BLOCK_TOKENS,
            ),
            probe=ProbeInfo("0.1.0", self.stepped, 310.0, 0.05, "boundary", self.time, 0.02, 0.0),
        )
        more = tuple(replace(engine, engine=at, pid=4740 + at) for at in range(1, self.engines))
        gigabyte = 1 << 30
        gpu = Gpu(
            index=0,
            uuid="GPU-0",
            name="NVIDIA H100 80GB HBM3",
            mem_total_bytes=80 * gigabyte,
            mem_used_bytes=68 * gigabyte,
            mem_reserved_bytes=gigabyte // 2,
            mem_free_bytes=11 * gigabyte,
            util_percent=float(self.random.randint(80, 99)),
            mem_util_percent=55.0,
            temperature_c=62.0,
            power_w=float(self.random.randint(380, 420)),
            power_limit_w=700.0,
            sm_clock_mhz=1980,
            mem_clock_mhz=2619,
            pcie_rx_bytes_s=1e8,
            pcie_tx_bytes_s=2e7,
            processes=(GpuProcess(4801, "VLLM::Worker", 67 * gigabyte, 4740),),
            simulated=True,
        )
        functions = ("execute_model", "schedule", "update_from_output", "forward", "allocate_slots")
        frames = tuple(
            Frame(
                name,
                "vllm/v1/engine/core.py",
                100 + at,
                "MainThread",
                40.0 / (at + 1),
                60.0 / (at + 1),
            )
            for at, name in enumerate(functions)
        )
        ok = SourceState.OK
        return Snapshot(
            time_s=self.time,
            mono_s=self.time - START_S,
            host="box",
            version="0.1.0",
            sources=(
                SourceStatus(
                    "discovery", "discovery", ok, START_S, value_time_s=self.time, period_s=1.0
                ),
                SourceStatus("nvml", "nvml", ok, START_S, value_time_s=self.time, period_s=1.0),
                SourceStatus(
                    "metrics 127.0.0.1:8000", "metrics", ok, START_S, value_time_s=self.time
                ),
                SourceStatus(
                    "engine 4740", "engine", ok, START_S, value_time_s=self.time, target_pid=4740
                ),
                SourceStatus(
                    "stacks",
                    "stacks",
                    SourceState.FAILED,
                    START_S,
                    "py-spy may not look into process 4740",
                    "run kvtop as root",
                ),
            ),
            gpus=(gpu, replace(gpu, index=1, uuid="GPU-1")),
            engines=(engine, *more),
            stacks=(Stacks(4740, "engine", 200, 10.0, 20.0, frames, self.time),),
            demo=True,
        )

    def detail(self, request_id: str) -> Detail:
        """The block table of one request."""
        one = next((one for one in self.live if one.id == request_id), None)
        if one is None:
            return Detail(request_id, error="the engine no longer has this request")
        others = {
            block: tuple(o.id for o in self.live if o is not one and block in o.shared)
            for block in one.shared
        }
        return Detail(
            request_id,
            self.stepped,
            ((0, BLOCK_TOKENS, tuple(one.blocks)),),
            (tuple(self.refs[block] for block in one.blocks),),
            others,
        )


class FakeFeed:
    """A `Feed` on a `FakeEngine`; remembers what was asked of it.

    Args:
        engine: What is shown.
        interval_s: Time between two snapshots.
        fail_after: Raise after so many snapshots. None: never.
        hang: `close` never returns.
        made: Give so many snapshots made beforehand in turn, for measurements of the screen
            alone. 0: make each when it is due.
        rush: Give so many at once before the first pause: a screen that has run for long.
    """

    def __init__(
        self,
        engine: FakeEngine | None = None,
        interval_s: float = 1.0,
        fail_after: int | None = None,
        hang: bool = False,
        made: int = 0,
        rush: int = 0,
    ) -> None:
        self.rush = rush
        self.engine = engine or FakeEngine()
        self.made: list[Snapshot] = []
        for _ in range(made):
            self.engine.step(interval_s)
            self.made.append(self.engine.snapshot())
        self.interval_s = interval_s
        self.fail_after = fail_after
        self.hang = hang
        self.visible: list[bool] = []
        self.looked_at: tuple[int, ...] = ()
        self.intervals: list[float] = []
        self.asked: list[str] = []
        self.closed = False

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        given = 0
        while True:
            yield self._next(given)
            given += 1
            if self.fail_after is not None and given >= self.fail_after:
                raise RuntimeError("the fake feed was told to fail")
            await asyncio.sleep(self.interval_s if given > self.rush else 0)

    def _next(self, given: int) -> Snapshot:
        if not self.made:
            if given:
                self.engine.step(self.interval_s)
            return self.engine.snapshot()
        snap = self.made[given % len(self.made)]
        return replace(snap, time_s=START_S + given, mono_s=float(given))

    def set_interval(self, seconds: float) -> None:
        self.interval_s = seconds
        self.intervals.append(seconds)

    def set_visible(self, stacks: bool, pids: Sequence[int] = ()) -> None:
        if stacks != (self.visible[-1] if self.visible else True):
            self.visible.append(stacks)
        self.looked_at = tuple(pids)

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        self.asked.append(request_id)
        return self.engine.detail(request_id)

    async def close(self) -> None:
        self.closed = True
        if self.hang:
            await asyncio.Event().wait()
