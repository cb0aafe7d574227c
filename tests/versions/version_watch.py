"""Asks the probe for a cut at a known moment, and compares all of it with the truth."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import time
import zlib
from typing import Any

from version_walk import Truth

import kvtop.probe.engine as probe_engine
from kvtop.probe import control

NAMES = ("free", "cached", "used", "shared", "held", "ghost", "null")


class Http(http.client.HTTPConnection):
    """A connection to the probe's Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("probe", timeout=20)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def get(path: str, target: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer of the probe."""
    client = Http(path)
    try:
        client.request("GET", target)
        response = client.getresponse()
        return response.status, json.loads(response.read())
    finally:
        client.close()


def column(text: str) -> list[int]:
    """A column of one byte a block."""
    return list(zlib.decompress(base64.b64decode(text)))


class Ask:
    """A question that is on its way while the scheduler works."""

    def __init__(self, path: str, target: str = "/v1/snapshot") -> None:
        self.status = 0
        self.body: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, args=(path, target), daemon=True)
        self._thread.start()

    def _run(self, path: str, target: str) -> None:
        self.status, self.body = get(path, target)

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return not self._thread.is_alive()

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Waits for the answer."""
        self._thread.join(25)
        return self.status, self.body


class Watcher:
    """The probe on a bench.

    Args:
        bench: A `version_bench.Bench`.
        directory: Where the socket goes.
    """

    def __init__(self, bench: Any, directory: str) -> None:
        # The limits on the engine's time are not what is tested here: a cut at every step.
        probe_engine.CREDIT_S = 1e6
        probe_engine.MAX_COST = 1.0
        probe_engine.FRESH_S = 0.0
        self.bench = bench
        counted = bench.counted
        self.before = (counted.allocated, counted.evicted, counted.failures)
        self.probe = control.install(
            bench.engine, index=0, loaded_by="plugin", directory=directory, timeout_s=30
        )
        self.probe.role._credit._left = 1e6
        self.cuts = 0
        self.late = 0
        self.points: set[str] = set()
        self.seen: dict[str, int] = {}
        self.failures: list[str] = []
        self.last: dict[str, Any] = {}

    def stop(self) -> None:
        """Takes the probe out."""
        control.stop()

    def hello(self) -> dict[str, Any]:
        """What the probe says of itself."""
        return get(self.probe.socket_path, "/v1/hello")[1]

    def ask(self) -> Ask:
        """Asks, and returns once the probe waits for a safe point or has answered."""
        ask = Ask(self.probe.socket_path)
        end = time.monotonic() + 5
        while not (self.probe.role.watch.want or ask.done) and time.monotonic() < end:
            time.sleep(0.0005)
        return ask

    def step(self) -> Any:
        """One step of the scheduler, with a cut at its beginning that is compared."""
        ask = self.ask()
        truth = Truth(self.bench)
        output = self.bench.schedule()
        self.compare(ask, truth)
        self.bench.update(output)
        return output

    def look(self) -> dict[str, Any]:
        """A cut while the scheduler stands still, compared."""
        ask = self.ask()
        self.compare(ask, Truth(self.bench))
        return self.last

    def wrong(self, what: str, got: Any, wanted: Any) -> None:
        """Notes a difference."""
        if len(self.failures) < 20:
            self.failures.append(f"step {self.bench.steps}: {what}: {got!r} is not {wanted!r}")

    def compare(self, ask: Ask, truth: Truth) -> None:
        """Compares everything in an answer with the truth."""
        status, body = ask.answer()
        if status != 200:
            self.wrong("status", (status, body), 200)
            return
        if body["probe"]["step"] != truth.steps:
            self.late += 1  # Asked too late for this step's safe point.
            return
        self.last = body
        self.cuts += 1
        self.points.add(body["probe"]["point"])
        (pool,) = body["pools"]
        states, refs, holders = (column(pool[n]) for n in ("states", "refs", "tables"))
        null = truth.null
        refs[null] = 0
        counts = pool["counts"]
        for what, got, wanted in (
            ("states", states, truth.states),
            ("refs", refs, truth.refs),
            ("tables", holders, truth.holders),
            ("free queue", pool["free_queue"], truth.free_queue),
            ("counts", [counts[n] for n in NAMES], [states.count(i) for i in range(7)]),
            ("total", sum(counts[n] for n in NAMES), len(truth.states)),
            ("free + cached", counts["free"] + counts["cached"], truth.free_queue),
            ("refs = holders", refs, holders),
            ("ghosts", counts["ghost"], 0),
            ("errors", (body["probe"]["errors"], body["probe"]["drift"]), (0, 0)),
        ):
            if got != wanted:
                self.wrong(what, got, wanted)
        self._rows(body, truth)
        self._counters(body["counters"], truth)
        for name in NAMES:
            self.seen[name] = self.seen.get(name, 0) + (counts[name] > 0)

    def _rows(self, body: dict[str, Any], truth: Truth) -> None:
        columns = body["requests"]["columns"]
        rows = {row[0]: dict(zip(columns, row, strict=True)) for row in body["requests"]["rows"]}
        if set(rows) != set(truth.rows):
            self.wrong("requests", sorted(rows), sorted(truth.rows))
            return
        for rid, wanted in truth.rows.items():
            row = rows[rid]
            for name, value in wanted.items():
                if value is not ... and row[name] != value:
                    self.wrong(f"{rid} {wanted['status']} {name}", row[name], value)
            self.seen[row["phase"]] = self.seen.get(row["phase"], 0) + 1
            if row["kv_bytes"] != row["blocks"] * body["engine"]["block_bytes"]:
                self.wrong(f"{rid} bytes", row["kv_bytes"], row["blocks"])

    def _counters(self, got: dict[str, Any], truth: Truth) -> None:
        balance = got["allocated"] + got["touched"] - got["freed"]
        if balance != sum(truth.refs):
            self.wrong("allocated + touched - freed", balance, sum(truth.refs))
        if got["steps"] != truth.steps:
            self.wrong("steps", got["steps"], truth.steps)

    def check_totals(self) -> None:
        """Compares the counters with what was counted from outside; the scheduler stands still."""
        got = self.look()["counters"]
        counted = self.bench.counted
        now = (counted.allocated, counted.evicted, counted.failures)
        names = ("allocated", "evicted", "alloc_failures")
        for name, value, before in zip(names, now, self.before, strict=True):
            if got[name] != value - before:
                self.wrong(name, got[name], value - before)
        if len(self.bench.managers) == 1 and got["touched"] != self.bench.touched:
            self.wrong("touched", got["touched"], self.bench.touched)
        for name in ("preemptions", "preempted_blocks", "preempted_tokens"):
            if got[name] != getattr(self.bench, name):
                self.wrong(name, got[name], getattr(self.bench, name))
