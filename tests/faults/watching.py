"""A real server under load, watched as kvtop watches it, with its faults at hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvtop.config import Options
from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import Thresholds
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.stream.live import Live
from kvtop.stream.target import Target


@dataclass(frozen=True)
class Look:
    """One snapshot judged."""

    mono_s: float
    findings: tuple[Finding, ...]
    snapshot: Snapshot
    more: Any = None

    def rules(self, prefix: str = "") -> set[str]:
        """Rules that hold and are more than information."""
        return {
            f.rule
            for f in self.findings
            if f.severity != "info" and f.rule.startswith(prefix) and "diagnosis" not in f.rule
        }


@dataclass
class Watcher:
    """Runs the live stream and the judge on a thread of its own."""

    url: str
    limits: Thresholds
    sockets: Path | None = None
    looks: list[Look] = field(default_factory=list)
    more: Callable[[Judge], Any] | None = None
    """Asked after each snapshot, on the judging thread; its answer is `Look.more`."""
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watcher:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        judge = Judge(self.limits)
        options = Options(interval_s=1.0, url=self.url, gpus=False, stacks=False)
        live = Live(options, Target(socket_dir=self.sockets))
        try:
            async for snapshot in live.snapshots():
                findings = judge.judge(snapshot)
                more = self.more(judge) if self.more is not None else None
                self.looks.append(Look(time.monotonic(), findings, snapshot, more))
                if self._stop.is_set():
                    return
        finally:
            await live.close()

    def until(
        self, what: Callable[[Look], Any], limit_s: float, since: int | None = None
    ) -> Look | None:
        """The first look from number `since` on for which `what` is true, within a time.

        Without a number: from now on.
        """
        end = time.monotonic() + limit_s
        at = len(self.looks) if since is None else since
        while True:
            while at < len(self.looks):
                if what(self.looks[at]):
                    return self.looks[at]
                at += 1
            if time.monotonic() > end:
                return None
            time.sleep(0.2)


class LoadThread:
    """Mixed healthy load: shared prefixes, clients that leave, bursts, idle gaps."""

    def __init__(self, url: str, seed: int, *, gaps: bool = True, slots: int = 6) -> None:
        self._url = url
        self._rng = random.Random(seed)
        self._gaps = gaps
        self._slots = slots
        self._stop = threading.Event()
        self.done: dict[str, int] = {"finished": 0, "left": 0, "failed": 0}

    def __enter__(self) -> LoadThread:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        rng = self._rng
        system = "".join(rng.choices("klmnopqrst", k=640))
        tasks: set[asyncio.Task[None]] = set()
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
            while not self._stop.is_set():
                if self._gaps and rng.random() < 0.04:
                    await asyncio.sleep(rng.uniform(4, 12))
                burst = self._slots if rng.random() < 0.1 else 1
                for _ in range(burst):
                    if len(tasks) < 2 * self._slots:
                        task = asyncio.ensure_future(self._one(client, system))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                await asyncio.sleep(rng.uniform(0.1, 0.8))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, client: httpx.AsyncClient, system: str) -> None:
        rng = self._rng
        text = "".join(rng.choices("abcdefghij", k=rng.choice((40, 200, 600, 1500))))
        body = {
            "model": "tiny",
            "prompt": (system if rng.random() < 0.5 else "") + text,
            "max_tokens": rng.choice((8, 40, 120, 300)),
            "ignore_eos": True,
            "stream": True,
        }
        leave = rng.randint(2, 20) if rng.random() < 0.25 else None
        self.done[await stream(client, self._url, body, leave)] += 1


async def stream(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], leave: int | None
) -> str:
    """One streamed completion; the client leaves after `leave` lines."""
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return "failed"
            lines = 0
            async for line in answer.aiter_lines():
                lines += bool(line)
                if leave is not None and lines >= leave:
                    return "left"
    except httpx.HTTPError:
        return "failed"
    return "finished"


@contextlib.contextmanager
def long_requests(url: str, number: int, max_tokens: int = 3700, prompt: int = 300) -> Any:
    """Long requests whose clients stay until the end of the block, or until the event is set."""
    rng = random.Random(max_tokens)
    stop = threading.Event()

    async def run() -> None:
        body = {
            "model": "tiny",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
            prompts = ["".join(rng.choices("xyz", k=prompt)) for _ in range(number)]
            tasks = [
                asyncio.ensure_future(stream(client, url, body | {"prompt": text}, None))
                for text in prompts
            ]
            while not stop.is_set() and not all(task.done() for task in tasks):
                await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join()


def many_at_once(url: str, number: int, seed: int) -> None:
    """Requests with long prompts of their own; returns when all are answered."""
    rng = random.Random(seed)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
            bodies = [
                {"model": "tiny", "prompt": "".join(rng.choices("uvwxyz", k=1500))}
                for _ in range(number)
            ]
            more = {"max_tokens": 200, "ignore_eos": True, "stream": True}
            ends = await asyncio.gather(
                *(stream(client, url, body | more, None) for body in bodies)
            )
            assert ends == ["finished"] * number, ends

    asyncio.run(run())


@dataclass(frozen=True)
class Faults:
    """The switches of a server's faults."""

    folder: Path

    def on(self, name: str) -> None:
        """Put a fault in."""
        (self.folder / f"{name}.json").unlink(missing_ok=True)
        (self.folder / f"{name}.on").touch()

    def off(self, name: str) -> None:
        """Undo it."""
        (self.folder / f"{name}.on").unlink(missing_ok=True)

    def broken(self, name: str) -> dict[str, Any] | None:
        """What it broke. None: nothing yet."""
        try:
            found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        return found
