"""The role of an engine core: answers clients with cuts of the engine.

At any time there is at most one cut under way. Clients that ask meanwhile share it. The
thread sleeps in `select` when nobody asks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from kvtop.probe.answer import Rows, dump, pool_json, request_json, rows_json
from kvtop.probe.cut import Capture, Raw
from kvtop.probe.facts import EngineFacts
from kvtop.probe.last import Last
from kvtop.probe.ledger import Ledger
from kvtop.probe.server import Connection, Request
from kvtop.probe.version import SCHEMA, VERSION
from kvtop.probe.watch import MAX_ERRORS, Watch

BOUNDARY_WAIT_S = 0.3
"""How long a busy engine is given to come to the start of a step."""
FRESH_S = 0.02
"""A cut no older than this serves the next client too."""
MAX_AGE_S = 1.0
"""An older cut is not served while a newer one can be had without the engine's help."""
TRACK_S = 5.0
"""Changed blocks are listed for this long after the last client."""
MAX_COST = 0.005
"""Most of the engine thread's time that cuts may take."""
CREDIT_S = 0.012
"""Most engine time saved up while nobody asks, spent on the first scan of a huge pool."""
SLICE_S = 0.0002
"""Python work of the probe's thread between two rests while the engine works."""
REST_S = 0.0005
"""Such a rest: long enough for the engine's thread to take the interpreter over."""


class Credit:
    """Engine time that the probe may still take: earned with time, spent by cuts."""

    def __init__(self, now: float) -> None:
        self._left = CREDIT_S
        self._at = now

    def left(self, now: float) -> float:
        """Seconds that may be spent now; below 0 the last piece took more than there was."""
        self._left = min(CREDIT_S, self._left + (now - self._at) * MAX_COST)
        self._at = now
        return self._left

    def spend(self, seconds: float) -> None:
        """Takes what a piece has cost, of processor time: being pushed aside costs nothing."""
        self._left = max(-CREDIT_S, self._left - seconds)


class Waiter:
    """A client whose answer needs a cut."""

    def __init__(self, connection: Connection, build: Callable[[], Any], now: float) -> None:
        self.connection = connection
        self.build = build
        self.since = now


