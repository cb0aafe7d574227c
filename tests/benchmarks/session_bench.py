"""What a session file costs: size an hour, CPU of the recorder, opening and seeking a long file.

Run: python tests/benchmarks/session_bench.py [--minutes 10] [--hours 24] [--dir DIR]

Prints figures, asserts nothing. The engine is the seeded churn of the session tests. The
long file repeats ten minutes of it with the clock going on; 24 hours take about ten
minutes of CPU to write, and `--hours 0` leaves them out.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtop.model.snapshot import Snapshot  # noqa: E402
from kvtop.session.chosen import Chooser  # noqa: E402
from kvtop.session.reader import SessionReader  # noqa: E402
from kvtop.session.recorder import Recorder  # noqa: E402
from kvtop.session.writer import SessionWriter  # noqa: E402
from tests.session.churn import Churn  # noqa: E402


def shifted(snapshot: Snapshot, seconds: float) -> Snapshot:
    """The same moment, later."""
    return dataclasses.replace(
        snapshot, time_s=snapshot.time_s + seconds, mono_s=snapshot.mono_s + seconds
    )


def short_file(churn: Churn, ticks: int, path: Path) -> list[Snapshot]:
    """Record some minutes, block tables as well; prints size and CPU. Returns what was recorded."""
    for _ in range(120):
        churn.tick()
    writer = SessionWriter(path, 1.0)
    kept: list[Snapshot] = []
    cpu = wall = 0.0
    sizes = []
    chooser = Chooser()
    tables = 0
    allocated = churn.count["allocated"]
    for _ in range(ticks):
        snapshot = churn.tick()
        kept.append(snapshot)
        at, started = time.thread_time(), time.perf_counter()
        writer.write(snapshot)
        for engine, name in chooser.wanted(snapshot):
            writer.detail(engine.pid, churn.detail(name))
            tables += 1
        cpu += time.thread_time() - at
        wall += time.perf_counter() - started
        sizes.append(writer.size_bytes)
    writer.close()
    moved = (churn.count["allocated"] - allocated) / ticks
    hour = (sizes[-1] - sizes[0]) / (ticks - 1) * 3600
    print(f"churn: {moved:.0f} blocks allocated a second, {len(churn.jobs)} requests")
    print(f"size: {hour / 1e6:.2f} MB an hour ({path.stat().st_size:,} bytes for {ticks} s)")
    print(f"block tables: {tables / ticks * 3600:.0f} an hour")
    print(f"recorder CPU: {100 * cpu / ticks:.2f} % of a core ({1e3 * cpu / ticks:.2f} ms a tick)")
    print(f"recorder wall time: {1e3 * wall / ticks:.2f} ms a tick, the disk included")
    return kept


def offer_cost(snapshots: list[Snapshot], path: Path) -> None:
    """What the recorder costs the loop that hands snapshots over."""
    recorder = Recorder(path)
    recorder.start()
    times = []
    for snapshot in snapshots[:50]:
        started = time.perf_counter()
        recorder.offer(snapshot)
        times.append(time.perf_counter() - started)
        time.sleep(0.02)
    recorder.stop(timeout_s=10)
    print(f"handing over: {1e6 * statistics.median(times):.0f} us a snapshot (median)")


def long_file(cycle: list[Snapshot], hours: float, path: Path) -> None:
    """Write a long file from a short piece."""
    writer = SessionWriter(path, 1.0)
    length = cycle[-1].time_s - cycle[0].time_s + 1.0
    ticks = int(hours * 3600)
    for tick in range(ticks):
        turn, place = divmod(tick, len(cycle))
        writer.write(shifted(cycle[place], turn * length))
    writer.close()
    print(f"long file: {hours:g} h, {ticks:,} ticks, {path.stat().st_size / 1e6:.0f} MB")


def open_and_seek(path: Path) -> None:
    """In this process: open, and seek to random moments."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    reader = SessionReader(path)
    reader.load(reader.first_tick)
    opened = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rnd = random.Random(1)
    times, used = [], []
    for _ in range(200):
        moment = rnd.uniform(reader.first_s, reader.last_s)
        started, cpu = time.perf_counter(), time.process_time()
        reader.snapshot_at(moment)
        times.append(1e3 * (time.perf_counter() - started))
        used.append(1e3 * (time.process_time() - cpu))
    times.sort()
    used.sort()
    end = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"open, first snapshot included: {1e3 * opened:.0f} ms")
    for name, values in (("seek", times), ("seek, CPU alone", used)):
        print(
            f"{name}: median {values[100]:.0f} ms, 95 % {values[190]:.0f} ms,"
            f" worst {values[-1]:.0f} ms"
        )
    print(f"RSS: {before / 1024:.0f} MB before, {after / 1024:.0f} opened, {end / 1024:.0f} after")
    started = time.perf_counter()
    from kvtop.session.timeline import timeline

    events = timeline(reader)
    print(f"timeline: {len(events)} events in {1e3 * (time.perf_counter() - started):.0f} ms")
    reader.close()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--open", default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.open:
        open_and_seek(Path(chosen.open))
        return
    with tempfile.TemporaryDirectory(dir=chosen.dir) as name:
        folder = Path(name)
        churn = Churn(blocks=chosen.blocks, requests=chosen.requests)
        kept = short_file(churn, int(chosen.minutes * 60), folder / "short.kvtop")
        offer_cost(kept, folder / "offer.kvtop")
        target = folder / "short.kvtop"
        if chosen.hours > 0:
            target = folder / "long.kvtop"
            long_file(kept, chosen.hours, target)
        # In a process of its own, so that memory is the reader's alone.
        subprocess.run([sys.executable, __file__, "--open", str(target)], check=True)


if __name__ == "__main__":
    main()
