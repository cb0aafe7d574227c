"""Flame graphs: how fast big ones open and zoom, and what a capture costs its target.

Prints figures, asserts nothing. Run:
    python tests/benchmarks/flame_bench.py [--lines 200000] [--seconds 8] [--rate 100]

The target is a Python loop that counts its own rounds; how many it makes a second while it
is looked at, against how many it makes alone just before and after, is what sampling costs
it. Time in which the kernel gave the CPU to others is taken out (`schedstat`), so that a busy
machine does not count as a cost; time in which it was stopped is not. The peers are
`py-spy record` and `py-spy top`, same target, same rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtop.draw.icicle import IcicleView, icicle  # noqa: E402
from kvtop.flame.folded import parse  # noqa: E402
from kvtop.flame.tree import build  # noqa: E402
from kvtop.sources.stacks import RATE_HZ, StacksSource  # noqa: E402
from kvtop.sources.stacks_spy import find_py_spy  # noqa: E402

TARGET = """
import sys, threading, time
def inner(n):
    total = 0
    for x in range(n): total += x * x
    return total
def waited():
    try:
        return int(open('/proc/thread-self/schedstat').read().split()[1]) / 1e9
    except OSError:
        return 0.0
def work():
    rounds, begin, before = 0, time.monotonic(), waited()
    while True:
        inner(300); rounds += 1
        now = time.monotonic()
        if now > begin + 0.25:
            after = waited()
            print(rounds, now - begin - (after - before), flush=True)
            rounds, begin, before = 0, now, after
