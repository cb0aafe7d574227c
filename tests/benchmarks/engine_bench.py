"""What the probe costs a real vLLM: tokens a second with it and without, in pairs.

    KVTOP_VLLM_PYTHON=.vllm/venv/bin/python .venv/bin/python tests/benchmarks/engine_bench.py

Two servers on the same machine, one without the probe and one whose probe is polled at
10 Hz, take the same load in turn. Quote the median of the ratios, not single runs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvtop.sources.answers import parse_snapshot
from kvtop.sources.engine import get_once
from tests.vllm import load
from tests.vllm.conftest import probe_socket
from tests.vllm.server import Server, make_model, python_or_reason

JOBS = [load.Job(prompt_chars=200, max_tokens=400) for _ in range(16)]
TOKENS = sum(job.max_tokens for job in JOBS)


def rate(url: str) -> float:
    """Generated tokens a second of one run of the load."""
    begin = time.monotonic()
    result = asyncio.run(load.run(url, JOBS))
    if result["finished"] != len(JOBS):
        raise SystemExit(f"the load failed: {result}")
    return TOKENS / (time.monotonic() - begin)


def polled(server: Server, path: str) -> tuple[float, int, float, float]:
    """The rate while a client polls at 10 Hz; snapshots, worst scan in us, worst cost in %."""
    stop = threading.Event()
    seen = []

    def poll() -> None:
        while not stop.wait(0.1):
            engine = parse_snapshot(get_once(path, "/v1/snapshot", 5.0))
            if engine.probe:
                seen.append((engine.probe.scan_us, engine.probe.cost_percent))

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        got = rate(server.url)
    finally:
        stop.set()
        thread.join()
    return got, len(seen), max(s for s, _ in seen), max(c for _, c in seen)


def main() -> int:
    """Run the pairs and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    python, reason = python_or_reason()
    if not python:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(python, folder / "model")
        bare = Server(
            python, model, folder / "bare", ["--max-num-seqs", "16"], {"KVTOP_PROBE": "0"}
        )
        with_probe = Server(python, model, folder / "probe", ["--max-num-seqs", "16"])
        try:
            bare.wait()
            path = probe_socket(with_probe.wait())
            rate(bare.url), rate(with_probe.url)  # warm up
            ratios = []
            for turn in range(options.pairs):
                without = rate(bare.url)
                got, count, scan_us, cost = polled(with_probe, path)
                ratios.append(got / without)
                print(
                    f"pair {turn + 1}: without {without:7.0f} tok/s   polled at 10 Hz {got:7.0f} "
                    f"tok/s   ratio {ratios[-1]:.3f}   ({count} snapshots, worst scan "
                    f"{scan_us:.0f} us, worst cost {cost:.3f} %)",
                    flush=True,
                )
            print(
                f"median ratio {statistics.median(ratios):.3f}  "
                f"(min {min(ratios):.3f}, max {max(ratios):.3f})"
            )
        finally:
            bare.stop()
            with_probe.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
