"""Keys that change an engine: what may be asked, and the question; pure like the controller."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from kvtop.draw.pick import engine_of
from kvtop.draw.text import visible, wrap
from kvtop.draw.view import Dialog, Line, View
from kvtop.model.snapshot import Engine, Phase, Request
from kvtop.ui.effects import Act, Result
from kvtop.ui.moves import Here, chosen

NOT_ALLOWED = "this changes the engine: start kvtop with --allow-actions to be able to"
"""Said without the option."""
IN_REPLAY = "this is a recording: there is nothing to act on"
"""Said in a replay."""
IN_DEMO = "DEMO: the engine is simulated, there is nothing to act on"
"""Said in the demo."""
_CELLS = 70
_MOST_ID = 60
# vLLM adds eight characters to the id that a client gave (0.14 and newer:
# vllm/v1/engine/input_processor.py), which its HTTP route wants without them.
_ADDED = re.compile(r"(.+)-[0-9a-f]{8}")

Action = Callable[[View, Here], Result]


def _target(view: View, here: Here) -> Engine | str:
    """The engine to act on; or why no action is possible here, whatever it is."""
    engine = engine_of(here.snap, view) if here.snap is not None else None
    if view.player is not None:
        return IN_REPLAY
    if here.snap is not None and here.snap.demo:
        return IN_DEMO
    if not view.allow_actions:
        return NOT_ALLOWED
    if engine is None:
        return "there is no engine to act on"
    if not engine.alive:
        return "this engine's process is gone"
    if engine.pid is None:
        return "this engine's process is not on this machine"
    return engine


def _abort(view: View, here: Here) -> Result:
    engine = _target(view, here)
    if isinstance(engine, str):
        return replace(view, message=engine), None
    if engine.requests is None:
        return replace(view, message="the requests are not known: there is no probe"), None
    request = _selected(view, here, engine)
    if request is None:
        return replace(view, message="no request is selected"), None
    if request.phase is Phase.HELD:
        text = "this request is finished or parked already: there is nothing to abort"
        return replace(view, message=text), None
    return view, Act("abort", engine, request, _client_ids(request, here))


def _reset(view: View, here: Here) -> Result:
    engine = _target(view, here)
    if isinstance(engine, str):
        return replace(view, message=engine), None
    if engine.prefix_caching is False:
        return replace(view, message="prefix caching is off in this engine"), None
    return view, Act("reset", engine)


def _selected(view: View, here: Here, engine: Engine) -> Request | None:
    """The request that is open, else the one under the cursor."""
    if view.detail is None:
        return chosen(view, here.snap)
    rows = engine.requests or ()
    return next((r for r in rows if r.id == view.detail.request_id), None)


def _client_ids(request: Request, here: Here) -> tuple[str, ...]:
    """Ids by which its client may know it, where no other request goes by the same."""
    added = _ADDED.fullmatch(request.id)
    if added is None:
        return (request.id,)
    engines = here.snap.engines if here.snap is not None else ()
    others = [r.id for e in engines for r in e.requests or () if r.id != request.id]
    if any(name == added[1] or name.startswith(added[1] + "-") for name in others):
        return ()
    return (added[1],)


def shown_id(request_id: str) -> str:
    """A request id in a sentence: text from outside."""
    text = visible(request_id[: _MOST_ID + 1])
    return text if len(text) <= _MOST_ID else text[:_MOST_ID] + "..."


def question(act: Act, way: str, engines: int, *, recording: bool, token: str) -> Dialog:
    """The question that says exactly what will happen.

    Args:
        act: What was asked for.
        way: How it would be done, one phrase.
        engines: Engines of the server.
        recording: Whether a marker can be written.
        token: Comes back with the answer.
    """
    engine = act.engine
    note = (
        "A marker is written into the running recording."
        if recording
        else "No recording runs (key R): it is only noted in the shell when kvtop ends."
    )
    if act.request is not None:
        request = act.request
        texts = [
            f"Abort the request {shown_id(request.id)} of {visible(engine.server)}"
            f" (engine pid {engine.pid})?",
            _state_of(request),
            'Its client gets what there is so far with finish_reason "abort"; its blocks go'
            " back to the pool, but for those that others share. All other requests go on."
            " This cannot be undone.",
        ]
        title = "Abort one request"
    else:
        many = f"all {engines} engines" if engines > 1 else "the engine"
        counts = engine.blocks
        cached = "Its cached blocks" if counts is None else f"Its {counts.cached} cached blocks"
        live = sum(r.phase is not Phase.HELD for r in engine.requests or ())
        texts = [
            f"Reset the prefix cache of {many} of {visible(engine.server)}"
            f" (engine pid {engine.pid})?",
            f"{cached} become free blocks: the next prompts find no prefix and are computed in"
            " full. Requests go on and no answer changes.",
            "vLLM refuses while any block is in use"
            + (f", as now: {live} requests are there." if live else "."),
        ]
        title = "Reset the prefix cache"
    texts += [f"By vLLM's own means. {way[:1].upper()}{way[1:]}.", note]
    lines: list[Line] = []
    for text in texts:
        lines += [((part, ""),) for part in wrap(text, _CELLS)]
        lines.append(())
    return Dialog("danger", title, tuple(lines[:-1]), f"act {token}")


def _state_of(request: Request) -> str:
    blocks = "-" if request.blocks is None else str(request.blocks)
    shared = f", {request.shared_blocks} of them shared" if request.shared_blocks else ""
    tokens = "-" if request.output_tokens is None else str(request.output_tokens)
    return f"It is {visible(request.status)}, has {blocks} blocks{shared}, and {tokens} tokens out."


ACTIONS: dict[str, Action] = {"abort": _abort, "reset_cache": _reset}
"""What each action of `ui.keys` does."""
