"""Options: defaults, then the file, then the environment, then the flags."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvtop.errors import UsageError

MIN_INTERVAL_S = 0.25
"""Shortest time between two snapshots; below it a terminal shows no more."""
MAX_FILE_BYTES = 1_000_000
"""A larger configuration file is refused."""
MAX_INTERVAL_S = 60.0
"""Longest."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, before anything is looked at."""

    interval_s: float = 1.0
    """Time between two snapshots."""
    url: str | None = None
    """Only the server at this address. None: every server on this machine."""
    pid: int | None = None
    """Only the server that this process belongs to. None: every server."""
    ascii: bool = False
    """True: draw with ASCII characters only."""
    stacks: bool = True
    """True: show and sample the top Python frames with py-spy."""
    gpus: bool = True
    """True: read NVML."""
    blackbox_s: float | None = None
    """Keep so many last seconds on disk beside the screen, and write them out when something
    happens. None: no black box."""
    attach: bool = False
    """True: put the probe into engines that have none when the screen starts."""
    allow_actions: bool = False
    """True: keys may abort a request or reset the prefix cache, after a question. Only the flag
    sets it, for each start anew."""
    findings: Mapping[str, Any] = field(default_factory=dict)
    """Thresholds of detectors, by name, from the file's `[findings]` section."""


_ENV = {
    "KVTOP_INTERVAL": "interval_s",
    "KVTOP_URL": "url",
    "KVTOP_PID": "pid",
    "KVTOP_ASCII": "ascii",
    "KVTOP_STACKS": "stacks",
    "KVTOP_GPUS": "gpus",
}
"""Environment variable to option."""

_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def seconds(text: str, where: str) -> float:
    """Seconds from `0.5`, `500ms`, `30s`, `10m` or `2h`.

    Raises:
        UsageError: It is none of these, or not finite and positive.
    """
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    number, factor = text.strip(), 1.0
    for unit in ("ms", "s", "m", "h", "d"):
        if number.endswith(unit):
            number, factor = number[: -len(unit)], units[unit]
            break
    try:
        value = float(number) * factor
    except ValueError:
        value = -1.0
    if value == 0.0:
        raise UsageError(f"{where}: {text!r} is too short", "it must be above 0")
    if not 0.0 < value < 1e9:
        raise UsageError(
            f"{where}: {text!r} is not a time", "write for example 0.5s, 30s, 10m or 2h"
        )
    return value


def interval(text: str, where: str) -> float:
    """A snapshot interval, checked against the limits.

    Raises:
        UsageError: Not a time, or out of bounds.
    """
    value = seconds(text, where)
    if not MIN_INTERVAL_S <= value <= MAX_INTERVAL_S:
        raise UsageError(
            f"{where}: {text!r} is out of bounds",
            f"from {MIN_INTERVAL_S:g}s to {MAX_INTERVAL_S:g}s",
        )
    return value


def _value(name: str, raw: object, where: str) -> object:
    if name == "interval_s":
        return interval(str(raw), where)
    if name == "blackbox_s":
        return seconds(str(raw), where)
    if name == "pid":
        text = str(raw)
        # Ten digits hold every pid; int() of thousands of digits is refused by Python itself.
        if not re.fullmatch("[0-9]{1,10}", text) or int(text) < 1:
            raise UsageError(f"{where}: {text!r} is not a process id", "a whole number from 1 on")
        return int(text)
    if name == "url":
        return str(raw)
    flag = raw if isinstance(raw, bool) else _FLAGS.get(str(raw).lower())
    if flag is None:
        raise UsageError(f"{where}: {raw!r} is neither yes nor no", "write 1 or 0")
    return flag


def config_path(environ: Mapping[str, str]) -> Path:
    """`$KVTOP_CONFIG`, else `kvtop/config.toml` in the user's configuration directory."""
    if chosen := environ.get("KVTOP_CONFIG"):
        return Path(chosen)
    base = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME") or "/") / ".config")
    return Path(base) / "kvtop" / "config.toml"


def _read_file(path: Path, required: bool) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path}: not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        text = raw.decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if required:
            raise UsageError(f"{path}: no such configuration file", "see KVTOP_CONFIG") from None
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    return data


def load(
    flags: Mapping[str, object],
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Options:
    """The options in force.

    Args:
        flags: Option name to value; None means not given.
        environ: The environment; the process's own by default.
        path: The file; found through the environment by default.

    Raises:
        UsageError: A value is wrong; the message says where it stands.
    """
    environ = os.environ if environ is None else environ
    required = path is not None or bool(environ.get("KVTOP_CONFIG"))
    path = config_path(environ) if path is None else path
    names = {f.name for f in fields(Options)} - {"findings"}
    keys = {name.removesuffix("_s"): name for name in names - {"allow_actions"}}
    chosen: dict[str, Any] = {}
    for key, raw in _read_file(path, required).items():
        if key == "findings" and isinstance(raw, dict):
            chosen["findings"] = raw
        elif key in keys:
            chosen[keys[key]] = _value(keys[key], raw, f"{path}: {key}")
        else:
            raise UsageError(
                f"{path}: unknown option {key!r}",
                "known: " + ", ".join([*sorted(keys), "findings"]),
            )
    for variable, name in _ENV.items():
        if environ.get(variable):
            chosen[name] = _value(name, environ[variable], variable)
    for name, raw in flags.items():
        if name in names and raw is not None:
            chosen[name] = _value(name, raw, "--" + name.removesuffix("_s").replace("_", "-"))
    return replace(Options(), **chosen)
