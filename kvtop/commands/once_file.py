"""`kvtop once --file`: the last snapshot that a probe has left, as text or JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtop import __version__
from kvtop.attach.last import read_last
from kvtop.errors import BadDataError
from kvtop.model.snapshot import Snapshot, SourceState, SourceStatus
from kvtop.sources.answers import parse_snapshot

_MOST_FRAMES = 12
_MOST_TEXT = 300


def load(name: str) -> Snapshot:
    """The engine as its probe saw it when it died.

    Raises:
        NotFoundError, DeniedError: It cannot be opened.
        BadDataError: It is no such file.
    """
    path = Path(name)
    body = read_last(path)
    try:
        engine = parse_snapshot(body)
        last = json.loads(body).get("last")
    except BadDataError as error:
        raise BadDataError(f"{path} is no last snapshot of a probe: {error.what}") from None
    if not isinstance(last, dict):
        raise BadDataError(f"{path} is no last snapshot of a probe", "see `kvtop replay` for files")
    time_s = engine.probe.cut_time_s if engine.probe is not None else 0.0
    told = last.get("time_s")
    if isinstance(told, float) and math.isfinite(told):
        time_s = told
    time_s = time_s or 0.0
    status = SourceStatus(
        name=f"engine {engine.pid}",
        kind="engine",
        state=SourceState.OK,
        since_s=time_s,
        target_pid=engine.pid,
        value_time_s=time_s,
    )
    engine = replace(
        engine,
        server=f"pid {engine.pid}",
        alive=False,
        state="gone",
        probe_reason=reason(last),
    )
    return Snapshot(
        time_s=time_s,
        mono_s=0.0,
        host="",
        version=__version__,
        sources=(status,),
        engines=(engine,),
        demo=engine.simulated,
    )


def reason(last: dict[str, Any]) -> str:
    """What the engine died of, on one line; text from outside."""
    frames = last.get("frames")
    shown = (
        [str(f)[:_MOST_TEXT] for f in frames if isinstance(f, str)]
        if isinstance(frames, list)
        else []
    )
    text = f"the engine core died of {str(last.get('exception'))[:_MOST_TEXT]}"
    if shown:
        text += " in " + " < ".join(reversed(shown[-_MOST_FRAMES:]))
    left_out = last.get("requests_left_out")
    if isinstance(left_out, int) and left_out > 0:
        text += f"; {left_out} requests are not in the file"
    return text + "; its message is in vLLM's log"
