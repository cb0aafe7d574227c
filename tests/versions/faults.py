"""What goes on besides normal work, on the installed vLLM; prints what came of it as JSON.

Requests and blocks that are held, paused and sleeping engines, and objects that lack
attributes the probe or vLLM itself would read.

usage: PYTHONPATH=<repository> python faults.py MODEL
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from version_bench import Bench, Counted, make_config
from version_walk import Truth
from version_watch import Ask, Watcher, get

BLOCKS = 32
HOST_BLOCKS = 24
"""Size of the second pool."""
SEEDS = 30
"""Runs with attributes removed at random, besides one for each that the probe reads."""
STEPS = 14
PENDING = 4
"""Most questions on their way at once: the probe takes only so many connections."""
WAIT_S = 0.25


def row(body: dict[str, Any], rid: str) -> dict[str, Any]:
    """A request's row."""
    columns = body["requests"]["columns"]
    rows = {r[0]: dict(zip(columns, r, strict=True)) for r in body["requests"]["rows"]}
    return rows.get(rid, {})


def held(w: Watcher, rid: str) -> dict[str, Any]:
    """What is said of a held request, twice."""
    names = ("status", "phase", "reason", "held_s", "blocks")
    first = row(w.look(), rid)
    time.sleep(WAIT_S)
    second = row(w.look(), rid)
    counts = w.last["pools"][0]["counts"]
    return {
        **{name: second.get(name) for name in names},
        "grew_s": second["held_s"] - first["held_s"],
        "held_blocks": counts["held"],
        "ghost_blocks": counts["ghost"],
    }


def connector(make: Callable[..., Watcher], config: Any) -> dict[str, Any]:
    """Requests that wait for remote KV, and blocks kept for sending or receiving."""
    from vllm.v1.outputs import KVConnectorOutput

    w = make(config)
    bench = w.bench
    stub = bench.scheduler.connector
    result: dict[str, Any] = {}
    rid = bench.add(100, 5)
    stub.remote[rid] = 80
    w.step()
    result["remote"] = held(w, rid)
    bench.connector_output = KVConnectorOutput(finished_recving={rid})
    w.step()
    w.step()
    result["arrived"] = row(w.look(), rid)["phase"]
    stub.keep = True
    while bench.scheduler.requests[rid].status.name == "RUNNING":
        w.step()
    result["sending"] = held(w, rid)
    bench.connector_output = KVConnectorOutput(finished_sending={rid})
    w.step()
    result["sent"] = row(w.look(), rid)
    rid = bench.add(70, 5)
    stub.remote[rid] = 64
    w.step()
    bench.abort(rid)
    result["aborted"] = held(w, rid)
    bench.connector_output = KVConnectorOutput(finished_recving={rid})
    w.step()
    result["after"] = w.look()["pools"][0]["counts"]
    return result


def fences(make: Callable[..., Watcher], config: Any) -> dict[str, Any]:
    """Blocks of an aborted request that a step in flight may still write."""
    w = make(config)
    w.bench.scheduler.defer_block_free = True
    rid = w.bench.add(60, 20)
    w.step()
    output = w.bench.schedule()
    w.bench.abort(rid)
    body = w.look()
    result = {"row": row(body, rid), "during": body["pools"][0]["counts"]}
    w.bench.update(output)
    result["after"] = w.look()["pools"][0]["counts"]
    return result


def host_pool(make: Callable[..., Watcher], config: Any) -> dict[str, Any]:
    """One group in a pool of its own, bound as `HiSparseSourceManager.bind_host_pool` does it."""
    from vllm.v1.core.block_pool import BlockPool

    def bind(bench: Bench) -> None:
        window = bench.managers[1]
        hash_size = window.block_pool.hash_block_size
        window.block_pool = BlockPool(HOST_BLOCKS, True, hash_size, medium="CPU")
        window._null_block = window.block_pool.null_block

    w = make(config, windowed=True, before=bind)
    bench = w.bench
    for _ in range(3):
        bench.add(90, 40)
    busy: dict[str, int] = {}
    wrong: list[Any] = []
    result = {"labels": [], "busy": busy, "wrong": wrong, "looks": 0}
    while bench.scheduler.requests:
        bench.step()
        status, body = w.ask().answer()
        if status != 200:
            wrong.append((status, body))
            break
        result["looks"] += 1
        result["labels"] = [pool["label"] for pool in body["pools"]]
        for manager, pool in zip(bench.managers, body["pools"], strict=True):
            null = manager.block_pool.null_block
            tables = manager.req_to_blocks.values()
            held = sum(block is not null for table in tables for block in table)
            counts, free = pool["counts"], manager.block_pool.get_num_free_blocks()
            wanted = [len(manager.block_pool.blocks), 1, held, free, free]
            got = [counts["total"], counts["null"], counts["used"]]
            got += [counts["free"] + counts["cached"], pool["free_queue"]]
            if got != wanted or counts["ghost"] + counts["held"] + counts["shared"]:
                wrong.append((pool["label"], counts, wanted))
            busy[pool["label"]] = max(busy.get(pool["label"], 0), counts["used"])
    return result


