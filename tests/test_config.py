"""Options: which value wins, and what a wrong one says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtop.config import Options, interval, load, seconds
from kvtop.errors import UsageError


def test_defaults_without_anything(tmp_path: Path) -> None:
    assert load({}, {"XDG_CONFIG_HOME": str(tmp_path)}) == Options()


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('interval = "4s"\nurl = "file:1"\npid = 7\n')
    env = {"KVTOP_INTERVAL": "2s", "KVTOP_URL": "env:1"}
    options = load({"interval_s": "500ms", "url": None}, env, file)
    assert options.interval_s == 0.5
    assert options.url == "env:1"
    assert options.pid == 7


def test_a_black_box_is_a_time_and_attaching_a_yes(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('blackbox = "10m"\nattach = true\n')
    options = load({}, {}, file)
    assert (options.blackbox_s, options.attach) == (600.0, True)
    assert load({"blackbox_s": "30s", "attach": None}, {}, file).blackbox_s == 30.0
    with pytest.raises(UsageError, match="--blackbox: 'soon' is not a time"):
        load({"blackbox_s": "soon"}, {}, file)


def test_findings_section_is_handed_on(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[findings]\nkv_high_percent = 90\n")
    assert load({}, {}, file).findings == {"kv_high_percent": 90}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.5", 0.5), ("500ms", 0.5), ("30s", 30), ("10m", 600), ("2h", 7200), (" 1s ", 1)],
)
def test_seconds(text: str, expected: float) -> None:
    assert seconds(text, "--for") == expected


@pytest.mark.parametrize("text", ["", "x", "-1s", "0", "nan", "inf", "1e99h", "s", "1 y"])
def test_seconds_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="--for"):
        seconds(text, "--for")


@pytest.mark.parametrize("text", ["0.1s", "61s", "2h"])
def test_interval_has_bounds(text: str) -> None:
    with pytest.raises(UsageError, match="out of bounds"):
        interval(text, "-i")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("interval = [", "not TOML"),
        ("colour = 1", "unknown option 'colour'"),
        ('pid = "x"', "pid: 'x' is not a process id"),
        ('ascii = "maybe"', "neither yes nor no"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        load({}, {}, file)
    assert str(file) in caught.value.line()


def test_chosen_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such configuration file"):
        load({}, {"KVTOP_CONFIG": str(tmp_path / "none.toml")})


@pytest.mark.parametrize("pid", ["0", "-3", "1.5", "x", "²"])
def test_pid_must_be_a_whole_number(pid: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--pid"):
        load({"pid": pid}, {"XDG_CONFIG_HOME": str(tmp_path)})


def test_only_a_regular_file_of_modest_size_is_read(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * 1_000_001)
    deep = tmp_path / "deep.toml"
    deep.write_text("a = " + "[" * 100_000)
    for path in (fifo, Path("/dev/zero"), tmp_path, big, deep):
        with pytest.raises(UsageError):
            load({}, {}, path)


def test_thousands_of_digits_are_no_pid(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a process id"):
        load({"pid": "9" * 5000}, {"XDG_CONFIG_HOME": str(tmp_path)})
