from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvtop.cli import main
from kvtop.commands import flame_explain
from kvtop.commands.flame import pid_of
from kvtop.demo.launch import running
from kvtop.detect.judge import Judge
from kvtop.errors import ExitCode
from kvtop.flame.folded import parse
from kvtop.model.snapshot import Counters, Snapshot
from kvtop.sources.stacks_spy import find_py_spy
from tests.draw import samples

BUSY = "print('up', flush=True)\ndef hot_loop():\n  while True: pass\nhot_loop()"
STACKS = 'process 7:"x";thread (7): Main;run (a.py:1);hot (b.py:2) 30\nprocess 7:"x";other 10\n'


@pytest.fixture
def busy() -> Iterator[int]:
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


@pytest.fixture
def stacks(tmp_path: Path) -> Path:
    path = tmp_path / "x.folded"
    path.write_text(STACKS)
    return path


@pytest.mark.parametrize("suffix", [".svg", ".json", ".folded", ".html"])
def test_each_format(
    busy: int, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"x{suffix}"
    words = ["flame", str(busy), "--for", "1s", "--rate", "50", "-o", str(path)]
    assert main(words) == ExitCode.OK
    text = path.read_text()
    assert "hot_loop" in text
    if suffix == ".svg":
        ElementTree.fromstring(text)
    if suffix == ".json":
        assert json.loads(text)["profiles"]
    if suffix == ".folded":
        assert parse(text).total > 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"wrote {path}" in err
    assert "non-blocking" in err


def test_standard_output_and_a_warning(busy: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["flame", str(busy), "--for", "1s", "--rate", "20", "--blocking"]
    assert main([*words, "--format", "folded", "-o", "-"]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert "hot_loop" in out
    assert "--blocking stops all 1 threads" in err


def test_the_default_name(
    busy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["flame", str(busy), "--for", "1s", "--rate", "20"]) == ExitCode.OK
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("kvtop-")
    assert f"-{busy}-" in path.name
    assert path.suffix == ".svg"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["nonsense"], ExitCode.USAGE, "not a process id"),
        (["0"], ExitCode.USAGE, "not a process id"),
        (["4194305"], ExitCode.NOT_FOUND, "no process 4194305"),
        (["1", "--rate", "fast"], ExitCode.USAGE, "--rate"),
        (["1", "--rate", "0"], ExitCode.USAGE, "samples a second"),
        (["1", "--for", "soon"], ExitCode.USAGE, "--for"),
        (["1", "--for", "9d"], ExitCode.USAGE, "capture of"),
        (["1", "--for", "1s", "-o", "/nowhere/x.svg"], ExitCode.NOT_FOUND, "/nowhere"),
        (["--view", "/nowhere/x"], ExitCode.NOT_FOUND, "/nowhere/x"),
        (["--view", "/etc/hostname"], ExitCode.BAD_DATA, "folded"),
        (["--against", "x"], ExitCode.USAGE, "--view"),
        (["1", "--url", "127.0.0.1:1"], ExitCode.USAGE, "--url"),
        (["--view", "x", "--url", "127.0.0.1:1"], ExitCode.USAGE, "--url"),
        (["--url", "no host:x"], ExitCode.USAGE, "--url"),
        (["--url", "127.0.0.1:1"], ExitCode.NOT_FOUND, "127.0.0.1:1"),
        (["--session", "x"], ExitCode.USAGE, "--explain"),
        (["--explain", "--session", "/nowhere/x"], ExitCode.NOT_FOUND, "/nowhere/x"),
    ],
)
def test_bad_words_are_one_plain_line(
    words: list[str], code: ExitCode, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flame", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvtop: ")
    assert len(err.splitlines()) == 1
    assert text in err


def test_an_address_names_the_engine() -> None:
    with running() as one, running() as other:
        assert pid_of(None, one.url) == one.pid
        assert pid_of(None, other.url.removeprefix("http://")) == other.pid


def test_a_file_as_text(stacks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flame", "--view", str(stacks), "--ascii"]) == ExitCode.OK
    out, _ = capsys.readouterr()
    assert "hot (b.py:2)" in out
    assert "40 samples" in out
    assert out.isascii()
    assert "\x1b" not in out


def test_two_files_compared(
    stacks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = tmp_path / "older"
    older.write_text(STACKS.replace(" 30", " 10"))
    assert main(["flame", "--view", str(stacks), "--against", str(older)]) == ExitCode.OK
    out, _ = capsys.readouterr()
    assert "+25.0 " in out
    assert "-25.0 other" in out


def test_a_process_that_is_no_engine_is_explained(
    busy: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flame", str(busy), "--explain", "--for", "1s", "--rate", "20"]) == ExitCode.OK
    out, _ = capsys.readouterr()
    assert "No ghost, zombie or other leak was found." in out
    assert "allocated -" in out
    assert "free       none seen" in out


def test_flame_on_is_checked_before_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--flame-on", "bogus"]) == ExitCode.USAGE
    assert "preempt-storm" in capsys.readouterr().err


def test_nothing_of_the_screen_is_loaded_for_a_capture() -> None:
    code = "import kvtop.commands.flame, sys; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0


def test_rates_are_of_the_whole_stretch() -> None:
    def shot(mono_s: float, allocated: int) -> Snapshot:
        counters = Counters(allocated=allocated, freed=allocated // 2, touched=0, evicted=None)
        engine = replace(samples.ENGINE, pid=7, counters=counters)
        return replace(samples.HEALTHY, mono_s=mono_s, time_s=mono_s, engines=(engine,))

    seen = flame_explain._Seen(Judge())
    # Uneven ticks: the mean of their rates would be 1,030 a second.
    for mono_s, allocated in ((0.0, 0), (0.1, 206), (10.0, 206)):
        seen.take(shot(mono_s, allocated))
    rates = seen.rates(7)
    assert rates["allocated"] == pytest.approx(20.6)
    assert rates["freed"] == pytest.approx(10.3)
    assert rates["evicted"] is None
    # Started again: only what came after counts.
    seen.take(shot(11.0, 0))
    assert seen.rates(7)["allocated"] is None
    seen.take(shot(12.0, 5))
    assert seen.rates(7)["allocated"] == pytest.approx(5.0)
    assert seen.rates(8) == dict.fromkeys(rates)