def paused(make: Callable[..., Watcher], config: Any) -> dict[str, Any]:
    """Engines that do nothing on purpose."""
    from vllm.v1.core.sched.interface import PauseState

    w = make(config)
    running = w.bench.add(20, 30)
    w.step()
    waiting = w.bench.add(20, 5)
    result: dict[str, Any] = {}
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, PauseState.UNPAUSED):
        w.bench.scheduler.set_pause_state(state)
        w.step()
        body = w.look()
        result[state.name] = {
            "engine": body["engine"]["state"],
            "running": row(body, running)["phase"],
            "waiting": [row(body, waiting)[name] for name in ("phase", "reason")],
        }
    w.bench.engine.model_executor.is_sleeping = True
    result["sleeping"] = w.look()["engine"]["state"]
    return result


def stops_itself(make: Callable[..., Watcher], config: Any) -> dict[str, Any]:
    """Something in a place that the probe reads and this scheduler, without a fence, never does."""
    w = make(config)
    scheduler = w.bench.scheduler
    rid = w.bench.add(40, 30)
    w.step()
    own = set(vars(scheduler)) - {p[1] for p in w.probe.role.watch._placed if p[0] is scheduler}
    scheduler.deferred_frees = deque([(1, [object()])])
    asks = [w.ask()]
    for _ in range(15):
        if sum(not ask.done for ask in asks) < PENDING:
            asks.append(w.ask())
        w.bench.step()
    statuses = [ask.answer() for ask in asks]
    hello = w.hello()
    for _ in range(50):
        if set(vars(scheduler)) <= own:
            break
        time.sleep(0.05)
    left = sorted(set(vars(scheduler)) - own)
    scheduler.deferred_frees.clear()
    while rid in scheduler.requests:
        w.bench.step()
    return {
        "hello": {name: hello[name] for name in ("state", "reason")},
        "statuses": sorted({status for status, _ in statuses}),
        "errors": sorted({body["error"] for status, body in statuses if status == 503}),
        "left_behind": left,
    }


READ = {
    "scheduler": (
        "requests waiting running deferred_frees deferred_waiting kv_holding_waiting _pause_state "
        "connector vllm_config kv_cache_config block_size max_model_len max_num_running_reqs"
    ),
    "manager": "block_pool coordinator kv_cache_config",
    "coordinator": "single_type_managers block_pool",
    "group": "req_to_blocks block_size kv_cache_spec block_pool",
    "pool": "blocks free_block_queue null_block enable_caching",
    "queue": "num_free_blocks fake_free_list_tail",
    "block": "ref_cnt _block_hash is_null next_free_block prev_free_block block_id pool",
    "request": "request_id status arrival_time num_computed_tokens num_prompt_tokens max_tokens",
}
"""What the probe reads of each kind of object."""


def objects(bench: Bench) -> dict[str, Any]:
    """One object of each kind."""
    pool = bench.pool
    scheduler = bench.scheduler
    return {
        "scheduler": scheduler,
        "manager": scheduler.kv_cache_manager,
        "coordinator": scheduler.kv_cache_manager.coordinator,
        "group": bench.managers[0],
        "pool": pool,
        "queue": pool.free_block_queue,
        "block": pool.blocks[7],
        "request": next(iter(scheduler.requests.values())),
    }


def pick(rng: random.Random, there: dict[str, Any]) -> list[tuple[str, str]]:
    """One to three attributes to remove: mostly such as the probe reads."""
    chosen = []
    for _ in range(rng.randrange(1, 4)):
        kind = rng.choice(sorted(READ))
        names = READ[kind].split()
        if rng.random() < 0.3 and hasattr(there[kind], "__dict__"):
            names = sorted(vars(there[kind]))
        chosen.append((kind, rng.choice(names)))
    return chosen


