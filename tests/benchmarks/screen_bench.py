"""What watching costs: kvtop and its peers on one server, each in a terminal of its own.

    .venv/bin/python tests/benchmarks/screen_bench.py --url http://127.0.0.1:8000 \\
        --peer 'vllmstat -u URL' --peer 'vllm-htop --url URL'

Without --url it starts the demo's engine (20,480 blocks). Prints for each program the
time and CPU to the first frame with numbers, then CPU, memory and bytes to the terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtop.demo.launch import running

ESCAPES = re.compile(
    rb"\x1b(?:\[[0-9;?<=>]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_].*?\x1b\\|.)", re.S
)


@dataclass
class Figures:
    """What one program cost."""

    first_s: float | None
    first_cpu_s: float | None
    cpu_percent: float
    rss_mb: float
    bytes_s: float


def family(pid: int) -> list[psutil.Process]:
    """A process and its children, less those that have just ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def cpu_s(pid: int) -> float:
    """CPU seconds of a process, children that have ended included."""
    total = 0.0
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
            if process.pid == pid:
                total += times.children_user + times.children_system
    return total


def rss_mb(pid: int) -> float:
    """Resident memory of the process itself."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss / 2**20
    return 0.0


def drive(
    command: list[str], wanted: re.Pattern[bytes], seconds: float, env: dict[str, str]
) -> Figures:
    """Run a program at 160x50 for a while, answering nothing."""
    begin = time.monotonic()
    pid, master = pty.fork()
    if pid == 0:
        os.environ.update(env)
        os.execvp(command[0], command)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    output = bytearray()
    first_s = first_cpu = None
    steady_from, steady_bytes, steady_cpu, peak = None, 0, 0.0, 0.0
    try:
        while (now := time.monotonic()) - begin < 60 + seconds:
            ready, _, _ = select.select([master], [], [], 0.02)
            if ready:
                try:
                    chunk = os.read(master, 1 << 16)
                except OSError:
                    break
                if not chunk:
                    break
                output += chunk
                if first_s is None and wanted.search(ESCAPES.sub(b"", bytes(output))):
                    first_s, first_cpu = now - begin, cpu_s(pid)
            since = None if first_s is None else now - begin - first_s
            # Five seconds for imports that come after the first frame.
            if since is not None and since > 5 and steady_from is None:
                steady_from, steady_bytes, steady_cpu = now, len(output), cpu_s(pid)
            if steady_from is not None:
                peak = max(peak, rss_mb(pid))
                if now - steady_from >= seconds:
                    break
        span = time.monotonic() - (steady_from or begin)
        return Figures(
            first_s,
            first_cpu,
            100 * (cpu_s(pid) - steady_cpu) / span,
            peak,
            (len(output) - steady_bytes) / span,
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        time.sleep(1)
        for process in family(pid):
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        os.close(master)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; the demo's by default")
    parser.add_argument("--peer", action="append", default=[], help="command; URL is replaced")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each is measured")
    parser.add_argument("--no-stacks", action="store_true", help="kvtop without py-spy")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        env = {"TERM": "xterm-256color", "COLORTERM": ""}
        url = options.url
        kvtop = [str(Path(sys.executable).with_name("kvtop"))]
        if url is None:
            demo = stack.enter_context(running("healthy", seed=1))
            url, env["KVTOP_DIR"] = demo.url, str(demo.directory)
            time.sleep(5)
        kvtop += ["--url", url, *(["--no-stacks"] if options.no_stacks else [])]
        programs = [("kvtop", kvtop, re.compile(rb"\d x \d+ tok"))]
        for text in options.peer:
            words = shlex.split(text.replace("URL", url))
            # The first percentage or number with a unit: a frame with figures in it.
            programs.append((Path(words[0]).name, words, re.compile(rb"\d\s?%")))
        print("| program | first frame s | CPU until then s | CPU % | RSS MB | kB/s |")
        print("|---|---|---|---|---|---|")
        for name, words, wanted in programs:
            f = drive(words, wanted, options.seconds, env)
            first = "-" if f.first_s is None else f"{f.first_s:.2f}"
            cpu = "-" if f.first_cpu_s is None else f"{f.first_cpu_s:.2f}"
            print(
                f"| {name} | {first} | {cpu} | {f.cpu_percent:.1f} | {f.rss_mb:.0f} "
                f"| {f.bytes_s / 1000:.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
