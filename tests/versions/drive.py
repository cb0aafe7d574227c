"""Drives one version's scheduler with the probe on it; prints what came of it as JSON.

usage: PYTHONPATH=FOLDER/<version>:<repository> python drive.py MODEL
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from typing import Any

from version_bench import BLOCK, PAGE, Bench, Counted, make_config
from version_watch import Watcher, get

BLOCKS = 32


def finish(watcher: Watcher, most: int = 400) -> None:
    """Steps until nothing is left."""
    for _ in range(most):
        if not watcher.bench.scheduler.requests:
            break
        watcher.step()
    # vLLM tells the workers of finished requests in one step more.
    watcher.step()


def one_request(w: Watcher) -> None:
    """Allocation, chunked prefill, decode, finish."""
    rid = w.bench.add(150, 20)
    phases = []
    while rid in w.bench.scheduler.requests:
        # A cut at the beginning of a step can come too late for it; one before it cannot.
        rows = w.look()["requests"]
        place = rows["columns"].index("phase")
        phases += [row[place] for row in rows["rows"]]
        w.step()
    # Three chunks of at most 64 tokens: before the first it waits.
    if phases[:4] != ["waiting", "prefill", "prefill", "decode"]:
        w.wrong("phases of a chunked prefill", phases[:4], "waiting, prefill twice, decode")
    w.look()


def shared_prefix(w: Watcher) -> None:
    """Prefix hits, first on blocks that nobody holds, then on blocks in use."""
    prefix = w.bench.tokens(4 * BLOCK)
    before = w.look()["counters"]["touched"]
    w.bench.add([*prefix, 1, 2, 3], 4)
    finish(w)
    for i in range(3):
        w.bench.add([*prefix, 4 + i], 12)
        w.step()
        w.step()
    shared = w.look()["pools"][0]["counts"]["shared"]
    if shared < 1 or w.last["counters"]["touched"] <= before:
        w.wrong("shared blocks", shared, "some")
    detail(w)
    finish(w)


def detail(w: Watcher) -> None:
    """A request's tables and who else has its blocks."""
    for rid in list(w.bench.scheduler.requests):
        status, body = get(w.probe.socket_path, f"/v1/requests/{rid}")
        tables = [m.req_to_blocks.get(rid) or [] for m in w.bench.managers]
        got = {t["group"]: t["blocks"] for t in body["tables"]}
        wanted = {i: [b.block_id for b in t] for i, t in enumerate(tables) if t}
        if status != 200 or got != wanted:
            w.wrong(f"tables of {rid}", got, wanted)


def storm(w: Watcher) -> None:
    """More than fits: preemption and recomputation."""
    for _ in range(6):
        w.bench.add(50, 70)
    finish(w)
    if not w.look()["counters"]["preemptions"]:
        w.wrong("preemptions", 0, "some")


def aborts(w: Watcher) -> None:
    """Clients that leave in each state, between and within steps."""
    for _ in range(8):
        w.bench.add(90, 40)
    for n in range(12):
        w.step()
        requests = w.bench.scheduler.requests
        if n % 2 and requests:
            w.bench.abort(w.bench.rng.choice(list(requests)))
            w.look()
    if w.bench.scheduler.requests:
        output = w.bench.schedule()
        w.bench.abort(next(iter(w.bench.scheduler.requests)))
        w.bench.update(output)
    w.look()
    finish(w)


def churn(w: Watcher) -> None:
    """Everything at once, at random from a seed."""
    rng = w.bench.rng
    prefixes = [w.bench.tokens(3 * BLOCK) for _ in range(2)]
    for _ in range(120):
        requests = w.bench.scheduler.requests
        if len(requests) < 8 and rng.random() < 0.5:
            w.bench.add(
                [*rng.choice(prefixes), *w.bench.tokens(rng.randrange(1, 120))],
                rng.randrange(1, 60),
            )
        if requests and rng.random() < 0.06:
            w.bench.abort(rng.choice(list(requests)))
        w.step()
    finish(w)


def all_back(w: Watcher) -> None:
    """Nobody is there any more: every block is free or cached."""
    counts = w.look()["pools"][0]["counts"]
    if counts["free"] + counts["cached"] != BLOCKS - 1 or w.last["requests"]["rows"]:
        w.wrong("blocks after the last request", counts, f"{BLOCKS - 1} free or cached")
    if not w.bench.scheduler.reset_prefix_cache():
        w.wrong("reset_prefix_cache", False, True)
    if w.look()["pools"][0]["counts"]["cached"]:
        w.wrong("cached blocks after a reset", w.last["pools"][0]["counts"], 0)


def drive(config: Any, windowed: bool, directory: str, counted: Counted) -> dict[str, Any]:
    """All scenarios on one configuration."""
    bench = Bench(config, BLOCKS, counted, windowed, seed=int(windowed))
    own = set(vars(bench.scheduler))
    watcher = Watcher(bench, directory)
    try:
        for scenario in (one_request, shared_prefix, storm, aborts, churn, all_back):
            scenario(watcher)
        watcher.check_totals()
        hello = watcher.hello()
        engine = watcher.last["engine"]
    finally:
        watcher.stop()
    left = sorted(set(vars(bench.scheduler)) - own)
    return {
        "failures": watcher.failures,
        "cuts": watcher.cuts,
        "late": watcher.late,
        "points": sorted(watcher.points),
        "seen": watcher.seen,
        "counters": watcher.last["counters"],
        "found": hello["found"],
        "missing": hello["missing"],
        "version": hello["vllm_version"],
        "engine": engine,
        "block_bytes": PAGE,
        "left_behind": left,
    }


def main() -> None:
    """Prints one line of JSON."""
    result: dict[str, Any] = {}
    counted = Counted()
    counted.follow()
    config = make_config(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        for name, windowed in (("full", False), ("window", True)):
            try:
                result[name] = drive(config, windowed, directory, counted)
            except Exception:
                result[name] = {"failures": [traceback.format_exc()[-3000:]]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
