"""A small engine with true block accounts, and snapshots of it, for tests of detectors."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from kvtop.model.blocks import BlockState, count_states
from kvtop.model.snapshot import (
    Counters,
    Engine,
    EngineMetrics,
    Finding,
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
)

PID = 4740
SERVER = "127.0.0.1:8000"
START_S = 1_700_000_000.0


@dataclass
class Req:
    """One request of the small engine."""

    id: str
    blocks: list[int] = field(default_factory=list)
    prompt: int = 32
    output: int = 0
    max_tokens: int = 100
    computed: int = 0
    phase: Phase = Phase.DECODE
    status: str = "RUNNING"
    reason: str | None = None
    preemptions: int = 0
    lora: str | None = None
    client: str | None = None
    client_gone_s: float | None = None
    held_s: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Sim:
    """A block pool, a few requests, and the clocks.

    Every block operation keeps vLLM's rules, so that whatever a test breaks is all that is
    broken.
    """

    def __init__(self, blocks: int = 64, block_size: int = 16, max_num_seqs: int = 16) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.refs = [0] * blocks
        self.extra_refs: dict[int, int] = {}
        self.hashed = [False] * blocks
        self.free: list[int] = list(range(1, blocks))
        self.fenced: list[int] = []
        self.requests: dict[str, Req] = {}
        self.time_s = START_S
        self.mono_s = 1000.0
        self.step = 0
        self.counters = dict.fromkeys(Counters.__dataclass_fields__, 0)
        self.metrics: EngineMetrics | None = None
        self.gpus: tuple[Gpu, ...] = ()
        self.engine_fields: dict[str, Any] = {}
        self.probe_fields: dict[str, Any] = {}
        self.probe_ok = True
        self.metrics_ok = True
        self.nvml_ok = True
        self.columns = True
        self.has_probe = True
        self.pid: int | None = PID
        self.free_queue_error = 0
        self._last_cut: Engine | None = None
        self._probe_time_s = self.time_s

    # -- blocks ---------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Allocate blocks, evicting cached ones where needed."""
        plain = [b for b in self.free if not self.hashed[b]]
        picked = (plain + [b for b in self.free if self.hashed[b]])[:count]
        assert len(picked) == count, "the test asked for more blocks than the pool has"
        for block in picked:
            self.free.remove(block)
            if self.hashed[block]:
                self.hashed[block] = False
                self.counters["evicted"] += 1
            self.refs[block] += 1
        self.counters["allocated"] += count
        return picked

    def give(self, blocks: list[int], *, cache: bool = False) -> None:
        """Give references back; at zero the block is free, or cached."""
        for block in blocks:
            self.refs[block] -= 1
            self.counters["freed"] += 1
            if self.refs[block] == 0:
                self.hashed[block] = self.hashed[block] or cache
                self.free.append(block)

    def touch(self, blocks: list[int]) -> None:
        """Prefix hits."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1
        self.counters["touched"] += len(blocks)

    # -- requests -------------------------------------------------------------------------

    def start(self, name: str, blocks: int = 2, **fields: Any) -> Req:
        """A running request with its blocks."""
        req = Req(name, prompt=blocks * self.block_size, **fields)
        req.blocks = self.take(blocks)
        req.computed = blocks * self.block_size
        self.requests[name] = req
        return req

    def wait(self, name: str, prompt: int = 32, **fields: Any) -> Req:
        """A request that waits."""
        fields = {"phase": Phase.WAITING, "status": "WAITING", "reason": "capacity", **fields}
        req = Req(name, prompt=prompt, **fields)
        self.requests[name] = req
        return req

    def end(self, name: str, *, cache: bool = False) -> None:
        """A request ends and gives everything back."""
        self.give(self.requests.pop(name).blocks, cache=cache)

    def end_but_lose(self, name: str, lost: int) -> list[int]:
        """A request ends and some of its frees get lost."""
        req = self.requests.pop(name)
        self.give(req.blocks[lost:])
        return sorted(req.blocks[:lost])

    def end_into_fence(self, name: str) -> list[int]:
        """A request ends and its blocks wait for a step."""
        req = self.requests.pop(name)
        self.fenced += req.blocks
        return sorted(req.blocks)

    def preempt(self, name: str) -> None:
        """A request gives its blocks back and waits."""
        req = self.requests[name]
        self.give(req.blocks)
        self.counters["preemptions"] += 1
        self.counters["preempted_blocks"] += len(req.blocks)
        self.counters["preempted_tokens"] += req.computed
        req.blocks, req.computed = [], 0
        req.preemptions += 1
        req.phase, req.status, req.reason = Phase.PREEMPTED, "PREEMPTED", None

    def resume(self, name: str, blocks: int) -> None:
        """A waiting request runs."""
        req = self.requests[name]
        req.blocks = self.take(blocks)
        req.computed = blocks * self.block_size
        req.phase, req.status, req.reason = Phase.DECODE, "RUNNING", None

    def decode(self, name: str, tokens: int = 16) -> None:
        """A request produces tokens and takes blocks as it needs them."""
        req = self.requests[name]
        req.output += tokens
        req.computed += tokens
        short = -(-req.computed // self.block_size) - len(req.blocks)
        if short > 0:
            req.blocks += self.take(short)

    # -- time -----------------------------------------------------------------------------

    def tick(self, dt_s: float = 1.0, steps: int = 20) -> Snapshot:
        """Let time and steps pass, then look."""
        self.time_s += dt_s
        self.mono_s += dt_s
        self.step += steps if self.live else 0
        self.counters["steps"] += steps if self.live else 0
        return self.snapshot()

    @property
    def live(self) -> bool:
        """Whether there is any live request."""
        return any(r.phase is not Phase.HELD for r in self.requests.values())

    # -- what is seen ---------------------------------------------------------------------

    def columns_now(self) -> tuple[bytes, bytes, bytes]:
        """States, ref counts and holders of every block."""
        total = len(self.refs)
        holders, live_holders = [0] * total, [0] * total
        for req in self.requests.values():
            for block in req.blocks:
                holders[block] += 1
                live_holders[block] += req.phase is not Phase.HELD
        for block in self.fenced:
            holders[block] += 1
        free = set(self.free)
        states, refs = bytearray(total), bytearray(total)
        for b in range(total):
            refs[b] = max(0, self.refs[b] + self.extra_refs.get(b, 0))
            if b == 0:
                state = BlockState.NULL
            elif live_holders[b]:
                state = BlockState.SHARED if holders[b] > 1 else BlockState.USED
            elif holders[b]:
                state = BlockState.HELD
            elif b in free and refs[b] == 0:
                state = BlockState.CACHED if self.hashed[b] else BlockState.FREE
            else:
                state = BlockState.GHOST
            states[b] = state
        return bytes(states), bytes(refs), bytes(holders)

    def engine(self) -> Engine:
        """The engine as it is now."""
        if self.has_probe and (self.probe_ok or self._last_cut is None):
            self._last_cut = self._cut()
            self._probe_time_s = self.time_s
        base = (
            self._last_cut
            if self.has_probe and self._last_cut is not None
            else Engine(0, self.pid, SERVER, block_size=self.block_size)
        )
        fields = {
            "api_pids": (4700,),
            "worker_pids": (4800,),
            "process_state": "S",
            "metrics": self.metrics,
            **self.engine_fields,
        }
        return replace(base, **fields)

    def _cut(self) -> Engine:
        states, refs, tables = self.columns_now()
        counts = count_states(states)
        rows = tuple(self._row(req, tables) for req in self.requests.values())
        return Engine(
            engine=0,
            pid=self.pid,
            server=SERVER,
            model="tiny",
            vllm_version="0.32.0",
            block_size=self.block_size,
            max_model_len=4096,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=True,
            state="running" if self.live else "idle",
            groups=(Group(0, "FullAttention", self.block_size),),
            pools=(
                Pool(
                    counts=counts,
                    free_queue=counts.free + counts.cached + self.free_queue_error,
                    states=states if self.columns else None,
                    refs=refs if self.columns else None,
                    tables=tables if self.columns else None,
                ),
            ),
            counters=Counters(**self.counters),
            requests=rows,
            probe=ProbeInfo(
                **{
                    "version": "0.1.0",
                    "step": self.step,
                    "scan_us": 50.0,
                    "cost_percent": 0.01,
                    "point": "boundary" if self.live else "idle",
                    "cut_time_s": self.time_s,
                    "step_age_s": 0.02,
                    "verified_age_s": 0.0,
                    **self.probe_fields,
                }
            ),
        )

    def _row(self, req: Req, tables: bytes) -> Request:
        slots = len(req.blocks) * self.block_size
        fields = {
            "id": req.id,
            "status": req.status,
            "phase": req.phase,
            "reason": req.reason,
            "held_s": req.held_s,
            "prompt_tokens": req.prompt,
            "output_tokens": req.output,
            "max_tokens": req.max_tokens,
            "computed_tokens": req.computed,
            "blocks": len(req.blocks),
            "shared_blocks": sum(tables[b] > 1 for b in req.blocks),
            "slack_tokens": max(0, slots - req.computed),
            "preemptions": req.preemptions,
            "lora": req.lora,
            "client": req.client,
            "client_gone_s": req.client_gone_s,
            **req.extra,
        }
        return Request(**fields)

    def _status(self, name: str, kind: str, ok: bool, at_s: float, pid: int | None) -> SourceStatus:
        return SourceStatus(
            name=name,
            kind=kind,
            state=SourceState.OK if ok else SourceState.FAILED,
            since_s=START_S,
            reason="" if ok else "no answer",
            value_time_s=at_s,
            period_s=1.0,
            target_pid=pid,
        )

    def snapshot(self) -> Snapshot:
        """What kvtop sees now."""
        engine = self.engine()
        sources = [
            self._status("discovery", "discovery", True, self.time_s, None),
            self._status("nvml", "nvml", self.nvml_ok, self.time_s, None),
            self._status(f"metrics {SERVER}", "metrics", self.metrics_ok, self.time_s, None),
        ]
        if self.has_probe:
            sources.append(
                self._status(
                    f"engine {self.pid}", "engine", self.probe_ok, self._probe_time_s, self.pid
                )
            )
        return Snapshot(
            time_s=self.time_s,
            mono_s=self.mono_s,
            host="test",
            version="0.1.0",
            sources=tuple(sources),
            gpus=self.gpus,
            engines=(engine,),
        )


class Load:
    """Healthy mixed load on a `Sim`: bursts, idle gaps, aborts, sharing, preemption by need."""

    def __init__(self, sim: Sim, seed: int, *, connector: bool = True) -> None:
        self.sim = sim
        self.rng = random.Random(seed)
        self.connector = connector
        self.idle_left = 0
        self.number = 0
        self.parked: dict[str, int] = {}

    def step(self, dt_s: float = 1.0) -> Snapshot:
        """One second of load, then a look."""
        sim, rng = self.sim, self.rng
        self._finish_parked()
        for name in [n for n, r in sim.requests.items() if r.phase is not Phase.HELD]:
            self._advance(name)
        if self.idle_left:
            self.idle_left -= 1
        elif rng.random() < 0.03:
            self.idle_left = rng.randint(5, 15)
        else:
            for _ in range(rng.choice((0, 0, 1, 1, 2, 5 if rng.random() < 0.2 else 1))):
                self._arrive()
        self._admit()
        return sim.tick(dt_s)

    def _arrive(self) -> None:
        self.number += 1
        self.sim.wait(
            f"req-{self.number}",
            prompt=self.rng.randint(8, 20 * self.sim.block_size // 2),
            max_tokens=self.rng.randint(8, 300),
        )

    def _admit(self) -> None:
        sim = self.sim
        running = sum(r.status == "RUNNING" for r in sim.requests.values())
        for req in list(sim.requests.values()):
            if req.phase not in (Phase.WAITING, Phase.PREEMPTED) or running >= sim.max_num_seqs:
                continue
            need = -(-(req.prompt + req.output) // sim.block_size)
            hits = self._hits(need)
            if need - len(hits) > len(sim.free) - sum(sim.refs[b] == 0 for b in hits):
                sim.counters["alloc_failures"] += 1
                break
            sim.touch(hits)
            req.blocks = hits + sim.take(need - len(hits))
            req.computed = req.prompt + req.output
            req.phase, req.status, req.reason = Phase.DECODE, "RUNNING", None
            running += 1

    def _hits(self, need: int) -> list[int]:
        if self.rng.random() < 0.5:
            return []
        cached = [b for b in range(1, len(self.sim.refs)) if self.sim.hashed[b]]
        return cached[: min(need - 1, self.rng.randint(0, 4))]

    def _advance(self, name: str) -> None:
        sim, rng = self.sim, self.rng
        req = sim.requests.get(name)
        if req is None or req.status != "RUNNING":
            return
        if rng.random() < 0.03:
            sim.end(name)
            return
        tokens = rng.randint(4, 24)
        short = -(-(req.computed + tokens) // sim.block_size) - len(req.blocks)
        while short > len(sim.free):
            victims = [r for r in sim.requests.values() if r.status == "RUNNING"]
            sim.preempt(victims[-1].id)
            if victims[-1] is req:
                return
        sim.decode(name, tokens)
        if req.output >= req.max_tokens:
            if self.connector and rng.random() < 0.1:
                req.phase, req.status, req.reason = Phase.HELD, "FINISHED_STOPPED", "connector"
                self.parked[name] = rng.randint(1, 20)
                req.held_s = 0.0
            else:
                for block in req.blocks:
                    sim.hashed[block] = True
                sim.end(name, cache=True)

    def _finish_parked(self) -> None:
        for name in list(self.parked):
            self.parked[name] -= 1
            req = self.sim.requests[name]
            req.held_s = (req.held_s or 0.0) + 1.0
            if self.parked[name] <= 0:
                del self.parked[name]
                self.sim.end(name)


def gpu(used_percent: float, *, pid: int | None = PID, total: int = 80_000_000_000) -> Gpu:
    """One GPU with one vLLM process on it."""
    used = int(total * used_percent / 100)
    return Gpu(
        index=0,
        name="H100",
        mem_total_bytes=total,
        mem_used_bytes=used,
        mem_free_bytes=total - used,
        processes=(GpuProcess(4800, "VLLM::Worker", used, pid),),
    )


def names(findings: tuple[Finding, ...], prefix: str = "") -> set[str]:
    """Names of rules, diagnoses left out unless asked for."""
    return {
        f.rule
        for f in findings
        if f.rule.startswith(prefix) and (prefix or not f.rule.startswith("diagnosis."))
    }


def alarms(findings: tuple[Finding, ...], prefix: str = "leak.") -> set[str]:
    """Rules of a family that are more than info."""
    return {f.rule for f in findings if f.rule.startswith(prefix) and f.severity != "info"}


def one(findings: tuple[Finding, ...], rule: str) -> Finding:
    """The only finding of a rule."""
    found = [f for f in findings if f.rule == rule]
    assert len(found) == 1, f"{rule}: {len(found)} of {[f.rule for f in findings]}"
    return found[0]


def watch(
    sim: Sim,
    judge: Any,
    seconds: int,
    *,
    dt_s: float = 1.0,
    each: Any = None,
) -> list[tuple[Finding, ...]]:
    """Judge `seconds` looks, with `each(i)` called before every one."""
    out = []
    for i in range(seconds):
        if each is not None:
            each(i)
        out.append(judge.judge(sim.tick(dt_s)))
    return out


def first(history: list[tuple[Finding, ...]], rule: str) -> int | None:
    """Index of the first look at which a rule holds."""
    return next((i for i, f in enumerate(history) if any(x.rule == rule for x in f)), None)
