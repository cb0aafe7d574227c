"""A seeded engine under churn: snapshots for the session tests and their benchmark.

A small model of vLLM's pool: a first-in first-out free queue, blocks freed in reverse
order, full blocks stay cached, decode takes a block every `BLOCK` tokens, and requests
share the blocks of a common prefix. It gives the recorder what a busy engine gives it:
many scattered block changes, counters that move, requests that come and go.
"""

from __future__ import annotations

import random
import uuid
from collections import deque
from dataclasses import dataclass, field

from kvtop.model.blocks import BlockState, count_states
from kvtop.model.detail import Detail
from kvtop.model.snapshot import (
    Counters,
    Engine,
    EngineMetrics,
    Frame,
    Gpu,
    GpuProcess,
    Phase,
    Pool,
    ProbeInfo,
    Request,
    Snapshot,
    SourceState,
    SourceStatus,
    Stacks,
)

BLOCK = 16
BLOCK_BYTES = 131_072 * BLOCK
START_S = 1_764_453_904.25


@dataclass
class _Job:
    id: str
    arrival_s: float
    prompt: int
    max_tokens: int
    output: float = 0.0
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    preemptions: int = 0
    owed: int = 0
    phase: Phase = Phase.PREFILL


class Churn:
    """Call `tick()` for the next snapshot, one second after the last."""

    def __init__(
        self,
        blocks: int = 20_000,
        requests: int = 256,
        seed: int = 1,
        gpus: int = 1,
        prompt: tuple[int, int] = (200, 800),
        output: tuple[int, int] = (400, 1600),
        tokens_s: float = 25.0,
        stacks: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.total = blocks
        self.want = requests
        self.gpus = gpus
        self.prompt, self.output, self.rate = prompt, output, tokens_s
        self.stacks = stacks
        self.pid = 4740
        self.now_s = START_S
        self.mono_s = 1234.5
        self.refs = [0] * blocks
        self.refs[0] = 1
        self.cached = bytearray(blocks)
        self.free: deque[int] = deque(range(1, blocks))
        self.jobs: list[_Job] = []
        self.prefix: list[int] = []
        self.count = dict.fromkeys(
            ("allocated", "freed", "touched", "evicted", "preemptions", "alloc_failures"), 0
        )
        self.step = 0
        self.tokens = 0.0

    def _take(self, number: int) -> list[int] | None:
        if len(self.free) < number:
            self.count["alloc_failures"] += 1
            return None
        out = [self.free.popleft() for _ in range(number)]
        for block in out:
            self.count["evicted"] += self.cached[block]
            self.cached[block] = 0
            self.refs[block] += 1
        self.count["allocated"] += number
        return out

    def _give(self, job: _Job) -> None:
        for block in reversed(job.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)
        full = int(job.prompt + job.output) // BLOCK
        for block in job.blocks[:full]:
            self.cached[block] = 1
        self.count["freed"] += len(job.blocks)
        job.blocks = []
        job.shared = 0

    def _admit(self) -> None:
        job = _Job(
            id=f"chatcmpl-{uuid.UUID(int=self.random.getrandbits(128)).hex}",
            arrival_s=self.now_s - self.random.random(),
            prompt=self.random.randint(*self.prompt),
            max_tokens=self.random.randint(*self.output),
        )
        self.jobs.append(job)
        self._fill(job)

    def _fill(self, job: _Job) -> bool:
        sharer = next((j for j in self.jobs if j is not job and len(j.blocks) > 4), None)
        if not job.blocks and sharer is not None and self.random.random() < 0.3:
            job.blocks = sharer.blocks[:4]
            job.shared = 4
            for block in job.blocks:
                self.refs[block] += 1
            self.count["touched"] += 4
        need = -(-int(job.prompt + job.output + 1) // BLOCK) - len(job.blocks)
        if need > 0:
            taken = self._take(need)
            if taken is None:
                if job.blocks:
                    job.owed = len(job.blocks) + need
                    job.preemptions += 1
                    self.count["preemptions"] += 1
                    self._give(job)
                    job.phase = Phase.PREEMPTED
                else:
                    job.phase = Phase.PREEMPTED if job.preemptions else Phase.WAITING
                return False
            job.blocks += taken
        job.owed = 0
        return True

    def tick(self) -> Snapshot:
        """The snapshot one second later."""
        elapsed = 1.0 + self.random.gauss(0, 0.001)
        self.now_s += elapsed
        self.mono_s += elapsed
        self.step += self.random.randint(24, 27)
        for job in list(self.jobs):
            if job.output >= job.max_tokens:
                self._give(job)
                self.jobs.remove(job)
                continue
            if job.phase in (Phase.WAITING, Phase.PREEMPTED):
                if self._fill(job):
                    job.phase = Phase.PREFILL
                continue
            job.phase = Phase.DECODE
            made = self.random.randint(int(self.rate) - 1, int(self.rate) + 1)
            job.output = min(job.max_tokens, job.output + made)
            self.tokens += made
            self._fill(job)
        while len(self.jobs) < self.want:
            self._admit()
        return self.snapshot()

    def detail(self, name: str) -> Detail:
        """The block table of a request, as the probe answers it."""
        job = next(job for job in self.jobs if job.id == name)
        shared = {
            block: tuple(
                other.id for other in self.jobs if other is not job and block in other.blocks[:4]
            )
            for block in job.blocks[:4]
            if self.refs[block] > 1
        }
        return Detail(
            name,
            step=self.step,
            tables=((0, BLOCK, tuple(job.blocks)),),
            refs=(tuple(self.refs[block] for block in job.blocks),),
            shared_with=shared,
        )

    def columns(self) -> tuple[bytes, bytes]:
        """States and refs as byte columns."""
        refs = bytes(min(ref, 255) for ref in self.refs)
        cached = self.cached
        states = bytearray(
            BlockState.USED if ref == 1 else BlockState.SHARED if ref else cached[i]
            for i, ref in enumerate(refs)
        )
        states[0] = BlockState.NULL
        return bytes(states), refs

    def snapshot(self) -> Snapshot:
        """The present state."""
        states, refs = self.columns()
        counts = count_states(states)
        rnd = self.random
        cut = self.now_s - 0.004
        pool = Pool(counts, counts.free + counts.cached, states, refs, refs)
        running = sum(1 for j in self.jobs if j.phase in (Phase.PREFILL, Phase.DECODE))
        engine = Engine(
            engine=0,
            pid=self.pid,
            server="10.20.30.40:8000",
            api_pids=(4700,),
            worker_pids=(4741,),
            process_state=rnd.choice("RS"),
            rss_bytes=3_000_000_000 + rnd.randint(0, 99) * 4096,
            model="/data/secret-lab/Acme-8B-Instruct",
            vllm_version="0.32.0",
            block_size=BLOCK,
            block_bytes=BLOCK_BYTES,
            max_model_len=32_768,
            max_num_seqs=256,
            prefix_caching=True,
            state="running",
            pools=(pool,),
            counters=Counters(
                allocated=self.count["allocated"],
                freed=self.count["freed"],
                touched=self.count["touched"],
                evicted=self.count["evicted"],
                alloc_failures=self.count["alloc_failures"],
                preemptions=self.count["preemptions"],
                preempted_blocks=0,
                preempted_tokens=0,
                steps=self.step,
            ),
            requests=tuple(self._request(job, cut) for job in self.jobs),
            metrics=EngineMetrics(
                kv_used_percent=100.0 * (counts.used + counts.shared) / counts.usable,
                running=running,
                waiting=len(self.jobs) - running,
                prefix_hit_percent=rnd.uniform(20, 40),
                prefix_hit_total_percent=31.5,
                preemptions_total=float(self.count["preemptions"]),
                preemptions_s=0.0,
                generation_tokens_total=self.tokens,
                generation_tokens_s=rnd.uniform(5000, 7000),
                prompt_tokens_total=self.tokens // 2,
                prompt_tokens_s=rnd.uniform(2000, 3000),
                num_blocks=self.total,
                block_size_tokens=BLOCK,
                ttft_p50_s=0.25,
                itl_p50_s=0.05,
            ),
            probe=ProbeInfo(
                version="0.1.0",
                step=self.step,
                scan_us=rnd.uniform(20, 60),
                cost_percent=rnd.uniform(0.005, 0.01),
                point="boundary",
                cut_time_s=cut,
                step_age_s=rnd.uniform(0, 0.04),
                verified_age_s=rnd.uniform(0, 5),
            ),
        )
        return Snapshot(
            time_s=self.now_s,
            mono_s=self.mono_s,
            host="gpu-node-17.acme.example",
            version="0.1.0",
            sources=tuple(
                SourceStatus(name, kind, SourceState.OK, START_S, value_time_s=self.now_s - lag)
                for name, kind, lag in (
                    ("nvml", "nvml", rnd.random() / 9),
                    ("metrics 10.20.30.40:8000", "metrics", rnd.random() / 9),
                    ("engine 4740", "engine", 0.004),
                    ("stacks 4740", "stacks", rnd.random() / 9),
                    ("discovery", "discovery", rnd.random() * 5),
                )
            ),
            gpus=tuple(self._gpu(index) for index in range(self.gpus)),
            engines=(engine,),
            stacks=self._stacks() if self.stacks else (),
        )

    def _request(self, job: _Job, cut: float) -> Request:
        done = int(job.prompt + job.output) if job.blocks else 0
        waits = job.phase in (Phase.WAITING, Phase.PREEMPTED)
        return Request(
            id=job.id,
            status="PREEMPTED" if waits and job.preemptions else "WAITING" if waits else "RUNNING",
            phase=job.phase,
            reason="capacity" if waits else None,
            arrival_time_s=job.arrival_s,
            age_s=cut - job.arrival_s,
            prompt_tokens=job.prompt,
            output_tokens=int(job.output),
            max_tokens=job.max_tokens,
            computed_tokens=done,
            cached_tokens=job.shared * BLOCK,
            blocks=len(job.blocks),
            shared_blocks=sum(1 for block in job.blocks[:4] if self.refs[block] > 1),
            slack_tokens=len(job.blocks) * BLOCK - done,
            kv_bytes=len(job.blocks) * BLOCK_BYTES,
            preemptions=job.preemptions,
            owed_blocks=job.owed,
            priority=0,
            client="live",
        )

    def _gpu(self, index: int) -> Gpu:
        rnd = self.random
        total = 85_520_809_984
        used = 70_000_000_000 + rnd.randint(0, 40) * 2_097_152
        return Gpu(
            index=index,
            uuid=f"GPU-0badc0de-{index}",
            name="NVIDIA H100 80GB HBM3",
            mem_total_bytes=total,
            mem_used_bytes=used,
            mem_reserved_bytes=500_000_000,
            mem_free_bytes=total - used - 500_000_000,
            util_percent=float(rnd.randint(85, 99)),
            mem_util_percent=float(rnd.randint(40, 60)),
            temperature_c=float(rnd.randint(60, 64)),
            power_w=rnd.randint(380_000, 420_000) / 1000,
            power_limit_w=700.0,
            sm_clock_mhz=1980,
            mem_clock_mhz=2619,
            pcie_rx_bytes_s=float(rnd.randint(0, 9_000_000)),
            pcie_tx_bytes_s=float(rnd.randint(0, 9_000_000)),
            processes=(GpuProcess(4741, "/home/bob/venv/bin/python -m vllm", used, self.pid),),
        )

    def _stacks(self) -> tuple[Stacks, ...]:
        rnd = self.random
        samples = 200
        frames = tuple(
            sorted(
                (
                    Frame(
                        f"function_{i}",
                        f"/home/bob/vllm/v1/core/file_{i % 5}.py",
                        100 + i,
                        "MainThread",
                        100.0 * rnd.randint(0, 20) / samples,
                        100.0 * (197 - 9 * i + rnd.randint(0, 3)) / samples,
                    )
                    for i in range(20)
                ),
                key=lambda frame: -frame.total_percent,
            )
        )
        return (Stacks(self.pid, "engine", samples, 10.0, 20.0, frames, self.now_s),)
