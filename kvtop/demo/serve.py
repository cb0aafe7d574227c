"""The demo's engine process: `python -m kvtop.demo.serve`.

It prints one JSON line on standard output when it can be read, `{"pid", "metrics_url",
"socket", "directory"}`, or `{"error"}` when it cannot start, and runs until SIGTERM, SIGINT,
SIGHUP, SIGQUIT or its parent's death. It leaves neither process nor socket nor folder behind.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from kvtop.demo.clock import PacedClock
from kvtop.demo.config import MODEL, VLLM_VERSION
from kvtop.demo.engine import EngineCore
from kvtop.demo.http import DemoServer, json_page
from kvtop.demo.metrics import CONTENT_TYPE
from kvtop.demo.scenario import SCENARIOS, find_scenario
from kvtop.errors import KvtopError, StorageError, UsageError
from kvtop.model.codec import encode
from kvtop.probe import control, runtime

MIN_SPEED, MAX_SPEED = 0.1, 10.0
"""Simulated seconds a real second."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Each ends the process in order; SIGHUP is what a closed terminal sends, SIGQUIT is Ctrl-\\."""

_PR_SET_NAME = 15
_PARENT_CHECK_S = 1.0
_PROBE_START_S = 5.0
_SOCKET_PATH_LIMIT = 90
"""A Unix socket's path may have 107 bytes; the socket's name comes after the folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine process; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvtop.demo.serve")
    parser.add_argument("--scenario", default="healthy", choices=tuple(SCENARIOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=None)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--parent", type=int, default=None)
    options = parser.parse_args(argv)
    try:
        serve(
            options.scenario,
            seed=options.seed,
            blocks=options.blocks,
            speed=options.speed,
            directory=options.directory,
            parent=options.parent,
            ready=_print_line,
        )
    except KvtopError as error:
        _print_line({"error": error.line(), "code": int(error.code)})
        return int(error.code)
    return 0


def _print_line(data: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


def serve(
    scenario: str,
    *,
    seed: int,
    blocks: int | None,
    speed: float,
    directory: Path | None,
    parent: int | None,
    ready: Callable[[dict[str, object]], None],
) -> None:
    """Run a simulated engine on this thread until it is told to stop.

    Args:
        scenario: Name of a scenario.
        seed: Which run.
        blocks: Size of the pool. None: the scenario's own.
        speed: Simulated seconds a real second, `MIN_SPEED` to `MAX_SPEED`.
        directory: Where the probe's socket goes. None: a new private folder, removed at
            the end.
        parent: Stop when this process is not the parent any more. None: do not look.
        ready: Called once with where everything is.

    Raises:
        UsageError: A value that cannot be simulated.
        StorageError: The folder or the sockets could not be made.
    """
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise UsageError(f"--speed {speed:g} is not possible", "give 0.1 to 10")
    clock = PacedClock(speed)
    engine = EngineCore(find_scenario(scenario), seed, blocks, clock)
    _name_process("kvtop-demo")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_stopped_by_signals(clock))
        folder = stack.enter_context(_folder(directory))
        server = _http(engine, clock)
        stack.callback(server.server_close)
        server.start()
        stack.callback(server.shutdown)
        socket_path = stack.enter_context(_probes(engine, folder))
        if parent is not None:
            threading.Thread(
                target=_watch_parent, args=(parent, clock), name="parent", daemon=True
            ).start()
        ready(
            {
                "pid": os.getpid(),
                "metrics_url": f"{server.url}/metrics",
                "socket": str(socket_path),
                "directory": str(folder),
            }
        )
        clock.restart()
        engine.run_busy_loop()


def _http(engine: EngineCore, clock: PacedClock) -> DemoServer:
    def gpus() -> dict[str, object]:
        return {"gpus": [encode(gpu) for gpu in engine.gpus.read(clock.real_now_s())]}

    def models() -> dict[str, object]:
        config = engine.vllm_config.model_config
        model = {"id": MODEL, "object": "model", "max_model_len": config.max_model_len}
        return {"object": "list", "data": [model]}

    try:
        return DemoServer(
            {
                "/metrics": lambda: (CONTENT_TYPE, engine.metrics.render()),
                "/health": lambda: ("text/plain", b""),
                "/version": json_page(lambda: {"version": VLLM_VERSION}),
                "/v1/models": json_page(models),
                "/demo/gpus": json_page(gpus),
            }
        )
    except OSError as error:
        raise StorageError(f"the demo cannot listen on 127.0.0.1: {error}") from error


@contextlib.contextmanager
def _folder(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        yield directory
        return
    try:
        made = tempfile.mkdtemp(prefix="kvtop-demo-")
        if len(made) > _SOCKET_PATH_LIMIT:
            os.rmdir(made)
            made = tempfile.mkdtemp(prefix="kvtop-demo-", dir="/tmp")
    except OSError as error:
        raise StorageError(f"the demo cannot make its folder: {error}") from error
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _probes(engine: EngineCore, folder: Path) -> Iterator[Path]:
    """The engine's probe and, as beside vLLM's API server, one that knows the clients."""
    try:
        probe = control.install(engine, index=0, loaded_by="demo", directory=str(folder))
    except (LookupError, RuntimeError) as error:
        raise StorageError(f"the demo's probe did not start: {error}") from error
    clients = control.Probe(
        "demo", str(folder), lambda _probe: runtime.front_end(engine.output_processor)
    )
    clients.start()
    try:
        if not clients.ready.wait(_PROBE_START_S) or clients.state != "ok":
            raise StorageError(f"the demo's probe did not start: {clients.reason}")
        yield Path(probe.socket_path)
    finally:
        clients.stop()
        control.stop()


@contextlib.contextmanager
def _stopped_by_signals(clock: PacedClock) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        clock.stopping = True

    before = {
        number: signal.signal(number, stop)
        for number in STOP_SIGNALS
        # `nohup` has asked for it to be ignored.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch_parent(parent: int, clock: PacedClock) -> None:
    while not clock.stopping:
        if os.getppid() != parent:
            clock.stopping = True
            return
        time.sleep(_PARENT_CHECK_S)


def _name_process(name: str) -> None:
    """What `ps -o comm` and top show."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
