from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.draw.ansi import Colours, colours_of, frame, paint, update
from kvtop.draw.style import STYLES, resolve
from kvtop.draw.text import char_width, fit
from kvtop.draw.view import Line

STYLE_NAMES = [*STYLES, "map:US", "map:.-", "map:LG"]
WIDTH, HEIGHT = 12, 3

texts = st.lists(st.sampled_from(["a", "b", " ", "宽", "│", "▀", "e\u0301"]), max_size=8).map(
    "".join
)
lines = st.lists(st.tuples(texts, st.sampled_from(STYLE_NAMES)), max_size=4).map(
    lambda runs: fit(runs, WIDTH)
)
screens = st.lists(lines, min_size=HEIGHT, max_size=HEIGHT)


class Terminal:
    """As much of a terminal as the escape sequences of this module need."""

    def __init__(self) -> None:
        self.cells = [[(" ", "")] * WIDTH for _ in range(HEIGHT)]
        self.x = self.y = 0
        self.sgr: dict[str, str] = {}

    def feed(self, text: str) -> None:
        for match in re.finditer(r"\x1b\[([0-9;]*)([A-Za-z])|(.)", text, re.DOTALL):
            numbers, letter, char = match.groups()
            if letter == "H":
                self.y, self.x = (int(part) - 1 for part in numbers.split(";"))
            elif letter == "m":
                self._sgr([int(part or 0) for part in numbers.split(";")])
            elif letter:
                raise AssertionError(f"unexpected sequence {match.group()!r}")
            else:
                self._put(char)

    def _sgr(self, codes: list[int]) -> None:
        at = 0
        while at < len(codes):
            code = codes[at]
            if code == 0:
                self.sgr = {}
            elif code in (38, 48):
                assert codes[at + 1] == 5
                self.sgr["fg" if code == 38 else "bg"] = f"i{codes[at + 2]}"
                at += 2
            elif code in (39, 49):
                self.sgr.pop("fg" if code == 39 else "bg", None)
            elif 30 <= code < 38 or 90 <= code < 98:
                self.sgr["fg"] = str(code)
            elif 40 <= code < 48 or 100 <= code < 108:
                self.sgr["bg"] = str(code - 10)
            else:
                self.sgr[str(code)] = "on"
            at += 1

    def _put(self, char: str) -> None:
        style = str(sorted(self.sgr.items()))
        width = char_width(char)
        row = self.cells[self.y]
        if width == 0:
            back = 1 if row[self.x - 1][0] else 2
            row[self.x - back] = (row[self.x - back][0] + char, row[self.x - back][1])
            return
        row[self.x] = (char, style)
        if width == 2:
            row[self.x + 1] = ("", style)
        self.x += width


def shown(text: str) -> list[list[tuple[str, str]]]:
    terminal = Terminal()
    terminal.feed(text)
    return terminal.cells


@given(old=screens, new=screens, colours=st.sampled_from(list(Colours)))
def test_an_update_leads_to_the_same_screen_as_a_whole_frame(
    old: Sequence[Line], new: Sequence[Line], colours: Colours
) -> None:
    terminal = Terminal()
    terminal.feed(frame(old, colours))
    terminal.feed(update(old, new, colours))
    assert terminal.cells == shown(frame(new, colours))
    assert terminal.sgr == {}


@given(old=screens, new=screens)
def test_an_update_never_costs_much_more_than_a_whole_frame(
    old: Sequence[Line], new: Sequence[Line]
) -> None:
    whole = len(frame(new, Colours.FULL))
    assert len(update(old, new, Colours.FULL)) <= whole + 20 * HEIGHT


def test_equal_screens_cost_nothing() -> None:
    lines = [fit((("a", "ok"),), WIDTH)] * HEIGHT
    assert update(lines, [fit((("a", "ok"),), WIDTH)] * HEIGHT, Colours.FULL) == ""


def test_only_the_changed_cells_are_sent() -> None:
    old = [fit((("12:04:51", ""),), WIDTH)]
    new = [fit((("12:04:52", ""),), WIDTH)]
    assert update(old, new, Colours.FULL) == "\x1b[0m\x1b[1;8H2\x1b[0m"


def test_colours_are_sent_once_for_neighbours_of_one_style() -> None:
    line: Line = (("ab", "state.used"), ("cd", "state.used"))
    text = paint([line], Colours.FULL)
    assert text.count("\x1b[") == 2
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == "abcd"


@pytest.mark.parametrize("name", STYLE_NAMES)
def test_no_colour_keeps_only_attributes(name: str) -> None:
    text = paint([(("x", name),)], Colours.NONE)
    codes = {int(c) for part in re.findall(r"\x1b\[([0-9;]*)m", text) for c in part.split(";") if c}
    assert codes <= {0, 1, 2, 4, 7}
    assert (7 in codes) == resolve(name).reverse


def test_sixteen_colours_are_the_basic_codes() -> None:
    assert paint([(("x", "state.used"),)], Colours.BASIC) == "\x1b[32mx\x1b[m"
    assert paint([(("x", "map:SG"),)], Colours.BASIC) == "\x1b[96;101mx\x1b[m"


@pytest.mark.parametrize(
    ("environ", "colours"),
    [
        ({"TERM": "xterm-256color"}, Colours.FULL),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, Colours.FULL),
        ({"TERM": "xterm"}, Colours.BASIC),
        ({"TERM": "linux"}, Colours.BASIC),
        ({"TERM": "vt100"}, Colours.NONE),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, Colours.NONE),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, Colours.FULL),
        ({}, Colours.BASIC),
    ],
)
def test_what_the_environment_says(environ: dict[str, str], colours: Colours) -> None:
    assert colours_of(environ) is colours