for _ in range(int(sys.argv[1])):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
work()
"""
"""Counts its rounds, and the time they took less the time it was ready and had no CPU."""


def stacks(lines: int) -> str:
    """Folded stacks like those of a large program: deep, much shared, many leaves."""
    rng = random.Random(1)
    names = [f"Module{n % 97}.function_{n} (package/module_{n % 97}.py:{n})" for n in range(3000)]
    out = []
    stack: list[str] = []
    for _ in range(lines):
        stack = stack[: rng.randrange(len(stack) + 1)]
        depth = 8 + rng.randrange(3, 12)
        while len(stack) < depth:
            stack.append(names[min(int(rng.paretovariate(0.7)), 2999)])
        out.append(";".join(stack) + f" {rng.randrange(1, 50)}\n")
    return "".join(out)


def timed(label: str, action: Callable[[], object], rounds: int = 5) -> object:
    """Runs something and prints its wall and CPU time, the median and the worst."""
    walls, cpus = [], []
    result = None
    for _ in range(rounds):
        result = None
        wall, cpu = time.perf_counter(), time.process_time()
        result = action()
        walls.append(1000 * (time.perf_counter() - wall))
        cpus.append(1000 * (time.process_time() - cpu))
    print(
        f"{label:<44} wall {statistics.median(walls):8.1f} ms (worst {max(walls):8.1f})"
        f"   CPU {statistics.median(cpus):8.1f} ms"
    )
    return result


def viewer(lines: int) -> None:
    text = stacks(lines)
    print(f"{lines:,} lines, {len(text) / 1e6:.0f} MB")
    folded = timed("parse", lambda: parse(text), 3)
    tree = timed("build the tree", lambda: build(folded), 3)  # type: ignore[arg-type]
    print(f"{len(tree):,} nodes")  # type: ignore[arg-type]
    timed("all that opening does", lambda: build(parse(text)).split(), 3)
    view = IcicleView()
    timed("first drawing, 200x50", lambda: icicle(build(parse("a 1")), view, 200, 50))
    timed("draw the whole, 200x50", lambda: icicle(tree, view, 200, 50))  # type: ignore[arg-type]
    rng = random.Random(2)
    nodes = [rng.randrange(len(tree)) for _ in range(40)]  # type: ignore[arg-type]
    widest = sorted(nodes, key=lambda node: -tree.total[node])  # type: ignore[attr-defined]

    def zooms() -> None:
        for node in widest:
            icicle(tree, replace(view, zoom=node, cursor=node), 200, 50)  # type: ignore[arg-type]

    timed("40 zooms and drawings", zooms, 3)
    timed("search", lambda: tree.hits(tree.found("function_77")))  # type: ignore[attr-defined]
    timed("invert", lambda: build(folded, inverted=True), 2)  # type: ignore[arg-type]


class Target:
    """The counting loop."""

    def __init__(self, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TARGET, str(threads)], stdout=subprocess.PIPE, text=True
        )
        self.rounds: list[tuple[int, float]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            number, seconds = line.split()
            self.rounds.append((int(number), float(seconds)))

    def rate(self, seconds: float) -> float:
        """Rounds a second; time in which it was stopped counts, time without a CPU does not."""
        first = len(self.rounds) + 1
        time.sleep(seconds)
        while len(self.rounds) <= first:
            time.sleep(0.05)
        new = self.rounds[first:]
        return sum(number for number, _ in new) / sum(seconds for _, seconds in new)


@contextlib.contextmanager
def panel(pid: int) -> Iterator[None]:
    """The top-frames panel."""
    stop = threading.Event()

    async def sample() -> None:
        source = StacksSource({pid: "engine"})
        while not stop.is_set():
            with contextlib.suppress(Exception):
                await source.read()
            await asyncio.sleep(0.5)
        await source.close()

    thread = threading.Thread(target=lambda: asyncio.run(sample()))
    thread.start()
    yield
    stop.set()
    thread.join()


def child(*words: str) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A command with `PID` in it, from the start of the block to its end."""

    @contextlib.contextmanager
    def running(pid: int) -> Iterator[None]:
        process = subprocess.Popen(
            [word.replace("PID", str(pid)) for word in words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=ROOT,
        )
        yield
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()

    return running


def slowdown(seconds: float, rate: int, rounds: int, threads: int) -> None:
    """Each way against the target alone, just before and just after it."""
    spy = find_py_spy()
    if spy is None:
        print("py-spy is not installed: no slowdown measured")
        return
    folder = tempfile.mkdtemp()
    length = str(int(seconds + 30))
    record = (spy, "record", "--pid", "PID", "-r", str(rate), "-d", length, "-f", "raw", "-s", "-t")
    flame = (sys.executable, "-m", "kvtop", "flame", "PID", "--for", length, "--rate", str(rate))
    flame += ("-o", f"{folder}/a.folded")

    def top(hz: int, *more: str) -> Callable[[int], contextlib.AbstractContextManager[None]]:
        words = " ".join((spy or "", "top", "--pid", "PID", "-r", str(hz), "-s", *more))
        return child("script", "-qec", words, "/dev/null")

    ways = {
        f"kvtop panel, {RATE_HZ} Hz": panel,
        f"py-spy top --nonblocking, {RATE_HZ} Hz": top(RATE_HZ, "--nonblocking"),
        f"py-spy top (its default), {RATE_HZ} Hz": top(RATE_HZ),
        f"kvtop flame, {rate} Hz": child(*flame),
        f"py-spy record --nonblocking, {rate} Hz": child(
            *record, "--nonblocking", "-o", "/dev/null"
        ),
        f"py-spy record (its default), {rate} Hz": child(*record, "-o", "/dev/null"),
        f"py-spy top (its default), {rate} Hz": top(rate),
        f"kvtop flame --blocking, {rate} Hz": child(*flame, "--blocking"),
    }
    print(f"\ntarget with {threads + 1} threads, {rounds} rounds of {seconds:g} s, interleaved")
    target = Target(threads)
    ratios: dict[str, list[float]] = {name: [] for name in ways}
    alone = [target.rate(seconds)]
    for _ in range(rounds):
        for name, way in ways.items():
            with way(target.process.pid):
                # Until it has begun to sample.
                time.sleep(2.5)
                there = target.rate(seconds)
            time.sleep(1.0)
            alone.append(target.rate(seconds))
            ratios[name].append(2 * there / (alone[-2] + alone[-1]))
    target.process.kill()
    target.process.wait()
    spread = 100 * statistics.pstdev(alone) / statistics.mean(alone)
    print(f"alone: {statistics.median(alone):,.0f} rounds/s, standard deviation {spread:.1f} %")
    for name, found in ratios.items():
        middle = statistics.median(found)
        print(f"{name:<40} {middle:6.3f} of alone  ({min(found):.3f} - {max(found):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rate", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=30)
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
    if options.lines:
        viewer(options.lines)
    if options.rounds:
        slowdown(options.seconds, options.rate, options.rounds, options.threads)


if __name__ == "__main__":
    main()
