"""The one table of keys: bindings, footer, help and README all come from it.

Keys are named as `name_of` gives them: the character itself where there is one
(`/`, `?`, `I`), else Textual's name (`tab`, `pageup`, `f10`, `ctrl+c`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.draw.view import Line, View


@dataclass(frozen=True, slots=True)
class Binding:
    """Keys that do the same thing."""

    keys: tuple[str, ...]
    """Names of the keys; the first one is shown in the footer."""
    action: str
    """Name of the action in `ui.controller`."""
    help: str
    """What it does, one line of help."""
    short: str = ""
    """Its label in the footer. Empty: not in the footer."""
    group: str = "Screen"
    """Heading in the help."""


KEYS: tuple[Binding, ...] = (
    Binding(("tab",), "focus_next", "go to the next panel", "panel", "Move"),
    Binding(("shift+tab",), "focus_previous", "go to the panel before", "", "Move"),
    Binding(("up", "k"), "up", "one row up", "", "Move"),
    Binding(("down", "j"), "down", "one row down", "", "Move"),
    Binding(("pageup",), "page_up", "one page up", "", "Move"),
    Binding(("pagedown",), "page_down", "one page down", "", "Move"),
    Binding(("home",), "first", "to the first row", "", "Move"),
    Binding(("end",), "last", "to the last row", "", "Move"),
    Binding(
        ("enter",),
        "open",
        "open the request and light its blocks; zoom other panels",
        "detail",
        "Look closer",
    ),
    Binding(
        ("z",), "zoom", "give the focused panel the whole screen, and back", "zoom", "Look closer"
    ),
    Binding(("escape",), "back", "close what is open, one thing at a time", "", "Look closer"),
    Binding(("/",), "search", "search request ids and states; esc clears", "search", "Requests"),
    Binding(("f6", ">"), "sort_next", "sort by the next column", "sort", "Requests"),
    Binding(("<",), "sort_previous", "sort by the column before", "", "Requests"),
    Binding(("I",), "invert", "turn the sort order round", "", "Requests"),
    Binding(("e",), "engine", "show the next engine", "engine", "Show"),
    Binding(("g",), "gpu", "show the next GPU", "gpu", "Show"),
    Binding(("t",), "stacks", "top frames on and off; while off, no sampling", "frames", "Show"),
    Binding(("p",), "process", "top frames of all processes, or of one", "", "Show"),
    Binding(
        ("f",),
        "flame",
        "flame graph of 30 s into this folder; again: cancel",
        "flame",
        "Show",
    ),
    Binding(("F",), "flame_view", "look at the last flame graph", "", "Show"),
    Binding(
        ("s",),
        "sources",
        "every source: its state, why, and what to do",
        "sources",
        "Show",
    ),
    Binding(
        ("w",), "findings", "what is wrong; enter tells all, lights its blocks", "wrong", "Show"
    ),
    Binding(("b",), "baseline", "pin this moment, and show what changes; again: clear", "", "Show"),
    Binding(("a",), "attach", "put the probe into this engine, after a question", "", "Show"),
    Binding(("X",), "abort", "abort this request after a question (--allow-actions)", "", "Act"),
    Binding(
        ("C",),
        "reset_cache",
        "reset the prefix cache after a question (--allow-actions)",
        "",
        "Act",
    ),
    Binding(("R",), "record", "start and stop a recording in this folder", "record", "Sessions"),
    Binding(("m",), "mark", "a marker with a note in the recording", "", "Sessions"),
    Binding(("B",), "blackbox", "write the black box (--blackbox) out now", "", "Sessions"),
    Binding(("[",), "play_slower", "play slower", "slower", "Replay"),
    Binding(("]",), "play_faster", "play faster", "faster", "Replay"),
    Binding((",",), "step_back", "one tick back", "prev", "Replay"),
    Binding((".",), "step_on", "one tick on", "next", "Replay"),
    Binding((":",), "seek", "go to a typed time, share or distance", "go to", "Replay"),
    Binding(("n",), "event_next", "to the next event", "event", "Replay"),
    Binding(("N",), "event_previous", "to the event before", "", "Replay"),
    Binding(("E",), "event_kind", "which events: any, markers, findings, ...", "", "Replay"),
    Binding(("space",), "pause", "freeze the screen, and go on; play and pause", "pause", "Screen"),
    Binding(("+", "="), "faster", "look more often (down to 0.25 s)", "", "Screen"),
    Binding(("-",), "slower", "look less often (up to 10 s)", "", "Screen"),
    Binding(("h", "?", "f1"), "help", "this help", "help", "Screen"),
    Binding(("ctrl+l",), "redraw", "draw the whole screen again", "", "Screen"),
    Binding(("ctrl+z",), "suspend", "back to the shell; `fg` returns", "", "Screen"),
    Binding(("q", "f10", "ctrl+c"), "quit", "quit", "quit", "Screen"),
)
"""Every key of the main screen."""

_FOOTER = (
    "help",
    "quit",
    "open",
    "findings",
    "search",
    "sort_next",
    "focus_next",
    "zoom",
    "pause",
    "record",
)
_FOOTER_REPLAY = (
    "help",
    "quit",
    "pause",
    "step_back",
    "step_on",
    "play_slower",
    "play_faster",
    "seek",
    "event_next",
    "findings",
    "open",
)
_SHOWN = {
    "space": "Space",
    "escape": "Esc",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "shift+tab": "Shift-Tab",
    "ctrl+c": "Ctrl-C",
    "ctrl+l": "Ctrl-L",
    "ctrl+z": "Ctrl-Z",
}
_BY_KEY = {key: binding.action for binding in KEYS for key in binding.keys}


def action_of(key: str) -> str | None:
    """The action of a key. None: the key does nothing."""
    return _BY_KEY.get(key)


def name_of(key: str, character: str | None) -> str:
    """The name of a key press in this table.

    Args:
        key: Textual's name of the key.
        character: What it types. None: nothing.
    """
    if character is not None and character.isprintable() and character != " ":
        return character
    return key


def shown(key: str) -> str:
    """A key as people write it: `PgUp`, `F10`, `/`."""
    if key in _SHOWN:
        return _SHOWN[key]
    return key if len(key) == 1 else key.capitalize()


def footer_keys(view: View) -> list[tuple[str, str]]:
    """Keys and labels for the last line, the most important first, by what is open."""
    if view.search_open:
        return [("Esc", "clear"), ("Enter", "keep")]
    if view.dialog is not None:
        return [("Esc", "close")]
    first = _FOOTER if view.player is None else _FOOTER_REPLAY
    bindings = [binding for action in first for binding in KEYS if binding.action == action]
    hidden = "Replay" if view.player is None else "Sessions"
    bindings += [
        binding
        for binding in KEYS
        if binding.short and binding not in bindings and binding.group != hidden
    ]
    keys = [(shown(binding.keys[0]), binding.short) for binding in bindings]
    if view.focus != "requests":
        keys = [(key, "zoom" if label == "detail" else label) for key, label in keys]
    if view.detail is not None or view.zoom:
        keys.insert(0, ("Esc", "back"))
    return keys


def help_lines() -> tuple[Line, ...]:
    """The help, grouped, one binding a line."""
    names = {binding: " ".join(shown(key) for key in binding.keys) for binding in KEYS}
    width = max(len(name) for name in names.values())
    lines: list[Line] = []
    for group in dict.fromkeys(binding.group for binding in KEYS):
        if lines:
            lines.append(())
        lines.append(((group, "title"),))
        lines.extend(
            ((f"  {name:<{width}}  ", "key"), (binding.help, ""))
            for binding, name in names.items()
            if binding.group == group
        )
    lines.append(())
    lines.append((("  The mouse works too: click a panel or a row, turn the wheel.", "dim"),))
    return tuple(lines)


def markdown() -> str:
    """The table of keys for the README."""
    rows = ["| Key | What it does |", "|---|---|"]
    for binding in KEYS:
        keys = " ".join(f"`{shown(key)}`" for key in binding.keys)
        rows.append(f"| {keys} | {binding.help} |")
    return "\n".join(rows) + "\n"
