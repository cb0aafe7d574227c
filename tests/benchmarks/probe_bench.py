"""What the probe costs the engine's thread: `python tests/benchmarks/probe_bench.py`.

A synthetic pool of vLLM-shaped blocks, 256 requests that decode, come and go; cuts at 10 Hz of
simulated steps. Prints microseconds; nothing is asserted, since machines differ.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "probe"))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import random
from types import SimpleNamespace

from probe_fakes import BlockPool, FullAttentionManager, Request, Scheduler

from kvtop.probe.answer import pool_json
from kvtop.probe.engine import EngineRole
from kvtop.probe.facts import EngineFacts


class Manager(FullAttentionManager):
    """Without content: no hits, and a full block gets any hash."""

    def hits(self, request):
        return []

    def cache(self, request, tokens):
        table = self.req_to_blocks[request.request_id]
        i = tokens // self.block_size - 1
        while i >= 0 and table[i]._block_hash is None:
            table[i]._block_hash = b"x"
            i -= 1


def build(blocks, requests, block_size):
    pool = BlockPool(blocks)
    scheduler = Scheduler([Manager(pool, 0, block_size)], budget=10**9, max_running=requests)
    engine = SimpleNamespace(scheduler=scheduler, model="bench")
    rng = random.Random(1)
    each = int(blocks * 0.9 / requests) * block_size
    for n in range(requests):
        add(scheduler, n, rng.randrange(each // 2, each), rng.randrange(20, 1500))
    return engine, pool, rng, each


def add(scheduler, n, prompt, output):
    request = Request(f"cmpl-{n:032x}-0", [], output)
    request.tokens = [0] * prompt
    request.num_prompt_tokens = prompt
    scheduler.add_request(request)


def show(name, values, unit="us"):
    ordered = sorted(values)
    median, late = statistics.median(ordered), ordered[int(len(ordered) * 0.95)]
    print(f"{name:44s} p50 {median:9.1f}  p95 {late:9.1f}  max {ordered[-1]:9.1f} {unit}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--cuts", type=int, default=150)
    parser.add_argument("--steps-a-cut", type=int, default=4, help="25 ms steps polled at 10 Hz")
    options = parser.parse_args()
    engine, pool, rng, each = build(options.blocks, options.requests, options.block_size)
    scheduler = engine.scheduler
    role = EngineRole(EngineFacts(engine), 0, lambda: None)
    number = options.requests

    def step():
        nonlocal number
        scheduler.update_from_output(scheduler.schedule(), rng)
        while len(scheduler.requests) < options.requests:
            number += 1
            add(scheduler, number, rng.randrange(each // 2, each), rng.randrange(20, 1500))

    step()
    gc.collect()
    gc.freeze()
    bare = []
    for _ in range(60):
        begin = time.thread_time()
        step()
        bare.append((time.thread_time() - begin) * 1e6)
    role.start()
    watched = []
    for _ in range(60):
        begin = time.thread_time()
        step()
        watched.append((time.thread_time() - begin) * 1e6)
    tables = scheduler.kv_cache_manager.managers[0].req_to_blocks.values()
    entries = sum(len(table) for table in tables)
    print(f"{options.blocks} blocks, {len(scheduler.running)} requests, {entries} table entries")
    show("fake step, not watched", bare)
    show("fake step, watched, no client", watched)
    print(f"{'one wrapper adds':44s} {role.watch.call_ns:13.0f} ns")

    def apply(raw):
        begin = time.thread_time()
        role._take(raw)
        for p in role.ledger.pools:
            pool_json(p, True)
        assert role.watch.errors == 0, role.watch.last_error
        return (time.thread_time() - begin) * 1e6

    role.capture.reset()
    slices = []
    while True:
        begin = time.thread_time()
        raw = role.capture.slice(on_engine=True)
        slices.append((time.thread_time() - begin) * 1e6)
        if raw is not None:
            break
        step()
    show(f"first scan: {len(slices)} slices, each", slices)
    print(f"{'first scan: own thread, CPU':44s} {apply(raw) / 1000:13.1f} ms")
    took, after = [], []
    changed = 0
    for _ in range(options.cuts):
        for _ in range(options.steps_a_cut):
            step()
        changed += len(role.watch.dirty[0])
        while True:
            begin = time.thread_time()
            raw = role.capture.slice(on_engine=True)
            took.append((time.thread_time() - begin) * 1e6)
            if raw is not None:
                break
            step()
        after.append(apply(raw))
    print(f"{'changed blocks listed a cut':44s} {changed / options.cuts:13.0f}")
    show("steady cut on the engine's thread", took)
    show("steady cut on the probe's own thread, CPU", after)
    print(
        f"{'at 10 Hz, share of the engine thread':44s} {statistics.mean(took) * 10 / 1e4:13.3f} %"
    )
    for identity, value in (
        (
            "free + cached - free queue",
            role.ledger.pools[0].counts[0]
            + role.ledger.pools[0].counts[1]
            - pool.get_num_free_blocks(),
        ),
        ("blocks with refs != holders", role.ledger.pools[0].mismatches()),
        ("drift", role.ledger.drift),
    ):
        print(f"{identity:44s} {value:13d}")
    role.stop()


if __name__ == "__main__":
    main()