class EngineRole:
    """Serves one engine core.

    Args:
        facts: Where everything is.
        index: Data-parallel rank; None: ask vLLM.
        wake: Wakes the probe's thread out of `select`.
        simulated: There is no real engine behind it.
        directory: Where a last snapshot is left when the engine dies; None: nowhere.
    """

    name = "engine"

    def __init__(
        self,
        facts: EngineFacts,
        index: int | None,
        wake: Callable[[], None],
        simulated: bool = False,
        directory: str | None = None,
    ) -> None:
        self.facts = facts
        self.watch = Watch(facts)
        self.capture = Capture(facts, self.watch)
        self.ledger = Ledger(facts)
        self.rows = Rows(facts, self.ledger)
        self.identity = facts.identity(index)
        self.simulated = simulated
        self._wake = wake
        self._ready: Raw | None = None
        self._raw: Raw | None = None
        self._point = "boundary"
        self._row_list: list[list[Any]] = []
        self._rows_json = b""
        self._pools_json: bytes | None = None
        self._waiters: list[Waiter] = []
        self._client_since = 0.0
        self._client_last = 0.0
        self._spent_s = 0.0
        self._calls_before_ns = 0.0
        self._credit = Credit(time.monotonic())
        self._slice_begin = 0.0
        self.watch.on_boundary = self._on_boundary
        self._last = Last(self, directory, wake) if directory else None
        if self._last is not None:
            self.watch.on_death = self._last.dying

    def start(self) -> None:
        """Begins to watch."""
        self.watch.watch()

    def stop(self) -> None:
        """Takes every wrapper out and lets the waiting clients go."""
        self.watch.unwatch()
        for waiter in self._waiters:
            if not waiter.connection.closed:
                waiter.connection.answer(503, b'{"error":"the probe has been taken out"}')
        self._waiters.clear()

    @property
    def error(self) -> str:
        """Why the probe has stopped watching; empty: it has not."""
        if self.watch.errors < MAX_ERRORS:
            return ""
        return f"{self.watch.errors} errors of the probe's own, the last: {self.watch.last_error}"

    # -- the engine's thread ------------------------------------------------------------

    def _on_boundary(self) -> None:
        capture = self.capture
        if self._ready is not None or not capture.lock.acquire(False):
            return
        try:
            begin = time.thread_time()
            if self._credit.left(time.monotonic()) <= 0.0:
                return
            raw = capture.slice(on_engine=True)
            cost = time.thread_time() - begin
            self._credit.spend(cost)
            self._spent_s += cost
            if raw is not None:
                self._point = "boundary"
                self.watch.want = False
                self._ready = raw
                self._wake()
        finally:
            capture.lock.release()

    # -- the probe's thread -------------------------------------------------------------

    def timeout_s(self) -> float | None:
        """How long the thread may sleep."""
        if self._waiters:
            return 0.01
        return 1.0 if self.watch.tracking else None

    def work(self) -> None:
        """Moves the cut under way on, and answers whoever waits for it."""
        try:
            if self._last is not None:
                self._last.work()
            self._work()
        except Exception as error:
            # What the scheduler had when the probe came may be gone since.
            self.watch.failed(error)
            self._refuse_all(f"error of the probe's own: {self.watch.last_error}")

    def _work(self) -> None:
        now = time.monotonic()
        if self.error and self.watch._placed:
            self.watch.unwatch()
        if self.watch.tracking and now - self._client_last > TRACK_S and not self._waiters:
            self._rest()
        if self._ready is not None:
            self._take(self._ready)
        self._waiters = [w for w in self._waiters if not w.connection.closed]
        if self._waiters:
            self._serve(now)

    def _rest(self) -> None:
        """Nobody asks any more: back to counting only."""
        if self.capture.lock.acquire(False):
            try:
                self.watch.want = False
                self.watch.tracking = False
                self.watch.stale = True
                for dirty in self.watch.dirty:
                    dirty.clear()
                self._ready = None
                self._raw = None
                self._client_since = 0.0
            finally:
                self.capture.lock.release()

    def ask(self, connection: Connection, build: Callable[[], Any]) -> None:
        """Answers a client with `build()` once there is a cut."""
        now = time.monotonic()
        self._client_last = now
        if not self._client_since:
            self._client_since = now
            self._spent_s = 0.0
            self._calls_before_ns = self.watch.calls_ns()
        self._waiters.append(Waiter(connection, build, now))
        if not self.error:
            self.watch.want = True
        self.work()

    def _age_s(self, now: float) -> float | None:
        return None if self._raw is None else now - self._raw.mono_s

    def _serve(self, now: float) -> None:
        age = self._age_s(now)
        first = self._waiters[0]
        waited = now - first.since
        if age is not None and (
            age <= FRESH_S or self.error or (self._credit_short(now) and age < 10 * MAX_AGE_S)
        ):
            self._answer_all()
            return
        if self.error:
            self._refuse_all(f"the probe has stopped: {self.error}")
            return
        busy = bool(self.facts.scheduler.requests)
        # Without a step for so long already, none is waited for.
        quiet = self.watch.last_begin < now - BOUNDARY_WAIT_S
        if not busy or quiet or waited >= BOUNDARY_WAIT_S:
            self._cut_here(busy)
            if self._ready is not None:
                self._take(self._ready)
                self._answer_all()
                return
        if waited >= BOUNDARY_WAIT_S and self._raw is not None:
            self._answer_all()
        elif waited >= MAX_AGE_S + BOUNDARY_WAIT_S:
            inside = self.watch.depth > 0
            why = "the engine is inside a scheduler call" if inside else "no cut could be taken yet"
            if self.watch.last_error:
                why += f"; error of the probe's own: {self.watch.last_error}"
            self._refuse_all(why)

    def _credit_short(self, now: float) -> bool:
        return self._credit.left(now) <= 0.0

    def _cut_here(self, busy: bool) -> None:
        """Takes a cut on this thread, if the engine lets it."""
        if self._ready is not None or not self.capture.lock.acquire(False):
            return
        try:
            for _ in range(40):
                if busy and self._credit_short(time.monotonic()):
                    return
                begin = time.thread_time()
                raw = self.capture.slice(on_engine=False)
                cost = time.thread_time() - begin
                if busy:
                    # It holds the interpreter, so a working engine pays for it all the same.
                    self._credit.spend(cost)
                    self._spent_s += cost
                if raw is not None:
                    self._point = "executing" if raw.executing and raw.rows else "idle"
                    self.watch.want = False
                    self._ready = raw
                    return
                if self.watch.depth:
                    return
                time.sleep(REST_S)
        except Exception as error:
            self.watch.failed(error)
        finally:
            self.capture.lock.release()

    def _pause(self) -> None:
        """Called often during long work: lets the engine's thread in now and then."""
        if time.perf_counter() - self._slice_begin > SLICE_S:
            if self.facts.scheduler.requests:
                time.sleep(REST_S)
            self._slice_begin = time.perf_counter()

    def _take(self, raw: Raw) -> None:
        """Makes a raw cut the current one."""
        self._slice_begin = time.perf_counter()
        try:
            self.ledger.apply(raw, self._pause)
            self._row_list = self.rows.make(raw, self._pause)
            self._rows_json = rows_json(self._row_list, self._pause)
            self._raw = raw
        except Exception as error:
            self._raw = None
            self.watch.failed(error)
        self._pools_json = None
        self._ready = None
        if self._waiters and self._raw is not None:
            self._answer_all()

    def _answer_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        self.watch.want = False
        for waiter in waiters:
            if waiter.connection.closed:
                continue
            try:
                body = waiter.build()
            except Exception as error:
                self.watch.failed(error)
                waiter.connection.answer(500, b'{"error":"the probe could not build the answer"}')
                continue
            waiter.connection.answer(200, body)

    def _refuse_all(self, why: str) -> None:
        waiters, self._waiters = self._waiters, []
        body = {"schema": SCHEMA, "role": self.name, "error": why, **self._ages(time.monotonic())}
        for waiter in waiters:
            if not waiter.connection.closed:
                waiter.connection.answer(503, json.dumps(body).encode("ascii"))

    def _ages(self, now: float) -> dict[str, float | None]:
        begin = self.watch.last_begin
        return {"step_age_s": round(now - begin, 3) if begin else None}

    def snapshot(self, columns: bool) -> bytes:
        """The body of `/v1/snapshot`."""
        raw = self._raw
        if raw is None:
            raise LookupError("no cut")
        now = time.monotonic()
        if columns:
            if self._pools_json is None:
                self._pools_json = dump([pool_json(p, True) for p in self.ledger.pools])
            pools = self._pools_json
        else:
            pools = dump([pool_json(p, False) for p in self.ledger.pools])
        engine = {**self.identity, "pid": os.getpid(), "state": _state(raw)}
        if self.simulated:
            engine["simulated"] = True
        head = {
            "schema": SCHEMA,
            "time_s": raw.time_s,
            "age_s": round(now - raw.mono_s, 4),
            "probe": self._probe(raw, now),
            "engine": engine,
            "counters": raw.counters,
        }
        return b"".join(
            (dump(head)[:-1], b',"pools":', pools, b',"requests":', self._rows_json, b"}")
        )

    def _probe(self, raw: Raw, now: float) -> dict[str, Any]:
        wall = max(1.0, now - self._client_since)
        spent = self._spent_s + (self.watch.calls_ns() - self._calls_before_ns) / 1e9
        return {
            "version": VERSION,
            "step": raw.step,
            "scan_us": round(raw.took_us, 1),
            "cost_percent": round(100.0 * spent / wall, 4),
            "point": self._point,
            **self._ages(now),
            "verified_age_s": round(self.ledger.verified_age_s(raw.mono_s), 3),
            "drift": self.ledger.drift,
            "errors": self.watch.errors,
            "missing": self.facts.missing,
        }

    def request(self, rid: str) -> bytes:
        """The body of `/v1/requests/<id>`."""
        raw = self._raw
        if raw is None:
            raise LookupError("no cut")
        body = request_json(self.ledger, self.facts, rid, raw.step, self._pause)
        body["found"] = body["found"] or any(row[0] == rid for row in self._row_list)
        return dump(body)

    def handle(self, connection: Connection, request: Request) -> bool:
        """Answers a request; False: no such path."""
        tail = request.path[1:]
        if tail == ["snapshot"]:
            columns = request.query.get("columns", "1") != "0"
            self.ask(connection, lambda: self.snapshot(columns))
        elif len(tail) == 2 and tail[0] == "requests" and tail[1]:
            self.ask(connection, lambda: self.request(tail[1]))
        else:
            return False
        return True

    def about(self) -> dict[str, Any]:
        """What `/v1/hello` says of this role."""
        return {
            "model": self.identity["model"],
            "vllm_version": self.identity["vllm_version"],
            "found": self.facts.found,
            "missing": self.facts.missing,
            "state": "stopped" if self.error else "ok",
            "reason": self.error,
            "demo": self.simulated,
        }


def _state(raw: Raw) -> str:
    if raw.sleeping:
        return "sleeping"
    if raw.pause not in (None, "UNPAUSED"):
        return "paused"
    return "running" if raw.rows else "idle"
