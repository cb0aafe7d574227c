"""What `kvtop once` and `kvtop replay --text` say of the moment that they print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtop.cli import main
from kvtop.commands import once
from kvtop.config import Options
from kvtop.demo.launch import running
from kvtop.detect.judge import Judge
from kvtop.draw.plain import plain
from kvtop.errors import ExitCode
from kvtop.model.snapshot import Finding
from kvtop.stream.target import Target
from tests.session.common import recorded


async def test_a_single_look_has_a_verdict_and_no_alarm() -> None:
    with running("healthy", seed=7, blocks=512, speed=1.0) as engine:
        target = Target(socket_dir=engine.directory, url=engine.url, demo=True)
        options = Options(gpus=False, stacks=False)
        snapshot, findings = await once.take(options, target, Judge().judge)
    assert snapshot.engines[0].probe is not None
    assert [finding.rule for finding in findings] == ["diagnosis.memory-fine"]


def test_findings_stand_below_the_engines_with_what_to_do() -> None:
    with_all = Finding("leak.x", "critical", 1.0, 7, "It leaks\x1b[31m.", next_step="Restart it.")
    machine = Finding("gpu.y", "info", 1.0, None, "GPU 0 is full.")
    snapshot = recorded_snapshot()
    lines = plain(snapshot, (with_all, machine))
    assert lines[: len(plain(snapshot))] == plain(snapshot)
    assert lines[-3:] == [
        r"critical leak.x (pid 7): It leaks\x1b[31m.",
        "  do: Restart it.",
        "info gpu.y (machine): GPU 0 is full.",
    ]


def recorded_snapshot():
    from tests.session.common import small

    return small().tick()


def test_a_recorded_moment_is_judged_from_what_came_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "a.kvtop"
    live = recorded(path, 40)
    judge = Judge()
    for snapshot in live:
        expected = judge.judge(snapshot)
    assert expected
    assert main(["replay", str(path), "--json"]) == ExitCode.OK
    data = json.loads(capsys.readouterr().out)
    assert [f["rule"] for f in data["findings"]] == [f.rule for f in expected]
    assert main(["replay", str(path), "--text"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(f"{f.severity} {f.rule} (" in out for f in expected)


@pytest.mark.parametrize("argv", [["once"], ["replay", "{path}", "--text"]])
def test_a_wrong_threshold_is_one_plain_line(
    argv: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[findings]\nkv_full_percent = 1000\n")
    monkeypatch.setenv("KVTOP_CONFIG", str(config))
    path = tmp_path / "a.kvtop"
    recorded(path, 3)
    assert main([word.format(path=path) for word in argv]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert "kv_full_percent" in err
    assert err.count("\n") == 1