def mutilated(
    config: Any,
    seed: int,
    removed: tuple[str, int] | None,
    directory: str,
    counted: Counted,
    probed: bool,
) -> dict[str, Any]:
    """A run in which attributes go missing; the same with and without the probe.

    Args:
        removed: `kind.name` and before which step, -1 for before the probe; None: at random.
    """
    rng = random.Random(seed)
    bench = Bench(config, BLOCKS, counted, windowed=bool(seed % 2), seed=seed)
    for _ in range(4):
        bench.add(rng.randrange(20, 90), 40)
    bench.step()
    there = objects(bench)
    if removed is None:
        chosen, when = pick(rng, there), rng.choice((-1, 0, 3))
    else:
        kind, name = removed[0].split(".")
        chosen, when = [(kind, name)], removed[1]
    result: dict[str, Any] = {"removed": [".".join(c) for c in chosen], "when": when}

    def remove() -> None:
        for kind, name in chosen:
            try:
                delattr(there[kind], name)
            except AttributeError:
                continue

    watcher = None
    asks: list[Ask] = []
    if when < 0:
        remove()
    if probed:
        try:
            watcher = Watcher(bench, directory)
        except LookupError as error:
            result["refused"] = str(error)
    trace: list[Any] = []
    late = 0
    for step in range(STEPS):
        if step == when:
            remove()
            late = len(asks)
        if watcher is not None and sum(not ask.done for ask in asks) < PENDING:
            asks.append(watcher.ask())
        try:
            output = bench.step()
            trace.append(sorted(output.num_scheduled_tokens.items()))
        except Exception as error:  # vLLM itself cannot go on.
            trace.append(f"{type(error).__name__}: {error}")
            break
    result["trace"] = trace
    if watcher is not None:
        result.update(aftermath(watcher, asks[late:]))
        watcher.stop()
        result["gone"] = not watcher.probe._thread.is_alive()
        names = ("schedule", "add_request")
        result["left_behind"] = [name for name in names if name in vars(bench.scheduler)]
    return result


def aftermath(w: Watcher, asks: list[Ask]) -> dict[str, Any]:
    """What the probe says in the end."""
    answers = [ask.answer() for ask in asks]
    if not w.probe._thread.is_alive():
        return {"state": "dead", "reason": w.probe.reason, "errors": 0, "wrong": []}
    hello = w.hello()
    said = {
        "state": hello["state"],
        "reason": hello["reason"],
        "missing": hello["missing"],
        "errors": w.probe.role.watch.errors,
        "statuses": sorted({status for status, _ in answers}),
        "texts": sorted({body.get("error", "") for status, body in answers if status != 200}),
        "wrong": [],
    }
    if hello["state"] != "ok":
        return said  # Its last cut, with an age.
    try:
        truth = Truth(w.bench)
    except Exception:
        return said  # Nothing to compare with: vLLM's own accessors fail.
    status, body = get(w.probe.socket_path, "/v1/snapshot")
    if status == 200 and body["age_s"] < 0.2:
        counts = body["pools"][0]["counts"]
        names = ("free", "cached", "used", "shared", "held", "ghost", "null")
        wanted = {name: truth.states.count(i) for i, name in enumerate(names)}
        said["wrong"] = [n for n in names if counts[n] != wanted[n]]
    return said


def removals(config: Any, directory: str, counted: Counted) -> dict[str, Any]:
    """Many such runs."""
    each = [f"{kind}.{name}" for kind, names in READ.items() for name in names.split()]
    plan: list[tuple[str, int] | None] = [(name, when) for name in each for when in (-1, 2)]
    plan += [None] * SEEDS
    runs = []
    for seed, removed in enumerate(plan):
        plain = mutilated(config, seed, removed, directory, counted, probed=False)
        probed = mutilated(config, seed, removed, directory, counted, probed=True)
        probed["same"] = plain["trace"] == probed["trace"]
        probed["trace"] = [len(probed["trace"]), probed["trace"][-1]]
        runs.append(probed)
    return {"runs": runs}


def main() -> None:
    """Prints one line of JSON."""
    from vllm.config import KVTransferConfig

    counted = Counted()
    counted.follow()
    result: dict[str, Any] = {}
    plain = make_config(sys.argv[1])
    with_connector = make_config(
        sys.argv[1],
        kv_transfer_config=KVTransferConfig(
            kv_connector="StubConnector",
            kv_connector_module_path="version_connector",
            kv_role="kv_both",
        ),
    )
    with tempfile.TemporaryDirectory() as directory:

        def run(name: str, scenario: Callable[..., dict[str, Any]], config: Any) -> None:
            watchers: list[Watcher] = []

            def make(
                config: Any,
                windowed: bool = False,
                before: Callable[[Bench], None] = lambda bench: None,
            ) -> Watcher:
                bench = Bench(config, BLOCKS, counted, windowed)
                before(bench)
                watchers.append(Watcher(bench, directory))
                return watchers[-1]

            try:
                result[name] = scenario(make, config)
                result[name]["failures"] = [f for w in watchers for f in w.failures]
            except Exception:
                result[name] = {"failures": [traceback.format_exc()[-3000:]]}
            finally:
                for watcher in watchers:
                    watcher.stop()

        run("connector", connector, with_connector)
        run("fences", fences, plain)
        run("paused", paused, plain)
        run("host_pool", host_pool, plain)
        run("stops_itself", stops_itself, plain)
        try:
            result["removals"] = removals(plain, directory, counted)
        except Exception:
            result["removals"] = {"runs": [], "failures": [traceback.format_exc()[-3000:]]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
