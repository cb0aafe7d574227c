"""`kvtop demo`: a simulated engine, and the normal screens on it."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtop.attach.outside import visible
from kvtop.commands.common import add_screen_arguments, options_from
from kvtop.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from kvtop.config import Options
    from kvtop.demo.launch import Running

_DEFAULT_SEED = 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop demo`."""
    parser.add_argument(
        "--scenario",
        default="healthy",
        metavar="NAME",
        help="healthy, leak, preempt-storm, disconnect or wedge (default: healthy)",
    )
    parser.add_argument(
        "--seed",
        default=str(_DEFAULT_SEED),
        metavar="N",
        help=f"same number, same run (default: {_DEFAULT_SEED})",
    )
    parser.add_argument(
        "--blocks", default=None, metavar="N", help="KV blocks of the simulated GPU"
    )
    parser.add_argument(
        "--speed",
        default="1",
        metavar="X",
        help="simulated seconds a second, 0.1 to 10 (default: 1)",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="run only the simulated engine, until stopped, and say where it is",
    )
    parser.add_argument("-i", "--interval", metavar="TIME", help="time between looks (1s)")
    add_screen_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run `kvtop demo`; returns the exit code.

    Raises:
        UsageError: A value that cannot be simulated.
        KvtopError: The engine process did not start.
    """
    from kvtop.demo.scenario import find_scenario

    scenario = find_scenario(parsed.scenario).name
    seed = _whole(parsed.seed, "--seed")
    blocks = None if parsed.blocks is None else _whole(parsed.blocks, "--blocks")
    speed = _number(parsed.speed, "--speed")
    if parsed.serve:
        return _serve(scenario, seed, blocks, speed)
    # What the user set for real servers does not narrow down the simulated one.
    options = replace(options_from(parsed), url=None, pid=None, attach=False)
    from kvtop.demo.launch import running

    with running(scenario, seed=seed, blocks=blocks, speed=speed) as engine:
        return _show(engine, options)


def _show(engine: Running, options: Options) -> int:
    """The normal screens on a simulated engine."""
    from kvtop.commands.top import run_on
    from kvtop.demo.source import DemoGpuSource
    from kvtop.stream.target import Target

    target = Target(
        socket_dir=engine.directory,
        url=engine.url,
        gpu_source=DemoGpuSource(engine.url),
        demo=True,
    )
    return run_on(target, options)


def _serve(scenario: str, seed: int, blocks: int | None, speed: float) -> int:
    from kvtop.demo.serve import serve

    folder = os.environ.get("KVTOP_DIR")
    serve(
        scenario,
        seed=seed,
        blocks=blocks,
        speed=speed,
        directory=Path(folder) if folder else None,
        parent=None,
        ready=_say,
    )
    return int(ExitCode.OK)


def _say(where: Mapping[str, object]) -> None:
    # The folder's name comes from the environment.
    print(visible(f"simulated engine, pid {where['pid']}; stop it with Ctrl-C", 4096))
    print(visible(f"metrics  {where['metrics_url']}", 4096))
    print(visible(f"probe    {where['socket']}", 4096))
    print(visible(f"folder   KVTOP_DIR={where['directory']}", 4096), flush=True)


def _whole(text: object, option: str) -> int:
    try:
        return int(str(text))
    except ValueError:
        raise UsageError(f"{option} {text} is not a whole number") from None


def _number(text: object, option: str) -> float:
    try:
        value = float(str(text))
    except ValueError:
        raise UsageError(f"{option} {text} is not a number") from None
    if not math.isfinite(value):
        raise UsageError(f"{option} {text} is not a number")
    return value
