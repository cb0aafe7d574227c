"""The one widget: shows lines, and sends the terminal only the cells that changed.

Textual repaints a widget's lines from their start and resets the style after each
run, which on the block map costs more than half of the bytes, and it paints the whole
screen three times while it starts. So on a real terminal frames are written as
differences to what stands there, past its compositor; without one (tests, exports)
the same lines are given to Textual as strips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvtop.draw.ansi import Colours, frame, update
from kvtop.draw.style import resolve
from kvtop.draw.text import line_width
from kvtop.draw.view import Line
from kvtop.ui.driver import TerminalDriver


@lru_cache(maxsize=1024)
def rich_style(name: str, colours: Colours) -> Style:
    """A style of `draw.style` as Rich knows it."""
    spec = resolve(name)
    fg = bg = None
    if colours is Colours.FULL:
        fg = Color.from_ansi(spec.fg.index) if spec.fg else None
        bg = Color.from_ansi(spec.bg.index) if spec.bg else None
    elif colours is Colours.BASIC:
        fg = Color.from_ansi(spec.fg.basic) if spec.fg else None
        bg = Color.from_ansi(spec.bg.basic) if spec.bg else None
    return Style(
        color=fg,
        bgcolor=bg,
        bold=spec.bold or None,
        dim=spec.dim or None,
        underline=spec.underline or None,
        reverse=spec.reverse or None,
    )


class Canvas(Widget, can_focus=True, inherit_bindings=False):
    """Lines on the screen.

    Args:
        colours: What the terminal can show.
        on_size: Called when the size has changed, to be given lines of the new one.
        there: Lines that the terminal shows already.
    """

    ALLOW_SELECT = False

    def __init__(
        self, colours: Colours, on_size: Callable[[], None], there: Sequence[Line] = ()
    ) -> None:
        super().__init__()
        self._colours = colours
        self._on_size = on_size
        self._there = there
        self._lines: Sequence[Line] = ()
        self._strips: dict[int, Strip] = {}

    @property
    def lines(self) -> Sequence[Line]:
        """The lines shown now."""
        return self._lines

    def show(self, lines: Sequence[Line], driver: TerminalDriver | None) -> None:
        """Put lines on the screen; only what differs from those shown before is sent.

        Args:
            lines: As many as the screen has rows, each as wide as the screen.
            driver: The terminal. None: there is none, Textual does it all.
        """
        old, self._lines = self._lines, lines
        if driver is not None:
            self._write(driver)
        elif _shape(old) != _shape(lines):
            self._strips.clear()
            self.refresh()
        else:
            changed = [row for row, line in enumerate(lines) if line != old[row]]
            for row in changed:
                self._strips.pop(row, None)
            if changed:
                self.refresh(*(Region(0, row, self.size.width, 1) for row in changed))

    def _write(self, driver: TerminalDriver) -> None:
        if driver.cleared():
            self._there = ()
        if _shape(self._there) == _shape(self._lines):
            text = update(self._there, self._lines, self._colours)
        else:
            text = frame(self._lines, self._colours)
        self._there = self._lines
        if text:
            driver.write(text)

    def forget(self) -> None:
        """What the terminal shows is uncertain: the next lines are sent whole."""
        self._there = ()

    def render_line(self, y: int) -> Strip:
        """One line as Textual wants it."""
        strip = self._strips.get(y)
        if strip is None:
            line = self._lines[y] if y < len(self._lines) else ()
            segments = [Segment(text, rich_style(name, self._colours)) for text, name in line]
            strip = self._strips[y] = Strip(segments, line_width(line))
        return strip

    def render_lines(self, crop: Region) -> list[Strip]:
        """The lines themselves: no border, no background, no filters over them."""
        return [
            self.render_line(y).crop_extend(crop.x, crop.right, None)
            for y in range(crop.y, crop.bottom)
        ]

    def on_resize(self, _event: events.Resize) -> None:
        """A new size needs new lines; terminals reflow or clear what they show."""
        if _shape(self._there) != (self.size.width, self.size.height):
            self.forget()
        self._on_size()


def _shape(lines: Sequence[Line]) -> tuple[int, int]:
    """Columns and rows."""
    return (line_width(lines[0]) if lines else 0, len(lines))
