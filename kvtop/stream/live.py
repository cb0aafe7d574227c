"""The live stream: sources in, snapshots out, the only place with a running clock.

Every source has its own poll loop, so that a slow one holds up no other. They all
start their reads on a common tick, and the snapshot is merged as soon as the fast
ones have answered: what is shown is then as old as the answers took, not as old as
the interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvtop.attach.last import last_snapshot
from kvtop.attach.servers import Found, FoundEngine, FoundServer
from kvtop.config import Options
from kvtop.errors import BadDataError, KvtopError
from kvtop.model.detail import Detail
from kvtop.model.snapshot import (
    Engine,
    Gpu,
    Snapshot,
    SourceState,
    SourceStatus,
    Stacks,
)
from kvtop.sources.answers import parse_detail, request_path
from kvtop.sources.base import Clock, Reading, Source, SourceError, SystemClock, poll
from kvtop.sources.engine import ClientsSource, EngineSource
from kvtop.sources.metrics import MetricsPage, MetricsSource, stale_reason
from kvtop.stream.merge import Readings, clientless, merge
from kvtop.stream.target import Discovery, DiscoverySource, Target, facts_of

GRACE_S = 0.4
"""Longest wait for the fast sources before a snapshot is made without them."""
LEFT_S = 30.0
"""How long after an engine's end its last snapshot is looked for."""
LOST_S = 600.0
"""How long an engine that is gone stays on screen when nothing takes its place."""


def _ignore_late_wakeups(loop: asyncio.AbstractEventLoop) -> None:
    """Keep one harmless race of a cancelled read out of the terminal.

    anyio (below httpx) waits for a Unix socket with `add_reader(sock, future.set_result)`.
    When the socket becomes readable in the very turn of the loop in which the read is
    cancelled, that callback raises InvalidStateError, which asyncio prints on stderr.
    """
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        late = isinstance(context.get("exception"), asyncio.InvalidStateError)
        if late and "Future.set_result" in repr(context.get("handle")):
            return
        if before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


class _TickClock:
    """A clock whose pauses end on the stream's tick, so that reads start together."""

    def __init__(self, clock: Clock, live: Live) -> None:
        self._clock = clock
        self._live = live
        self.time = clock.time
        self.monotonic = clock.monotonic

    async def sleep(self, seconds: float, /) -> None:
        """Wait for the first tick at about the time asked for."""
        until = self._clock.monotonic() + seconds - self._live.interval_s / 2
        while True:
            await self._live.tick()
            if self._clock.monotonic() >= until:
                return


class _Unusable:
    """A source that cannot even be made, for example by an address that is none."""

    period_s = 10.0
    deadline_s = 1.0
    target_pid: int | None = None

    def __init__(self, name: str, error: KvtopError) -> None:
        self.name = name
        self.kind = name.split(maxsplit=1)[0]
        self._error = error

    async def read(self) -> None:
        """Say why it cannot be read.

        Raises:
            SourceError: Always.
        """
        raise SourceError(self._error.what, self._error.remedy)

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class _Running:
    """One source being polled."""

    source: Source[Any]
    task: asyncio.Task[Any]
    reading: Reading[Any]
    fast: bool = False
    fresh: bool = False


