"""What the session tests share."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from pathlib import Path

from kvtop.model.snapshot import Request, Snapshot
from kvtop.session.recorder import Recorder
from kvtop.session.writer import SessionWriter
from tests.session.churn import Churn

_TIMES = ("arrival_time_s", "age_s", "held_s", "client_gone_s")


def stored(snapshot: Snapshot) -> Snapshot:
    """A snapshot as a file gives it back: times of requests to the microsecond."""
    return dataclasses.replace(
        snapshot,
        engines=tuple(
            dataclasses.replace(
                engine,
                requests=None
                if engine.requests is None
                else tuple(_request(request) for request in engine.requests),
            )
            for engine in snapshot.engines
        ),
    )


def _request(request: Request) -> Request:
    return dataclasses.replace(request, **{name: _micro(getattr(request, name)) for name in _TIMES})


def _micro(value: float | None) -> float | None:
    if value is None or not math.isfinite(value * 1e6):
        return None
    return round(value * 1e6) / 1e6


def small(**options: object) -> Churn:
    """A small busy engine."""
    chosen: dict[str, object] = {
        "blocks": 300,
        "requests": 8,
        "prompt": (20, 200),
        "output": (50, 400),
        **options,
    }
    return Churn(**chosen)  # type: ignore[arg-type]


def recorded(path: Path, ticks: int = 200, **options: object) -> list[Snapshot]:
    """A closed session file of a small busy engine; what was recorded."""
    churn = small(**options)
    writer = SessionWriter(path, 1.0, key_every=20)
    out = []
    for _ in range(ticks):
        snapshot = churn.tick()
        writer.write(snapshot)
        out.append(snapshot)
    writer.marker(out[ticks // 2].time_s, "half")
    writer.close()
    return out


def insist(action: Callable[[], bool], recorder: Recorder) -> bool:
    """Do it as soon as the recorder has room; False when the recording is over."""
    for _ in range(20_000):
        if recorder.status.state != "recording":
            return False
        if action():
            return True
        threading.Event().wait(0.001)
    raise AssertionError(recorder.status)


def offer(recorder: Recorder, snapshot: Snapshot) -> bool:
    """Hand a snapshot over, however slow the disk is."""
    return insist(lambda: recorder.offer(snapshot), recorder)
