"""What each key does: pure, so it is tested without a terminal.

`press` takes what is on screen and a key, and gives what is on screen then, and at
most one thing that somebody else has to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvtop.draw.dialog import dialog_lines, dialog_page, dialog_rect, finding_lines
from kvtop.draw.layout import focusable
from kvtop.draw.pick import engine_of
from kvtop.draw.requests import COLUMNS
from kvtop.draw.status import sources_panel
from kvtop.draw.view import Detail, Dialog, View
from kvtop.model.snapshot import Snapshot
from kvtop.ui.act_keys import ACTIONS as ACT_ACTIONS
from kvtop.ui.effects import (
    Answer,
    FetchDetail,
    Play,
    Quit,
    Redraw,
    Result,
    SetInterval,
    SetStacks,
    Suspend,
)
from kvtop.ui.flame_keys import ACTIONS as FLAME_ACTIONS
from kvtop.ui.keys import action_of, help_lines
from kvtop.ui.moves import STEPS, Here, at, chosen, move_panel, scrolled
from kvtop.ui.session_keys import ACTIONS as SESSION_ACTIONS
from kvtop.ui.session_keys import in_findings

INTERVALS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0)
"""The steps that + and - go through."""
MAX_SEARCH = 200
"""Characters of a search text or an input; more are not taken."""
_MOST_SOURCE_LINES = 500


def press(
    view: View,
    key: str,
    snap: Snapshot | None,
    size: tuple[int, int] = (80, 24),
    character: str | None = None,
) -> Result:
    """What a key does.

    Args:
        view: What is on screen.
        key: Its name, see `ui.keys`.
        snap: What is shown. None: nothing yet.
        size: Columns and rows of the terminal.
        character: What the key types, where text is typed. None: the key itself if it is
            one character.
    """
    here = Here(snap, size)
    if key in ("ctrl+c", "f10"):
        return view, Quit()
    if view.dialog is not None:
        return _in_dialog(view, view.dialog, key, here, character)
    if view.search_open:
        return _in_search(view, key, character)
    action = action_of(key)
    if action is None:
        return view, None
    return ACTIONS[action](replace(view, message=""), here)


# What is typed while something is open.


def _typed(text: str, key: str, character: str | None) -> str | None:
    """The text after a key of an input line. None: the key does not edit."""
    if key == "backspace":
        return text[:-1]
    if key == "ctrl+u":
        return ""
    char = " " if key == "space" else character or (key if len(key) == 1 else "")
    if len(char) == 1 and char.isprintable():
        return (text + char)[:MAX_SEARCH]
    return None


def _in_search(view: View, key: str, character: str | None) -> Result:
    if key == "escape":
        return replace(view, search="", search_open=False, scroll=at(view, "requests", 0)), None
    if key == "enter":
        return replace(view, search_open=False), None
    text = _typed(view.search, key, character)
    if text is None or text == view.search:
        return view, None
    return replace(view, search=text, scroll=at(view, "requests", 0)), None


def _in_dialog(view: View, dialog: Dialog, key: str, here: Here, character: str | None) -> Result:
    closed = replace(view, dialog=None, scroll=at(view, _scroll_key(dialog), 0))
    if dialog.kind == "input":
        if key == "enter":
            return closed, Answer(dialog.action, dialog.value)
        text = _typed(dialog.value, key, character)
        if text is not None:
            return replace(view, dialog=replace(dialog, value=text)), None
        return (closed, None) if key == "escape" else (view, None)
    if dialog.kind == "confirm":
        if key in ("y", "enter"):
            return closed, Answer(dialog.action, "")
        return (closed, None) if key in ("n", "q", "escape") else (view, None)
    if dialog.kind == "danger":
        # The answer is no unless it is spelled out.
        if key == "y":
            return closed, Answer(dialog.action, "")
        if key in ("n", "q", "escape", "enter"):
            return closed, None
    action = action_of(key)
    if dialog.kind == "findings" and (result := in_findings(view, action, here)) is not None:
        return result
    if dialog.kind != "danger" and action in _CLOSING:
        return closed, None
    if action in STEPS:
        page = dialog_page(dialog, *here.size)
        lines = len(dialog_lines(dialog, here.size[0]))
        if dialog.kind == "sources":
            lines = _source_lines(view, dialog, here)
        elif dialog.kind == "finding" and here.snap is not None:
            inner = max(dialog_rect(dialog, *here.size).width - 4, 0)
            lines = len(finding_lines(here.snap, view, inner))
        return scrolled(view, _scroll_key(dialog), STEPS[action], page, lines), None
    return view, None


_CLOSING = ("back", "quit", "help", "sources", "findings", "open")


def _scroll_key(dialog: Dialog) -> str:
    return "sources" if dialog.kind == "sources" else "dialog"


def _source_lines(view: View, dialog: Dialog, here: Here) -> int:
    """Lines of the list of sources, drawn as it will be, without the blank ones at its end."""
    if here.snap is None:
        return 0
    width = dialog_rect(dialog, *here.size).width - 4
    shown = replace(view, scroll={})
    lines = sources_panel(here.snap, shown, max(width, 0), _MOST_SOURCE_LINES)
    used = [row for row, line in enumerate(lines) if "".join(text for text, _ in line).strip()]
    return used[-1] + 1 if used else 0


# Moving.


def _move(step: tuple[int, int]) -> Callable[[View, Here], Result]:
    def action(view: View, here: Here) -> Result:
        panel = "detail" if view.detail is not None and view.focus == "requests" else view.focus
        return move_panel(view, here, panel, step), None

    return action


def _focus(by: int) -> Callable[[View, Here], Result]:
    def action(view: View, _here: Here) -> Result:
        names = focusable(view)
        place = names.index(view.focus) if view.focus in names else 0
        return replace(view, focus=names[(place + by) % len(names)]), None

    return action


# Opening and closing.


def _open(view: View, here: Here) -> Result:
    if view.focus != "requests":
        return replace(view, zoom=not view.zoom), None
    return open_request(view, here)


def open_request(view: View, here: Here) -> Result:
    """Open the request under the cursor."""
    engine = engine_of(here.snap, view) if here.snap is not None else None
    request = chosen(view, here.snap)
    if engine is None or request is None:
        return replace(view, message="no request to open"), None
    opened = replace(
        view,
        cursor_id=request.id,
        detail=Detail(request.id),
        lit_blocks=frozenset(),
        scroll=at(view, "detail", 0),
    )
    return opened, FetchDetail(engine, request.id)


def _back(view: View, _here: Here) -> Result:
    if view.zoom:
        return replace(view, zoom=False), None
    if view.detail is not None:
        return replace(view, detail=None, lit_blocks=frozenset()), None
    if view.lit_blocks:
        return replace(view, lit_blocks=frozenset()), None
    if view.search:
        return replace(view, search="", scroll=at(view, "requests", 0)), None
    return view, None


def _zoom(view: View, _here: Here) -> Result:
    return replace(view, zoom=not view.zoom), None


def _search(view: View, _here: Here) -> Result:
    return replace(
        view, search_open=True, focus="requests", detail=None, lit_blocks=frozenset()
    ), None


def _help(view: View, _here: Here) -> Result:
    dialog = Dialog("help", "Keys", help_lines())
    return replace(view, dialog=dialog, scroll=at(view, "dialog", 0)), None


def _sources(view: View, _here: Here) -> Result:
    return replace(view, dialog=Dialog("sources", "Sources"), scroll=at(view, "sources", 0)), None


# Choosing.


def _sort(by: int) -> Callable[[View, Here], Result]:
    def action(view: View, _here: Here) -> Result:
        place = COLUMNS.index(view.sort) if view.sort in COLUMNS else 0
        name = COLUMNS[(place + by) % len(COLUMNS)]
        return replace(
            view, sort=name, scroll=at(view, "requests", 0), message=f"sorted by {name}"
        ), None

    return action


def _invert(view: View, _here: Here) -> Result:
    order = "smallest first" if view.reverse else "largest first"
    return replace(view, reverse=not view.reverse, message=f"{view.sort}: {order}"), None


def _engine(view: View, here: Here) -> Result:
    count = len(here.snap.engines) if here.snap else 0
    if count < 2:
        return replace(view, message="there is no other engine"), None
    return replace(
        view,
        engine=(view.engine + 1) % count,
        cursor_id=None,
        detail=None,
        lit_blocks=frozenset(),
        scroll={},
    ), None


def _gpu(view: View, here: Here) -> Result:
    count = len(here.snap.gpus) if here.snap else 0
    if count < 2:
        return replace(view, message="there is no other GPU"), None
    return replace(view, gpu=(view.gpu + 1) % count, scroll=at(view, "gpu", 0)), None


def _stacks(view: View, _here: Here) -> Result:
    shown = not view.stacks_on
    focus = "requests" if view.focus == "stacks" and not shown else view.focus
    return replace(view, stacks_on=shown, focus=focus), SetStacks(shown)


def _pause(view: View, _here: Here) -> Result:
    if view.player is not None:
        return view, Play("toggle")
    return replace(view, paused=not view.paused), None


def _faster(view: View, _here: Here) -> Result:
    if view.player is not None:
        return view, Play("faster")
    return _interval(view, max((s for s in INTERVALS_S if s < view.interval_s), default=None))


def _slower(view: View, _here: Here) -> Result:
    if view.player is not None:
        return view, Play("slower")
    return _interval(view, min((s for s in INTERVALS_S if s > view.interval_s), default=None))


def _interval(view: View, seconds: float | None) -> Result:
    if seconds is None:
        return replace(view, message=f"every {view.interval_s:g} s is the limit"), None
    return replace(view, interval_s=seconds, message=f"every {seconds:g} s"), SetInterval(seconds)


def _quit(view: View, _here: Here) -> Result:
    return view, Quit()


def _redraw(view: View, _here: Here) -> Result:
    return view, Redraw()


def _suspend(view: View, _here: Here) -> Result:
    return view, Suspend()


ACTIONS: dict[str, Callable[[View, Here], Result]] = {
    **{name: _move(step) for name, step in STEPS.items()},
    "focus_next": _focus(1),
    "focus_previous": _focus(-1),
    "open": _open,
    "zoom": _zoom,
    "back": _back,
    "search": _search,
    "sort_next": _sort(1),
    "sort_previous": _sort(-1),
    "invert": _invert,
    "engine": _engine,
    "gpu": _gpu,
    "stacks": _stacks,
    "sources": _sources,
    "pause": _pause,
    "faster": _faster,
    "slower": _slower,
    "help": _help,
    "redraw": _redraw,
    "suspend": _suspend,
    "quit": _quit,
    **ACT_ACTIONS,
    **SESSION_ACTIONS,
    **FLAME_ACTIONS,
}
"""What each action of `ui.keys` does."""