class Live:
    """Snapshots of the servers on this machine. Implements the feed of the app.

    Args:
        options: What the user asked for.
        target: Where to look.
        clock: Time; the machine's own by default.
    """

    def __init__(
        self, options: Options, target: Target | None = None, clock: Clock | None = None
    ) -> None:
        self.interval_s = options.interval_s
        self._options = options
        self._target = target or Target()
        self._clock: Clock = clock or SystemClock()
        self._host = socket.gethostname()
        self._running: dict[str, _Running] = {}
        self._tick = asyncio.Event()
        self._fresh = asyncio.Event()
        self._wake = asyncio.Event()
        self._stacks_visible = options.stacks
        self._stacks_pids: tuple[int, ...] = ()
        self._found: Found | None = None
        self._seen: dict[int, tuple[FoundServer, FoundEngine, Reading[Engine] | None]] = {}
        self._lost_at: dict[int, float] = {}
        self._left: dict[int, str] = {}
        self._gone_since: dict[tuple[int, str], float] = {}
        self._closed = False

    async def tick(self) -> None:
        """Wait for the next tick."""
        await self._tick.wait()

    def set_interval(self, seconds: float) -> None:
        """Change the time between two snapshots, from the next one on."""
        self.interval_s = seconds
        self._wake.set()

    def set_visible(self, stacks: bool, pids: Sequence[int] = ()) -> None:
        """Say whether top frames are looked at; only those of these processes, when any are named.

        Others are not sampled.
        """
        self._stacks_visible = stacks and self._options.stacks
        self._stacks_pids = tuple(pids)
        if "stacks" in self._running:
            self._tell_stacks(self._running["stacks"].source)

    def _tell_stacks(self, source: Any) -> None:
        source.enabled = self._stacks_visible
        source.only = self._stacks_pids

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield a snapshot an interval, for ever. Never raises but for cancellation."""
        _ignore_late_wakeups(asyncio.get_running_loop())
        self._start("discovery", DiscoverySource(Discovery(self._options, self._target)))
        if self._options.gpus:
            self._start("nvml", self._gpu_source())
        if self._options.stacks:
            self._start_stacks()
        due = self._clock.monotonic()
        while not self._closed:
            self._fire_tick()
            await self._wait_fresh()
            self._follow_discovery()
            snapshot = self._merge()
            yield snapshot
            now = self._clock.monotonic()
            due = min(max(due + self.interval_s, now), now + self.interval_s)
            await self._rest(due)

    def _gpu_source(self) -> Source[tuple[Gpu, ...]]:
        if self._target.gpu_source is not None:
            return self._target.gpu_source
        from kvtop.sources.nvml import NvmlSource

        return NvmlSource()

    def _start_stacks(self) -> None:
        from kvtop.sources.stacks import StacksSource

        source = StacksSource()
        self._tell_stacks(source)
        self._start("stacks", source)

    def _start(
        self,
        key: str,
        source: Source[Any],
        *,
        fast: bool = False,
        stale: Callable[[Any], str] | None = None,
    ) -> None:
        def publish(reading: Reading[Any]) -> None:
            running.reading = reading
            if reading.status.state is not SourceState.STARTING:
                running.fresh = True
                self._fresh.set()

        clock = _TickClock(self._clock, self)
        period: Callable[[], float] | None = None
        if fast:
            period = lambda: self.interval_s  # noqa: E731 - read at each pause
        loop = asyncio.get_running_loop()
        loop_of = poll(source, clock, publish, interval=period, stale=stale)
        task = loop.create_task(loop_of, name=f"poll {key}")
        # Known as starting from the first moment on: nobody may think it is not there.
        now = self._clock.time()
        status = SourceStatus(
            name=source.name,
            kind=source.kind,
            state=SourceState.STARTING,
            since_s=now,
            target_pid=source.target_pid,
        )
        starting: Reading[Any] = Reading(status, None, now, self._clock.monotonic())
        running = _Running(source, task, starting, fast=fast)
        self._running[key] = running

    async def _stop(self, key: str) -> None:
        running = self._running.pop(key)
        running.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.wait({running.task}, timeout=0.2)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(running.source.close(), 0.5)

    def _fire_tick(self) -> None:
        for running in self._running.values():
            running.fresh = False
        old, self._tick = self._tick, asyncio.Event()
        old.set()

    async def _wait_fresh(self) -> None:
        """Until every fast source that works has answered this tick, or the grace is over."""
        deadline = self._clock.monotonic() + min(GRACE_S, self.interval_s / 2)
        while any(self._awaited(running) for running in self._running.values()):
            self._fresh.clear()
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._fresh.wait(), left)

    @staticmethod
    def _awaited(running: _Running) -> bool:
        if not running.fast or running.fresh:
            return False
        return running.reading.status.state is not SourceState.FAILED

    async def _rest(self, due: float) -> None:
        self._wake.clear()
        left = due - self._clock.monotonic()
        waiter = asyncio.ensure_future(self._wake.wait())
        pause = asyncio.ensure_future(self._clock.sleep(max(0.0, left)))
        try:
            await asyncio.wait({waiter, pause}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            pause.cancel()

    def _follow_discovery(self) -> None:
        """Poll what discovery found, and stop polling what is gone."""
        reading = self._running["discovery"].reading
        if reading.value is None or reading.value is self._found:
            return
        found: Found = reading.value
        self._found = found
        wanted: dict[str, Callable[[], Source[Any]]] = {}
        pids: dict[int, str] = {}
        for server in found.servers:
            pids |= dict.fromkeys(server.api_pids, "api")
            if server.url:
                wanted[f"metrics {server.key}"] = partial(MetricsSource, server.url)
            for api in server.apis:
                if api.probe_socket:
                    path = str(api.probe_socket)
                    wanted[f"clients {api.pid} {path}"] = partial(ClientsSource, path, api.pid)
            for engine in server.engines:
                pids |= dict.fromkeys(engine.worker_pids, "worker")
                pids[engine.pid] = "engine"
                if engine.probe_socket:
                    path = str(engine.probe_socket)
                    wanted[f"engine {engine.pid} {path}"] = partial(EngineSource, path, engine.pid)
        for key in [k for k in self._running if k.split()[0] in ("metrics", "clients", "engine")]:
            if key not in wanted:
                task = asyncio.ensure_future(self._stop(key))
                task.add_done_callback(lambda t: t.cancelled() or t.exception())
        for key, make in wanted.items():
            if key not in self._running:
                stale = stale_reason if key.startswith("metrics ") else None
                try:
                    self._start(key, make(), fast=True, stale=stale)
                except KvtopError as error:
                    self._start(key, _Unusable(key, error), fast=True)
        if "stacks" in self._running:
            self._running["stacks"].source.targets = pids  # type: ignore[attr-defined]
        self._remember(found)

    def _remember(self, found: Found) -> None:
        """Keep the last values of engines that are gone, until another takes their place."""
        now = self._clock.monotonic()
        here = {engine.pid for server in found.servers for engine in server.engines}
        keys = {server.key for server in found.servers if server.engines}
        for server in found.servers:
            for engine in server.engines:
                reading = self._seen[engine.pid][2] if engine.pid in self._seen else None
                self._seen[engine.pid] = (server, engine, reading)
        for pid, (server, _, _) in list(self._seen.items()):
            if pid in here:
                self._lost_at.pop(pid, None)
                self._left.pop(pid, None)
            elif server.key in keys or now - self._lost_at.setdefault(pid, now) > LOST_S:
                del self._seen[pid]
                self._lost_at.pop(pid, None)
                self._left.pop(pid, None)

    def _group(self, kind: str, number: Callable[[str], Any]) -> dict[Any, Reading[Any]]:
        group = {}
        for key, running in self._running.items():
            word, _, rest = key.partition(" ")
            if word == kind:
                group[number(rest)] = running.reading
        return group

    def _single(self, key: str) -> Reading[Any] | None:
        running = self._running.get(key)
        return running.reading if running else None

    def _merge(self) -> Snapshot:
        engines: dict[int, Reading[Engine]] = self._group("engine", lambda r: int(r.split()[0]))
        clients: dict[int, Reading[frozenset[str]]] = self._group(
            "clients", lambda r: int(r.split()[0])
        )
        metrics: dict[str, Reading[MetricsPage]] = self._group("metrics", str)
        stacks: Reading[tuple[Stacks, ...]] | None = self._single("stacks")
        if stacks is not None and not self._stacks_visible:
            off = replace(stacks.status, state=SourceState.OFF, reason="hidden, not sampled")
            stacks = replace(stacks, status=off, value=())
        gpus: Reading[tuple[Gpu, ...]] | None = self._single("nvml")
        for pid, reading in engines.items():
            if pid in self._seen and reading.value is not None:
                server, engine, _ = self._seen[pid]
                self._seen[pid] = (server, engine, reading)
        lost = []
        for pid in self._lost_at:
            server, engine, last = self._seen[pid]
            lost.append((server, engine))
            if pid not in self._left and self._clock.monotonic() - self._lost_at[pid] < LEFT_S:
                file = last_snapshot(engine.probe_socket, self._clock.time() - 2 * LOST_S)
                if file is not None:
                    self._left[pid] = str(file)
            if last is not None:
                engines.setdefault(pid, last)
        discovery = self._single("discovery")
        status: SourceStatus | None = discovery.status if discovery else None
        readings = Readings(
            time_s=self._clock.time(),
            mono_s=self._clock.monotonic(),
            host=self._host,
            found=self._found,
            discovery=status,
            engines=engines,
            clients=clients,
            metrics=metrics,
            gpus=gpus,
            stacks=stacks,
            processes=facts_of(self._found),
            lost=tuple(lost),
            left=self._left,
            demo=self._target.demo,
        )
        # Forgets those that left; bounded by the number of requests in the engines.
        self._gone_since = {
            key: self._gone_since.get(key, readings.mono_s) for key in clientless(readings)
        }
        return merge(replace(readings, gone_since_s=self._gone_since))

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        """One request's block tables, asked now; a failure is in `Detail.error`."""
        for key, running in self._running.items():
            if key.startswith(f"engine {engine.pid} ") and isinstance(running.source, EngineSource):
                try:
                    body = await running.source.client.get(request_path(request_id))
                    return parse_detail(request_id, body)
                except SourceError as error:
                    return Detail(request_id, error=error.reason)
                except BadDataError as error:
                    return Detail(request_id, error=error.what)
                except Exception as error:
                    return Detail(request_id, error=f"cannot be asked: {type(error).__name__}")
        return Detail(request_id, error=engine.probe_reason or "no probe to ask")

    async def close(self) -> None:
        """Stop every source. Waits a second at most, whatever hangs."""
        self._closed = True
        self._wake.set()
        stops = [asyncio.ensure_future(self._stop(key)) for key in list(self._running)]
        if stops:
            await asyncio.wait(stops, timeout=1.0)
