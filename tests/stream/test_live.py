"""The live stream on scripted sources: fresh values, slow and failing sources, death, quitting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from kvtop.attach.procfs import ProcessFacts
from kvtop.attach.servers import Found
from kvtop.config import Options
from kvtop.model.snapshot import Snapshot, SourceState
from kvtop.sources.base import SourceError
from kvtop.stream import live as live_module
from kvtop.stream.live import Live
from tests.stream import make


class Machine:
    """What the scripted sources read."""

    def __init__(self) -> None:
        self.found: Found = make.found()
        self.engine: Callable[[], Any] = lambda: make.engine(20)
        self.alive = {20}
        self.engine_reads = 0
        self.closed: list[str] = []


class Scripted:
    period_s = 0.05
    deadline_s = 1.0
    target_pid = None

    def __init__(self, kind: str, machine: Machine) -> None:
        self.name = self.kind = kind
        self.machine = machine

    async def read(self) -> Any:
        if self.kind == "discovery":
            return self.machine.found
        self.machine.engine_reads += 1
        value = self.machine.engine()
        return await value if asyncio.iscoroutine(value) else value

    async def close(self) -> None:
        self.machine.closed.append(self.kind)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(live_module, "DiscoverySource", lambda _: Scripted("discovery", machine))
    monkeypatch.setattr(live_module, "EngineSource", lambda *_: Scripted("engine", machine))
    monkeypatch.setattr(live_module, "ClientsSource", lambda *_: Scripted("clients", machine))
    monkeypatch.setattr(live_module, "MetricsSource", lambda *_: Scripted("metrics", machine))
    monkeypatch.setattr(
        live_module,
        "facts_of",
        lambda _: {pid: ProcessFacts("S", 1, 1, 1) for pid in machine.alive},
    )
    return machine


OPTIONS = Options(interval_s=0.05, stacks=False, gpus=False)


def headless() -> Found:
    """A server with one engine and neither HTTP side nor API server."""
    engine = make.found_engine(20)
    return Found(
        (type(make.server())(key="pid 20", url=None, apis=(), engines=(engine,)),),
        ("this",),
    )


async def until(live: Live, wanted: Callable[[Snapshot], bool], limit: int = 100) -> Snapshot:
    """The first snapshot that is as wanted."""
    seen = 0
    async for snapshot in live.snapshots():
        if wanted(snapshot):
            return snapshot
        seen += 1
        assert seen < limit, f"never: {snapshot}"
    raise AssertionError


@contextlib.asynccontextmanager
async def watching(options: Options = OPTIONS) -> Any:
    live = Live(options)
    try:
        yield live
    finally:
        await asyncio.wait_for(live.close(), 3)


async def test_a_server_that_starts_later_comes_alive(machine: Machine) -> None:
    async with watching() as live:
        seen: list[int] = []
        async for snapshot in live.snapshots():
            seen.append(len(snapshot.engines))
            if len(seen) == 3:
                machine.found = headless()
            if snapshot.engines and snapshot.engines[0].probe:
                break
            assert len(seen) < 100
    assert seen[:3] == [0, 0, 0]


async def test_an_engine_that_dies_is_kept_as_gone_and_replaced(machine: Machine) -> None:
    machine.found = headless()
    async with watching() as live:
        stage = 0
        count = 0
        async for snapshot in live.snapshots():
            count += 1
            assert count < 300
            engines = snapshot.engines
            if stage == 0 and engines and engines[0].probe:
                machine.found, machine.alive = Found((), ("this",)), set()
                stage = 1
            elif stage == 1 and engines and engines[0].state == "gone":
                assert not engines[0].alive
                assert engines[0].blocks is not None
                machine.found, machine.alive = headless(), {20}
                stage = 2
            elif stage == 2 and engines and engines[0].alive:
                assert len(engines) == 1
                break


async def test_a_hung_probe_holds_up_nothing(machine: Machine) -> None:
    machine.found = headless()
    machine.engine = lambda: asyncio.sleep(3600)
    async with watching() as live:
        snapshot = await until(live, lambda s: bool(s.engines))
        assert snapshot.engines[0].blocks is None
        snapshot = await until_next(live)
        assert snapshot.engines[0].probe_reason


async def until_next(live: Live) -> Snapshot:
    """One more snapshot of a running stream."""
    await asyncio.sleep(0.2)
    return live._merge()


async def test_a_failing_source_is_data(machine: Machine) -> None:
    machine.found = headless()

    def fail() -> Any:
        raise SourceError("it is broken", "mend it")

    machine.engine = fail
    async with watching() as live:
        snapshot = await until(
            live, lambda s: any(x.state is SourceState.FAILED for x in s.sources)
        )
    assert snapshot.engines[0].probe_reason == "it is broken; mend it"


async def test_snapshots_carry_values_of_their_own_tick(machine: Machine) -> None:
    machine.found = headless()
    # Long enough that even a busy machine answers within the grace of a tick.
    async with watching(Options(interval_s=0.8, stacks=False, gpus=False)) as live:
        last = 0
        seen = 0
        async for snapshot in live.snapshots():
            if snapshot.engines and snapshot.engines[0].probe:
                assert machine.engine_reads > last
                last = machine.engine_reads
                seen += 1
            if seen == 3:
                break


async def test_the_interval_changes_at_once(machine: Machine) -> None:
    async with watching(Options(interval_s=30.0, stacks=False, gpus=False)) as live:
        count = 0
        loop = asyncio.get_running_loop()
        async for _ in live.snapshots():
            if count == 0:
                loop.call_later(0.1, live.set_interval, 0.25)
            count += 1
            if count == 3:
                break
    assert count == 3


async def test_closing_closes_every_source(machine: Machine) -> None:
    machine.found = headless()
    async with watching() as live:
        await until(live, lambda s: bool(s.engines and s.engines[0].probe))
    assert {"discovery", "engine"} <= set(machine.closed)


async def test_detail_without_a_probe_says_why(machine: Machine) -> None:
    async with watching() as live:
        await until(live, lambda s: bool(s.sources))
        detail = await live.request_detail(make.engine(99), "x")
    assert detail.error
