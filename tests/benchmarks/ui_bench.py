"""What the screen costs, measured on a pseudo terminal; prints figures, asserts nothing.

Run: python tests/benchmarks/ui_bench.py [--seconds 20] [--blocks 20000] [--requests 256]

The process measured is the screen alone, on snapshots made before (the fake feed), so
sources and parsing are not in these figures.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")


def spawn(columns: int, rows: int, args: list[str]) -> tuple[int, int]:
    """Start the screen on a new pseudo terminal; its pid and the master side."""
    pid, master = pty.fork()
    if pid == 0:
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        env.pop("NO_COLOR", None)
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.execve(sys.executable, [sys.executable, str(ROOT / "tests/e2e/fake_top.py"), *args], env)
    return pid, master


def read_for(master: int, seconds: float, until: bytes = b"") -> bytes:
    """Everything written within a time, or until some bytes have been seen."""
    deadline = time.monotonic() + seconds
    data = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if select.select([master], [], [], left)[0]:
            try:
                data += os.read(master, 65536)
            except OSError:
                break
        if until and until in data:
            break
    return bytes(data)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def stop(pid: int, master: int) -> None:
    os.write(master, b"q")
    read_for(master, 2.0, b"\x1b[?25h")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(master)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--columns", type=int, default=160)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--interval", type=float, default=1.0)
    options = parser.parse_args()
    begin = time.monotonic()
    pid, master = spawn(options.columns, options.rows, ["--no-first"])
    read_for(master, 20.0, b"\x1b[?1049h")
    read_for(master, 20.0, b"Reading")
    print(
        f"first frame (no snapshot yet)   {1000 * (time.monotonic() - begin):.0f} ms, "
        f"{cpu_s(pid):.2f} s CPU"
    )
    read_for(master, 20.0, b"Requests")
    print(
        f"first frame from the feed       {1000 * (time.monotonic() - begin):.0f} ms, "
        f"{cpu_s(pid):.2f} s CPU"
    )
    stop(pid, master)

    begin = time.monotonic()
    pid, master = spawn(options.columns, options.rows, [])
    read_for(master, 20.0, b"Requests")
    print(
        f"first frame with a snapshot     {1000 * (time.monotonic() - begin):.0f} ms, "
        f"{cpu_s(pid):.2f} s CPU"
    )
    stop(pid, master)

    print(
        f"steady, {options.columns}x{options.rows}, every {options.interval:g} s, "
        f"{options.blocks:,} blocks, {options.requests} requests:"
    )
    for title, rush in (("just started", 0), ("after an hour", 3600)):
        steady(options, title, rush)


def steady(options: argparse.Namespace, title: str, rush: int) -> None:
    """Print what the running screen costs after so many snapshots."""
    load = ["--blocks", str(options.blocks), "--requests", str(options.requests)]
    load += ["--made", "30", "--interval", str(options.interval), "--rush", str(rush)]
    pid, master = spawn(options.columns, options.rows, load)
    read_for(master, 6.0 + 2 * options.interval)
    cpu, begin = cpu_s(pid), time.monotonic()
    data = read_for(master, options.seconds)
    spent, took = cpu_s(pid) - cpu, time.monotonic() - begin
    print(
        f"  {title}: CPU {100 * spent / took:.2f} % of a core, "
        f"{len(data) / took / 1000:.2f} kB/s to the terminal, RSS {rss_mb(pid):.1f} MB"
    )
    stop(pid, master)


if __name__ == "__main__":
    main()
