"""The real `kvtop demo` in a real terminal: every key, and a leak recorded and replayed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
from terminal import NO_TMUX, TMUX, Tmux, assert_given_back, kvtop, wait_for

from kvtop.session.reader import SessionReader
from kvtop.ui.keys import KEYS

LEAVING = ("quit", "suspend")
DEMO = ("demo", "--no-stacks", "--blocks", "2048")

pytestmark = pytest.mark.skipif(TMUX is None, reason=NO_TMUX)


def alone(tmp_path: Path) -> dict[str, str]:
    """Nothing of the user's own: no configuration, no probes of other engines."""
    return {"KVTOP_CONFIG": "", "XDG_CONFIG_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_every_key_then_a_resize_and_a_signal(size: tuple[int, int], tmp_path: Path) -> None:
    columns, rows = size
    with Tmux(columns, rows, alone(tmp_path)) as tmux:
        before = tmux.stty()
        tmux.type(f"cd {tmp_path}; " + kvtop(*DEMO) + "; echo code=$?")
        tmux.wait_text("Requests")
        tmux.wait_text("probe ok")
        tmux.wait_text("info:")
        for binding in KEYS:
            if binding.action in LEAVING:
                continue
            for key in binding.keys:
                tmux.press(key)
                # Escape and the next key must not be read as one.
                wait_for("the key taken", lambda: "kvtop" in tmux.screen())
        for other in ((120, 30), (60, 16), size):
            tmux.resize(*other)
            wait_for(f"{other}", lambda other=other: len(tmux.lines()) == other[1])
        tmux.wait_text("kvtop")
        subprocess.run(["kill", f"-{int(signal.SIGTERM)}", str(tmux.child())], check=True)
        tmux.wait_text(f"code={128 + signal.SIGTERM}")
        assert_given_back(tmux, before)


def test_a_leak_is_found_recorded_marked_and_found_again_in_the_replay(tmp_path: Path) -> None:
    with Tmux(120, 40, alone(tmp_path)) as tmux:
        before = tmux.stty()
        tmux.type(f"cd {tmp_path}")
        tmux.type(kvtop(*DEMO, "--scenario", "leak", "--speed", "4") + "; echo code=$?")
        tmux.wait_text("probe ok")
        tmux.press("R")
        tmux.wait_text("REC ")
        tmux.wait_text("Memory is held badly", 90)
        tmux.press("w")
        tmux.wait_text("leak.ghost-blocks")
        tmux.press("escape")
        tmux.wait_gone("What is wrong")
        tmux.press("m")
        tmux.wait_text("Marker")
        tmux.run("send-keys", "-l", "here it is")
        tmux.press("enter")
        tmux.wait_text("marker set: here it is")
        tmux.press("q")
        tmux.wait_text("code=0")
        tmux.wait_text("kvtop: recorded")
        assert_given_back(tmux, before)

        (path,) = tmp_path.glob("kvtop-2*.kvtop")
        with SessionReader(path) as reader:
            assert [marker.note for marker in reader.markers()] == ["here it is"]
        tmux.type("clear; " + kvtop("replay", path.name, "--speed", "16") + "; echo again=$?")
        tmux.wait_text("REPLAY")
        tmux.wait_text("Memory is held badly")
        tmux.press("w")
        tmux.wait_text("leak.ghost-blocks")
        tmux.press("down")
        tmux.press("enter")
        tmux.wait_text("What it means")
        tmux.press("escape")
        tmux.wait_gone("What it means")
        tmux.press(":")
        tmux.wait_text("Go to")
        tmux.run("send-keys", "-l", "0%")
        tmux.press("enter")
        tmux.wait_gone("Go to")
        tmux.press("E")
        tmux.wait_text("n: marker")
        tmux.press("n")
        tmux.wait_text("marker: here it is")
        tmux.press("q")
        tmux.wait_text("again=0")
        assert_given_back(tmux, before)
