"""Real vLLM, broken on purpose: the right rule, in its time, with the exact ids, and no other."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

import pytest

from kvtop.model.snapshot import Engine, Finding
from tests.faults.watching import Faults, LoadThread, Look, Watcher, long_requests
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm

HEALTHY_S = float(os.environ.get("KVTOP_HEALTHY_S", "60"))
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
    Case("wedge", ("pressure.idle-pool-blocked",), 75),
    Case("stall", ("health.stalled",), 30),
    Case("leak-host", ("host.rss-growth",), 110, clears_s=90),
    Case("leak-tensor", ("host.rss-growth",), 110, clears_s=90),
)


def named(look: Look, rules: tuple[str, ...]) -> list[Finding]:
    """The findings of these rules in a look."""
    return [f for f in look.findings if f.rule in rules]


@contextlib.contextmanager
def load_for(case: Case, server: Server) -> Iterator[threading.Event]:
    """The load under which a fault is looked for; the event makes the long ones' clients go."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(LoadThread(server.url, 5, gaps=False, slots=4))
        time.sleep(3)
        leave = stack.enter_context(long_requests(server.url, case.long))
        time.sleep(2)
        yield leave


def test_healthy_load_has_no_leak_warning(server: Server, watcher: Watcher) -> None:
    begin = len(watcher.looks)
    end = time.monotonic() + HEALTHY_S
    with LoadThread(server.url, 1) as load:
        while time.monotonic() < end:
            # Sixteen long answers are more than 256 blocks: preemptions for certain.
            with long_requests(server.url, 16, 2600):
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_a_fault_is_found_alone_with_its_ids_and_clears(
    case: Case, server: Server, watcher: Watcher, faults: Faults
) -> None:
    if case.fault == "leak-tensor" and "rss_by_pid" not in {f.name for f in fields(Engine)}:
        pytest.skip("snapshots hold no host memory of workers")
    with load_for(case, server) as leave:
        begin = len(watcher.looks)
        faults.on(case.fault)
        if case.fault == "lose-abort":
            time.sleep(1)
            leave.set()
        try:
            look = watcher.until(lambda look: named(look, case.rules), case.within_s, begin)
            assert look is not None, (
                f"{case.fault}: {case.rules} not found within {case.within_s} s; it broke "
                f"{faults.broken(case.fault)}, the last look says "
                f"{[f.summary for f in watcher.looks[-1].findings]}; sources "
                f"{[(s.name, s.state.value, s.reason) for s in watcher.looks[-1].snapshot.sources]}"
            )
            _check_ids(case, watcher, faults, begin)
        finally:
            faults.off(case.fault)
        there = len(watcher.looks)
        gone = watcher.until(lambda look: not named(look, case.rules), case.clears_s, there)
        assert gone is not None, f"{case.fault}: not clear within {case.clears_s} s"
    told = {rule for look in watcher.looks[begin:] for rule in look.rules("leak.")}
    assert told <= set(case.rules)


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
        if broken["blocks"]:
            return blocks == set(broken["blocks"])
        return bool(found)

    look = watcher.until(right, 40, begin)
    last = [(f.rule, f.block_ids, f.request_ids) for f in watcher.looks[-1].findings]
    assert look is not None, f"broken {faults.broken(case.fault)}, told {last}"
