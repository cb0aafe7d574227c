"""speedscope files, read and written by the official schema.

Schema: https://www.speedscope.app/file-format-schema.json, file type version 0.0.1:
`shared.frames`, and profiles of type `sampled` (samples as lists of frame numbers from
the outside in, and a weight each) or `evented` (frames opened and closed at times).
"""

from __future__ import annotations

import json
from typing import Any

from kvtop.errors import BadDataError
from kvtop.flame.folded import MAX_DEPTH, Folded, check_total, code_of, merge, thread_of
from kvtop.model.frames import split_frame

SCHEMA_URL = "https://www.speedscope.app/file-format-schema.json"
"""Value of `$schema`; a name, never asked for."""
_MICRO = {"seconds": 1e6, "milliseconds": 1e3, "microseconds": 1.0, "nanoseconds": 1e-3}
_MAX_EVENTS = 20_000_000


def write(folded: Folded, name: str, exporter: str, hz: float | None = None) -> str:
    """A speedscope file: one sampled profile a thread.

    Args:
        folded: The stacks.
        name: Shown as the title.
        exporter: Name and version of who wrote it.
        hz: Samples a second; weights are then seconds. None: weights are samples.
    """
    numbers: dict[str, int] = {}
    frames: list[dict[str, Any]] = []
    threads: dict[str, tuple[list[list[int]], list[float]]] = {}
    factor = 1.0 / hz if hz and folded.unit == "samples" else 1.0
    for stack, count in sorted(folded.stacks):
        samples, weights = threads.setdefault(thread_of(stack) or "all threads", ([], []))
        samples.append([_number(frame, numbers, frames) for frame in code_of(stack)])
        weights.append(count * factor)
    unit = "none"
    if folded.unit == "samples":
        unit = "seconds" if hz else "none"
    elif folded.unit in (*_MICRO, "bytes"):
        unit = folded.unit
    profiles = [
        {
            "type": "sampled",
            "name": thread,
            "unit": unit,
            "startValue": 0,
            "endValue": sum(weights),
            "samples": samples,
            "weights": weights,
        }
        for thread, (samples, weights) in threads.items()
    ]
    return json.dumps(
        {
            "$schema": SCHEMA_URL,
            "name": name,
            "exporter": exporter,
            "activeProfileIndex": 0,
            "shared": {"frames": frames},
            "profiles": profiles,
        },
        separators=(",", ":"),
    )


def _number(label: str, numbers: dict[str, int], frames: list[dict[str, Any]]) -> int:
    number = numbers.get(label)
    if number is None:
        number = numbers[label] = len(frames)
        function, file, line = split_frame(label)
        row: dict[str, Any] = {"name": function}
        if file:
            row["file"] = file
        if line is not None:
            row["line"] = line
        frames.append(row)
    return number


def read(text: str, title: str = "") -> Folded:
    """The stacks of a speedscope file; all its profiles, each under its name.

    Weights in units of time become whole microseconds, others are rounded.

    Raises:
        BadDataError: It is not a speedscope file, or not a whole one.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise BadDataError("this is no speedscope file: not JSON") from None
    if not (isinstance(data, dict) and "shared" in data and "profiles" in data):
        raise BadDataError("this is JSON, but no speedscope file")
    try:
        labels = [_label(frame) for frame in data["shared"]["frames"]]
        profiles = data["profiles"]
        several = len(profiles) > 1
        rows: list[tuple[tuple[str, ...], int]] = []
        unit = "samples"
        for profile in profiles:
            factor = _MICRO.get(profile.get("unit", "none"), 0.0)
            name = (f"{profile.get('name') or 'profile'}",) if several else ()
            if factor:
                unit = "microseconds"
            elif profile.get("unit") == "bytes":
                unit = "bytes"
            stacks = _evented(profile) if profile["type"] == "evented" else _sampled(profile)
            for numbers, weight in stacks:
                if any(number < 0 for number in numbers):
                    raise BadDataError("this is no whole speedscope file: a negative frame number")
                count = round(weight * (factor or 1.0))
                if count > 0:
                    rows.append((name + tuple(labels[n] for n in numbers[:MAX_DEPTH]), count))
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        kind = type(error).__name__
        raise BadDataError(f"this is no whole speedscope file ({kind})") from None
    if not rows:
        raise BadDataError("this speedscope file holds no stack")
    check_total(rows)
    out = merge(rows)
    return Folded(out.rows, unit, 0, title or str(data.get("name") or ""))


def _label(frame: dict[str, Any]) -> str:
    name, file, line = str(frame["name"]), frame.get("file"), frame.get("line")
    if not file:
        return name
    return f"{name} ({file}:{line})" if line is not None else f"{name} ({file})"


def _sampled(profile: dict[str, Any]) -> list[tuple[list[int], float]]:
    samples, weights = profile["samples"], profile["weights"]
    if len(samples) != len(weights):
        raise ValueError
    return list(zip(samples, weights, strict=True))


def _evented(profile: dict[str, Any]) -> list[tuple[list[int], float]]:
    events = profile["events"]
    if len(events) > _MAX_EVENTS:
        raise ValueError
    open_now: list[int] = []
    out: list[tuple[list[int], float]] = []
    at = float(profile["startValue"])
    for event in events:
        if event["at"] > at and open_now:
            out.append((open_now[:MAX_DEPTH], event["at"] - at))
        at = max(at, float(event["at"]))
        if event["type"] == "O":
            open_now.append(event["frame"])
        elif open_now:
            open_now.pop()
    return out
