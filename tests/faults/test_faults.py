"""Real vLLM, broken on purpose: the right rule, in its time, with the exact ids, and no other."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtop.detect import leak_trends
from kvtop.detect.judge import Judge
from kvtop.detect.rule import Candidate
from kvtop.model.snapshot import Finding
from tests.faults.conftest import LIMITS
from tests.faults.watching import (
    Faults,
    LoadThread,
    Look,
    Watcher,
    long_requests,
    many_at_once,
)
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm

HEALTHY_S = float(os.environ.get("KVTOP_HEALTHY_S", "45"))
"""How long the healthy load is watched; 900 for the full proof."""


@dataclass(frozen=True)
class Case:
    """One fault and its verdict."""

    fault: str
    rules: tuple[str, ...]
    within_s: float
    long: int = 0
    """Long requests beside the load, since the others are over within seconds."""
    clears_s: float = 30.0


CASES = (
    Case("lose-free", ("leak.ghost-blocks",), 45),
    Case("bump-ref", ("leak.ref-mismatch", "leak.ghost-blocks"), 40, long=4),
    Case("lose-abort", ("leak.zombie-request",), 60, long=6),
    Case("keep-deferred", ("leak.fence-stuck",), 40),
    Case("forget", ("leak.orphan-table",), 40),
    Case("keep-sent", ("leak.held-past-lease",), 40),
)
LOOP = (
    Case("wedge", ("pressure.idle-pool-blocked",), 75),
    Case("stall", ("health.stalled",), 30),
)
"""Faults that lose no block."""
MEMORY = ("leak-host", "leak-tensor")
"""Faults that touch no block, and take a minute to tell: they go on beside others."""
BESIDE = ("lose-abort", "keep-deferred", "forget", "keep-sent")
"""The others."""


def named(look: Look, rules: tuple[str, ...]) -> list[Finding]:
    """The findings of these rules in a look."""
    return [f for f in look.findings if f.rule in rules]


def state(watcher: Watcher, faults: Faults, fault: str) -> str:
    """What there is to say when a fault was not found."""
    last = watcher.looks[-1]
    (engine,) = last.snapshot.engines
    rows = [(r.id, r.status, r.reason, r.client, r.blocks) for r in engine.requests or ()]
    return (
        f"{fault}: broken {faults.broken(fault)}; told "
        f"{[(f.rule, f.severity, f.block_ids, f.request_ids) for f in last.findings]}; requests "
        f"{rows[:24]}; probe {engine.probe}; sources "
        f"{[(s.name, s.state.value, s.reason) for s in last.snapshot.sources]}"
    )


def test_healthy_load_has_no_leak_warning(server: Server, watcher: Watcher) -> None:
    begin = len(watcher.looks)
    end = time.monotonic() + HEALTHY_S
    with LoadThread(server.url, 1) as load:
        while time.monotonic() < end:
            # Sixteen of fifteen blocks each, and growing, in 255: preemptions for certain.
            with long_requests(server.url, 16, 2000, prompt=1900):
                time.sleep(min(45.0, HEALTHY_S * 0.75))
            time.sleep(min(60.0, max(0.0, end - time.monotonic())))
    time.sleep(10)
    looks = watcher.looks[begin:]
    assert preemptions(looks[-1]) > preemptions(looks[0])
    told = {rule for look in looks for rule in look.rules("leak.")}

    assert not told, [f for look in looks for f in look.findings if f.rule in told][:3]
    assert load.done["finished"] > 0
    assert load.done["left"] > 0
    assert len(looks) > HEALTHY_S * 0.7


def preemptions(look: Look) -> int:
    """Preemptions so far."""
    (engine,) = look.snapshot.engines
    assert engine.counters is not None
    return engine.counters.preemptions or 0


def long_running(look: Look) -> int:
    """Long requests that produce tokens."""
    (engine,) = look.snapshot.engines
    return sum((r.max_tokens or 0) > 3000 and bool(r.output_tokens) for r in engine.requests or ())


@pytest.fixture(scope="class")
def load(server: Server) -> Iterator[LoadThread]:
    """Short requests, all the time that faults are looked for."""
    with LoadThread(server.url, 5, gaps=False, slots=4) as load:
        time.sleep(3)
        yield load


@pytest.fixture(scope="class")
def leaking(watcher: Watcher, faults: Faults) -> Iterator[int]:
    """Memory that leaks from the first test that asks for it on; the number of looks then."""
    begin = len(watcher.looks)
    for fault in MEMORY:
        faults.on(fault)
    yield begin
    for fault in MEMORY:
        faults.off(fault)


@pytest.mark.usefixtures("load")
class TestFaults:
    """One after the other, under load."""

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
    def test_a_fault_is_found_alone_with_its_ids_and_clears(
        self,
        case: Case,
        server: Server,
        watcher: Watcher,
        faults: Faults,
        request: pytest.FixtureRequest,
    ) -> None:
        if case.fault in BESIDE:
            request.getfixturevalue("leaking")
        self._found_and_cleared(case, server, watcher, faults)

    def _found_and_cleared(
        self, case: Case, server: Server, watcher: Watcher, faults: Faults
    ) -> None:
        with long_requests(server.url, case.long) as leave:
            # Clients that leave before the engine has their requests leave nothing behind.
            there = watcher.until(lambda look: long_running(look) >= case.long, 90)
            assert there is not None, state(watcher, faults, case.fault)
            begin = len(watcher.looks)
            start = time.monotonic()
            faults.on(case.fault)
            if case.fault == "lose-abort":
                time.sleep(1)
                leave.set()
            try:
                look = watcher.until(lambda look: named(look, case.rules), case.within_s, begin)
                assert look is not None, state(watcher, faults, case.fault)
                print(f"\n{case.fault}: told after {look.mono_s - start:.0f} s", end="")
                _check_ids(case, watcher, faults, begin)
            finally:
                faults.off(case.fault)
            there = len(watcher.looks)
            off = time.monotonic()
            gone = watcher.until(lambda look: not named(look, case.rules), case.clears_s, there)
            assert gone is not None, "not clear: " + state(watcher, faults, case.fault)
            print(f", clear after {gone.mono_s - off:.0f} s")
        told = {rule for look in watcher.looks[begin:] for rule in look.rules("leak.")}
        assert told <= set(case.rules), state(watcher, faults, case.fault)

    def test_memory_that_leaks_is_told_of_its_process_and_no_other(
        self, leaking: int, watcher: Watcher, faults: Faults
    ) -> None:
        rule = ("host.rss-growth",)
        look = watcher.until(lambda look: len(named(look, rule)) == len(MEMORY), 60, leaking)
        assert look is not None, state(watcher, faults, "memory")
        took_s = look.mono_s - watcher.looks[leaking].mono_s
        print(f"\nmemory: told after {took_s:.0f} s")
        assert took_s < 110
        (engine,) = look.snapshot.engines
        pids = {f.evidence["process"] for f in named(look, rule)}
        assert pids == {
            f"engine core, pid {engine.pid}",
            f"worker, pid {engine.worker_pids[0]}",
        }
        for fault in MEMORY:
            broken = faults.broken(fault)
            assert broken is not None
            assert broken["pid"] in (engine.pid, engine.worker_pids[0])
            faults.off(fault)

    @pytest.mark.parametrize("case", LOOP, ids=lambda case: case.fault)
    def test_a_loop_that_does_not_go_on_is_told_and_clears(
        self, case: Case, server: Server, watcher: Watcher, faults: Faults
    ) -> None:
        self._found_and_cleared(case, server, watcher, faults)

    @pytest.mark.usefixtures("leaking")
    def test_memory_that_leaks_no_more_is_told_no_more(
        self, watcher: Watcher, faults: Faults
    ) -> None:
        gone = watcher.until(lambda look: not named(look, ("host.rss-growth",)), 60)
        assert gone is not None, state(watcher, faults, "memory")


def _check_ids(case: Case, watcher: Watcher, faults: Faults, begin: int) -> None:
    """The findings name what was broken, and nothing else, once all of it is old enough."""

    def right(look: Look) -> bool:
        broken = faults.broken(case.fault)
        if broken is None:
            return False
        found = named(look, case.rules)
        blocks = {block for f in found for block in f.block_ids}
        requests = {request for f in found for request in f.request_ids}
        if case.fault == "lose-abort":
            return bool(requests) and requests <= set(broken["requests"])
        if case.fault in ("forget", "keep-sent"):
            return requests == set(broken["requests"])
        if broken["blocks"]:
            return blocks == set(broken["blocks"])
        return bool(found)

    look = watcher.until(right, 40, begin)
    assert look is not None, state(watcher, faults, case.fault)


def slow_rules(judge: Judge) -> dict[str, Candidate]:
    """What the rules over time say by themselves, before a surer one hides them."""
    (engine,) = judge.track.engines.values()
    checks = {"floor": leak_trends.floor_falling, "balance": leak_trends.imbalance}
    said = {name: check(judge.track, engine, LIMITS) for name, check in checks.items()}
    return {name: found[0] for name, found in said.items() if found}


def test_what_is_lost_over_time_shows_in_the_floor_and_in_the_balance(
    server: Server, watcher: Watcher, faults: Faults, tmp_path: Path
) -> None:
    """With the probe the blocks themselves are told; from the gauges only the floor is."""
    begin = len(watcher.looks)
    with Watcher(server.url, LIMITS, tmp_path) as gauges:
        watcher.more = slow_rules
        faults.on("lose-many")
        try:
            for burst in range(8):
                many_at_once(server.url, 2, seed=burst)
                idle = len(gauges.looks) + 2
                assert gauges.until(at_rest, 20, idle), "the server never rests"
            look = watcher.until(lambda look: len(look.more or ()) == 2, 20, begin)
            assert look is not None, watcher.looks[-1].more
            broken = faults.broken("lose-many")
            assert broken is not None
            hint = gauges.until(lambda look: named(look, ("leak.floor-falling",)), 20)
            assert hint is not None
        finally:
            faults.off("lose-many")
            many_at_once(server.url, 1, seed=99)
            watcher.more = None
    floor, balance = look.more["floor"], look.more["balance"]
    assert floor.start
    assert balance.start
    assert float(balance.evidence["ratio"]) < LIMITS.balance_low
    lost = len(broken["blocks"])
    first, last = (int(n) for n in floor.evidence["floor"].split(" of ")[0].split(" -> "))
    assert 0 < first - last <= lost
    # The surer rule names the blocks, and those over time are its symptoms.
    told = {rule for look in watcher.looks[begin:] for rule in look.rules("leak.")}
    assert told == {"leak.ghost-blocks"}
    # Gauges alone prove no leak.
    (hint,) = named(hint, ("leak.floor-falling",))
    assert hint.severity == "info"
    assert not [rule for look in gauges.looks for rule in look.rules("leak.")]
    gone = watcher.until(lambda look: not named(look, ("leak.ghost-blocks",)), 30)
    assert gone is not None


def at_rest(look: Look) -> bool:
    """By the gauges alone."""
    (engine,) = look.snapshot.engines
    return engine.metrics is not None and (engine.metrics.running, engine.metrics.waiting) == (0, 0)
