"""The HTML report in a real browser: nothing sticks out, runs, or is fetched."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop.cli import main
from kvtop.session.writer import SessionWriter
from tests.session.browser import Browser, find, started
from tests.session.common import small
from tests.session.test_captures import STACKS, capture

EVIL = (
    "</td></svg><script>document.title='x';console.log(1)</script>",
    "<img src=http://127.0.0.1:9/x onerror=console.log(2)>",
    "' onmouseover='console.log(3)' \" style=\"background:url(http://127.0.0.1:9/y)",
    "</style></title><link rel=stylesheet href=http://127.0.0.1:9/z>",
    "A" * 4000,
    "\u202e\x00\x1b[31m\ud800\u2028",
    "<svg onload=console.log(4)>" + "&lt;" * 50,
)
"""Texts that a report must show as text."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find() is None:
        pytest.skip("no Chromium is installed")
    with started(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def session(path: Path, evil: bool) -> Path:
    """A session of some minutes; with hostile names everywhere when `evil`."""
    churn = small(requests=len(EVIL) + 3)
    writer = SessionWriter(path, 1.0)
    names = EVIL if evil else ()
    for tick in range(200):
        shot = churn.tick()
        (engine,) = shot.engines
        rows = tuple(
            dataclasses.replace(row, id=names[n] if n < len(names) else row.id)
            for n, row in enumerate(engine.requests or ())
        )
        engine = dataclasses.replace(engine, requests=rows)
        if evil:
            engine = dataclasses.replace(engine, model=EVIL[1] + EVIL[4], server=EVIL[0])
            shot = dataclasses.replace(shot, host=EVIL[3] + EVIL[4])
            gpu = dataclasses.replace(shot.gpus[0], name=EVIL[6])
            shot = dataclasses.replace(shot, gpus=(gpu,))
        writer.write(dataclasses.replace(shot, engines=(engine,)))
        if tick in (50, 120):
            for note in EVIL if evil else ("load test begins",):
                writer.marker(shot.time_s, note)
            lines = STACKS + "".join(
                f"main (a.py:1);{name.replace(chr(0), ' ')} (b.py:{n}) {n + 1}\n"
                for n, name in enumerate(names)
            )
            writer.capture(capture(lines, EVIL[0] if evil else "health.stalled"))
    writer.close()
    return path


@pytest.mark.parametrize("evil", [False, True], ids=["plain", "hostile"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_nothing_sticks_out_runs_or_is_fetched(
    browser: Browser, tmp_path: Path, width: int, evil: bool
) -> None:
    out = tmp_path / "r.html"
    assert main(["report", str(session(tmp_path / "a", evil)), "--html", str(out)]) == 0
    page = browser.look(out, width, tmp_path / "shot.png")
    assert page.said == []
    assert page.asked == []
    assert page.size["wide"] <= page.size["view"] <= width
    assert page.size["out"] == []
    assert page.size["scripts"] == page.size["images"] == 0
    # Four plots and two flame graphs: no text has ended one early.
    assert page.size["svgs"] == 6
    assert page.size["small"] == 0
    assert page.size["text"] > 3000
    assert (tmp_path / "shot.png").stat().st_size > 10_000


def test_the_check_itself_sees_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><body><script>console.log(7); throw Error('x')</script>"
        "<img src='http://127.0.0.1:9/x.png'><div style='width:3000px'>wide</div>"
    )
    page = browser.look(path, 390, tmp_path / "shot.png")
    assert len(page.said) >= 2
    assert page.asked == ["http://127.0.0.1:9/x.png"]
    assert page.size["out"]
