from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtop.commands import demo
from kvtop.config import Options
from kvtop.demo.launch import Running
from kvtop.errors import UsageError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--seed", "x"], "--seed"),
        (["--blocks", "many"], "--blocks"),
        (["--blocks", "1e3"], "--blocks"),
        (["--speed", "fast"], "--speed"),
        (["--speed", "inf"], "--speed"),
        (["--scenario", "a\nb"], "scenario"),
    ],
)
@pytest.mark.parametrize("serve", [[], ["--serve"]])
def test_bad_values_are_one_plain_line(argv: list[str], word: str, serve: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        demo.run(parse(*argv, *serve))
    assert word in caught.value.line()
    assert "\n" not in caught.value.line()


def test_the_screens_get_the_simulated_engine_and_it_ends_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Running] = []

    def show(engine: Running, options: Options) -> int:
        seen.append(engine)
        assert engine.socket.exists()
        assert (options.url, options.pid) == (None, None)
        return 7

    monkeypatch.setattr(demo, "_show", show)
    assert demo.run(parse("--scenario", "wedge", "--blocks", "512")) == 7
    assert not seen[0].directory.exists()


def test_the_target_is_the_simulated_engine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import kvtop.commands.top as top

    targets: list[Any] = []
    monkeypatch.setattr(top, "run_on", lambda target, options: targets.append(target) or 0)
    engine = Running(4740, "http://127.0.0.1:1/metrics", Path("/d/engine-4740.sock"), Path("/d"))
    assert demo._show(engine, Options()) == 0
    (target,) = targets
    assert target.demo
    assert target.socket_dir == Path("/d")
    assert target.url == "http://127.0.0.1:1"
    assert target.gpu_source.kind == "nvml"


def test_what_the_environment_says_is_made_visible(capsys: pytest.CaptureFixture[str]) -> None:
    where = {"pid": 1, "metrics_url": "u", "socket": "/a\x1b[2J/s", "directory": "/a\n\x1b[2J"}
    demo._say(where)
    text = capsys.readouterr().out
    assert text.count("\n") == 4
    assert "\x1b" not in text
    assert "KVTOP_DIR=/a??[2J" in text


def test_serve_says_where_it_is_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtop", "demo", "--serve", "--blocks", "512"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVTOP_DIR": str(tmp_path)},
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    assert (tmp_path / f"engine-{process.pid}.sock").exists()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    text = "".join(lines)
    assert str(process.pid) in lines[0]
    assert "http://127.0.0.1:" in text
    assert f"KVTOP_DIR={tmp_path}" in text
    assert list(tmp_path.iterdir()) == []
