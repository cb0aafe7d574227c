"""A session replayed in a real terminal: stacks, block tables, jumps, tiny windows."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import NO_TMUX, TMUX, Tmux, assert_given_back, kvtop, wait_for

from kvtop.session.writer import SessionWriter
from tests.session.common import small
from tests.session.test_captures import STACKS, capture

pytestmark = pytest.mark.skipif(TMUX is None, reason=NO_TMUX)


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """Two minutes of a small engine; stacks at 40 and 80, the oldest request's table at 60."""
    path = tmp_path / "a.kvtop"
    churn = small()
    writer = SessionWriter(path, 1.0)
    for tick in range(1, 121):
        writer.write(churn.tick())
        if tick in (40, 80):
            writer.capture(capture(STACKS + f"only_at_{tick} (a.py:1) 99\n", "health.stalled"))
        if tick == 60:
            for job in churn.jobs:
                writer.detail(churn.pid, churn.detail(job.id))
        if tick == 100:
            writer.marker(churn.now_s, "the end is near")
    writer.close()
    return path


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    home = {"HOME": str(tmp_path), "TZ": "UTC", "KVTOP_DIR": str(tmp_path / "none")}
    with Tmux(120, 36, home) as tmux:
        yield tmux


def goto(tmux: Tmux, moment: str) -> None:
    tmux.press(":")
    tmux.wait_text("Go to")
    tmux.run("send-keys", "-l", moment)
    tmux.press("enter")
    tmux.wait_gone("Go to")


def test_stacks_and_tables_of_the_moment(tmux: Tmux, session: Path) -> None:
    before = tmux.stty()
    tmux.type(kvtop("replay", str(session), "--paused", "--at", "+20s") + "; echo code=$?")
    tmux.wait_text("REPLAY")
    tmux.press("F")
    tmux.wait_text("no flame graph was recorded up to this moment")
    goto(tmux, "+50s")
    tmux.press("F")
    tmux.wait_text("only_at_40")
    tmux.press("q")
    tmux.wait_gone("only_at_40")
    goto(tmux, "+90s")
    tmux.press("F")
    tmux.wait_text("only_at_80")
    # The one before to compare with is there too.
    tmux.press("d")
    tmux.wait_text("only_at_40")
    tmux.press("q")
    tmux.wait_gone("only_at_80")
    for _ in range(5):
        tmux.press("E")
    tmux.wait_text("n: stacks")
    goto(tmux, "0%")
    tmux.press("n")
    tmux.wait_text("42 samples in 30 s")
    goto(tmux, "+62s")
    tmux.press("enter")
    tmux.wait_text("block table")
    tmux.wait_text("before the moment shown")
    goto(tmux, "+30s")
    tmux.wait_text("was not recorded")
    tmux.press("escape")
    tmux.press("q")
    tmux.wait_text("code=0")
    assert_given_back(tmux, before)


def test_tiny_windows_and_a_pipe(tmux: Tmux, session: Path) -> None:
    before = tmux.stty()
    tmux.type(f"clear; cat {session} | {kvtop('replay', '-', '--text')} | head -3; echo a=$?")
    tmux.wait_text("a=0")
    tmux.wait_text("kvtop 0.1.0")
    tmux.type("clear; " + kvtop("replay", str(session), "--speed", "64") + "; echo code=$?")
    tmux.wait_text("REPLAY")
    for size in ((20, 4), (1, 1), (200, 50), (40, 3), (80, 24), (120, 36)):
        tmux.resize(*size)
        wait_for(str(size), lambda size=size: len(tmux.lines()) == size[1])
        tmux.press("F")
        tmux.press("enter")
        tmux.press("escape")
    tmux.press("escape")
    tmux.wait_text("END")
    tmux.press("q")
    tmux.wait_text("code=0")
    assert_given_back(tmux, before)


def test_a_file_that_is_cut_while_it_is_replayed(tmux: Tmux, session: Path) -> None:
    before = tmux.stty()
    tmux.type(kvtop("replay", str(session), "--paused") + "; echo code=$?")
    tmux.wait_text("REPLAY")
    size = session.stat().st_size
    subprocess.run(["truncate", "-s", str(size // 2), str(session)], check=True)
    tmux.wait_text("code=6")
    screen = tmux.screen()
    assert "Traceback" not in screen
    assert "is damaged or cut short" in screen
    assert_given_back(tmux, before)
