"""`kvtop attach` and `kvtop detach`: the probe into running engines, and out again."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from kvtop.attach import probe
from kvtop.attach.ability import AttachError, Backend, SimulatedError
from kvtop.attach.find import find_servers
from kvtop.attach.probe import Outcome
from kvtop.attach.select import Chosen, parse_pid, select
from kvtop.errors import ExitCode, UsageError

WAYS = ("remote_exec", "ptrace", "frida", "gdb")
"""Names of the back ends."""


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of both commands."""
    parser.add_argument(
        "pid", nargs="?", metavar="PID", help="any process of the server; none: the only server"
    )
    parser.add_argument("--all", action="store_true", help="all servers on this machine")
    parser.add_argument(
        "--via",
        metavar="WAY",
        help=f"only this way in: {', '.join(WAYS)}; without it they are tried in this order",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `kvtop attach`."""
    add_common(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="where a probe of another kvtop version runs, put this version's in its place",
    )


def run(options: argparse.Namespace) -> int:
    """Puts the probe into engine cores, API servers and workers.

    Returns:
        OK when all of them have a probe now, DEGRADED when some do, else the code of the
        first failure.
    """
    among = ways(options.via)
    return each(
        options,
        lambda chosen: probe.attach(*chosen, among=among, replace=bool(options.replace)),
    )


def ways(name: str | None) -> tuple[Backend, ...] | None:
    """The back ends to try. None: all.

    Raises:
        UsageError: There is none of that name.
    """
    if name is None:
        return None
    chosen = tuple(backend for backend in probe.backends() if backend.name == name)
    if not chosen:
        raise UsageError(f"there is no way {name!r} to attach", f"it is one of {', '.join(WAYS)}")
    return chosen


def each(options: argparse.Namespace, act: Callable[[Chosen], Outcome]) -> int:
    """Does it to each process meant, and prints a line for each."""
    if options.all and options.pid is not None:
        raise UsageError("give a process id or --all, not both")
    pid = None if options.pid is None else parse_pid(options.pid)
    rows: list[dict[str, object]] = []
    failures: list[AttachError] = []
    for chosen in select(find_servers(), pid, every=bool(options.all)):
        process, role = chosen
        try:
            outcome = act(chosen)
        except AttachError as error:
            # Of all servers it is not one; by its number it was asked for.
            left_alone = bool(options.all) and isinstance(error, SimulatedError)
            if not left_alone:
                failures.append(error)
            row: dict[str, object] = {
                "pid": process.pid,
                "role": role,
                "ok": left_alone,
                "changed": False,
            }
            row |= {"text": error.what, "remedy": error.remedy}
        else:
            row = {"pid": process.pid, "role": role, "ok": True, "changed": outcome.changed}
            row |= {"text": outcome.text, "remedy": ""}
        rows.append(row)
        if not options.json:
            remedy = f"; {row['remedy']}" if row["remedy"] else ""
            print(_visible(f"{role} {process.pid}: {row['text']}{remedy}"))
    if options.json:
        print(json.dumps({"processes": rows}))
    if not failures:
        return ExitCode.OK
    return ExitCode.DEGRADED if len(failures) < len(rows) else failures[0].code


def _visible(text: str) -> str:
    """Without control characters: some of it comes from the target."""
    return "".join(c if c.isprintable() else "?" for c in text)
