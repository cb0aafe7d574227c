"""What the keys of findings, recordings, replays and attaching do; pure like the controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvtop.draw.findings import cursor_row, key_of
from kvtop.draw.pick import engine_of
from kvtop.draw.text import wrap
from kvtop.draw.view import Baseline, Dialog, Line, View
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Finding
from kvtop.ui.effects import Play, Record, Result, WriteBlackBox
from kvtop.ui.moves import STEPS, Here, at, in_sight

EVENT_KINDS = ("any", "marker", "finding", "preemption", "restart", "stacks")
"""Kinds of events that the keys of a replay can jump to."""
IN_REPLAY = "this is a recording already"
"""Said where a key only makes sense live."""
NO_STACKS = "no flame graph was recorded up to this moment"
"""Said in a replay without captured stacks."""
ONLY_REPLAY = "only a replay can do that: kvtop replay FILE"
"""Said where a key only makes sense in a replay."""
_DIALOG_CELLS = 70

Action = Callable[[View, Here], Result]


# Findings.


def _findings(view: View, _here: Here) -> Result:
    return replace(view, dialog=Dialog("findings", "What is wrong")), None


def in_findings(view: View, action: str | None, here: Here) -> Result | None:
    """What an action does in the list of findings. None: nothing of its own."""
    rows = view.findings
    if action in STEPS and rows:
        step, pages = STEPS[action]
        row = cursor_row(view) + step + pages * max(here.size[1] - 8, 1)
        chosen = rows[min(max(row, 0), len(rows) - 1)]
        return replace(view, finding_key=key_of(chosen)), None
    if action == "open" and rows:
        return _open_finding(view, rows[cursor_row(view)], here), None
    return None


def explanation_of(rule: str) -> tuple[str, ...]:
    """What a rule means, a paragraph an item; empty for a rule that is not known."""
    # Imported when a finding is opened: the first key press need not wait for all rules.
    from kvtop.detect.diagnosis import MEANING, NAMES
    from kvtop.detect.rules import BY_NAME

    if rule in NAMES:
        return (MEANING,)
    found = BY_NAME.get(rule)
    return () if found is None else (found.explanation,)


def _open_finding(view: View, finding: Finding, here: Here) -> View:
    """The finding in full; behind it its blocks are lit and the cursor is on its request."""
    lines: tuple[Line, ...] = tuple(((text, ""),) for text in explanation_of(finding.rule))
    view = replace(
        view,
        dialog=Dialog("finding", finding.rule, lines),
        finding=finding,
        finding_key=key_of(finding),
        scroll=at(view, "dialog", 0),
        lit_blocks=frozenset(finding.block_ids),
        detail=None,
    )
    engines = here.snap.engines if here.snap is not None else ()
    index = next((i for i, e in enumerate(engines) if e.pid == finding.engine_pid), None)
    if index is None or finding.engine_pid is None:
        return view
    rows = {request.id for request in engines[index].requests or ()}
    cursor = next((name for name in finding.request_ids if name in rows), view.cursor_id)
    # A search could hide the very request.
    search = "" if cursor in finding.request_ids else view.search
    return in_sight(replace(view, engine=index, cursor_id=cursor, search=search), here)


# Recording.


def _record(view: View, _here: Here) -> Result:
    if view.player is not None:
        return replace(view, message=IN_REPLAY), None
    return view, Record()


def _mark(view: View, _here: Here) -> Result:
    if view.player is not None:
        return replace(view, message=IN_REPLAY), None
    if not view.recording:
        return replace(view, message="nothing is recorded; R starts a recording"), None
    lines = _paragraph("A note for this moment; it may be empty.")
    return replace(view, dialog=Dialog("input", "Marker", lines, "marker")), None


def _blackbox(view: View, _here: Here) -> Result:
    if view.player is not None:
        return replace(view, message=IN_REPLAY), None
    return view, WriteBlackBox()


# Comparing.


def _baseline(view: View, here: Here) -> Result:
    if view.baseline is not None:
        return replace(view, baseline=None, message="the baseline is cleared"), None
    if here.snap is None:
        return view, None
    counts = {engine_key(e): e.blocks for e in here.snap.engines if e.blocks is not None}
    if not counts:
        return replace(view, message="no block counts here to compare with"), None
    base = Baseline(here.snap.time_s, counts)
    return replace(view, baseline=base, message="this moment is the baseline; b clears it"), None


# Attaching.


def _attach(view: View, here: Here) -> Result:
    engine = engine_of(here.snap, view) if here.snap is not None else None
    if view.player is not None:
        return replace(view, message=IN_REPLAY), None
    if engine is None:
        return replace(view, message="there is no engine to attach to"), None
    if engine.probe is not None:
        return replace(view, message="a probe is in this engine already"), None
    if engine.pid is None or not engine.alive:
        text = "its process is not on this machine" if engine.alive else "its process is gone"
        return replace(view, message=f"cannot attach: {text}"), None
    lines = _paragraph(
        f"Put the probe into the processes of {engine.server} (engine pid {engine.pid})?",
        "Code of kvtop is run inside them: it reads vLLM's block pool and request lists between"
        " two scheduler steps, and answers on a socket that only this user can open. Each"
        " process stands still for some milliseconds while it is put in.",
        "It stays until `kvtop detach` or the end of the process. Nothing of vLLM's own"
        " state is changed.",
    )
    dialog = Dialog("confirm", "Attach the probe", lines, f"attach {engine.pid}")
    return replace(view, dialog=dialog, scroll=at(view, "dialog", 0)), None


def _paragraph(*texts: str) -> tuple[Line, ...]:
    lines: list[Line] = []
    for text in texts:
        if lines:
            lines.append(())
        lines += [((line, ""),) for line in wrap(text, _DIALOG_CELLS)]
    return tuple(lines)


# Replaying.


def _play(what: str, number: int = 0) -> Action:
    def action(view: View, _here: Here) -> Result:
        if view.player is None:
            return replace(view, message=ONLY_REPLAY), None
        return view, Play(what, number)

    return action


def _seek(view: View, _here: Here) -> Result:
    if view.player is None:
        return replace(view, message=ONLY_REPLAY), None
    lines = _paragraph("12:04:51, 50%, +90s from the start, -30s from the end")
    return replace(view, dialog=Dialog("input", "Go to", lines, "seek")), None


ACTIONS: dict[str, Action] = {
    "findings": _findings,
    "record": _record,
    "mark": _mark,
    "blackbox": _blackbox,
    "baseline": _baseline,
    "attach": _attach,
    "play_slower": _play("slower"),
    "play_faster": _play("faster"),
    "step_back": _play("step", -1),
    "step_on": _play("step", 1),
    "event_next": _play("event", 1),
    "event_previous": _play("event", -1),
    "event_kind": _play("kind"),
    "seek": _seek,
}
"""What each action of `ui.keys` does."""
