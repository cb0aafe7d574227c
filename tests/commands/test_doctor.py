from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop.attach.procfs import Proc
from kvtop.attach.servers import Found, FoundEngine, FoundProcess, FoundServer
from kvtop.commands import doctor
from kvtop.commands.doctor import Check, examine, has_ptrace, machine, report
from kvtop.errors import ExitCode


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "print(1, flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def process_of(pid: int) -> FoundProcess:
    stat = Proc().stat(pid)
    assert stat is not None
    return FoundProcess(pid, pid, os.geteuid(), stat.start_ticks)


def state_of(checks: list[Check], name: str) -> list[tuple[str, str]]:
    return [(check.state, check.text) for check in checks if check.name == name]


async def test_nothing_found_is_degraded_and_says_what_was_looked_for() -> None:
    checks = await examine(Found((), ("process titles",), ("a note",)))
    (none,) = [check for check in checks if check.section == "servers"]
    assert none.state == "degraded"
    assert "process titles" in none.remedy
    assert ("info", "a note") in [(check.state, check.text) for check in checks]


async def test_an_engine_without_a_probe_is_offered_one(child: subprocess.Popen[bytes]) -> None:
    engine = FoundEngine(process_of(child.pid), 0)
    server = FoundServer("pid 1", None, engines=(engine,), orphan=True)
    checks = await examine(Found((server,), ()))
    ((state, text),) = state_of(checks, f"engine {child.pid}")
    assert state == "degraded"
    assert "no probe, can be attached with" in text
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in text
    assert any(check.remedy == f"kvtop attach {child.pid}" for check in checks)
    assert any(check.remedy == f"kill {child.pid}" for check in checks)


async def test_a_stopped_engine_is_named(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    engine = FoundEngine(process_of(child.pid), 0)
    checks = await examine(Found((FoundServer("pid 1", None, engines=(engine,)),), ()))
    assert any(check.remedy == f"kill -CONT {child.pid}" for check in checks)


async def test_a_server_that_does_not_answer() -> None:
    server = FoundServer("127.0.0.1:1", "http://127.0.0.1:1", apis=(process_of(os.getpid()),))
    checks = await examine(Found((server,), ()))
    ((state, _),) = state_of(checks, "/metrics")
    assert state == "degraded"
    assert state_of(checks, "engine") == [("info", "starting: no engine process yet")]


def proc_tree(root: Path, scope: str | None, capabilities: str) -> Proc:
    (root / "self").mkdir()
    (root / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    if scope is not None:
        (root / "sys/kernel/yama").mkdir(parents=True)
        (root / "sys/kernel/yama/ptrace_scope").write_text(scope)
    return Proc(root)


@pytest.mark.parametrize(
    ("scope", "capabilities", "state"),
    [
        (None, "0000000000000000", "ok"),
        ("0\n", "0000000000000000", "ok"),
        ("1\n", "0000000000000000", "degraded"),
        ("1\n", "000001ffffffffff", "ok"),
        ("3\n", "0000000000080000", "ok"),
    ],
)
def test_rights(tmp_path: Path, scope: str | None, capabilities: str, state: str) -> None:
    checks = machine(proc_tree(tmp_path, scope, capabilities))
    (check,) = [check for check in checks if check.name == "ptrace"]
    assert check.state == state
    assert bool(check.remedy) == (state == "degraded")


def test_no_capabilities_line() -> None:
    assert not has_ptrace("Name:\tx\n")


def test_the_report_shows_no_control_characters() -> None:
    lines = report([Check("server a\x1b[2J", "engine\n1", "ok", "x\ry", "run\x07")])
    assert all(line.isprintable() for line in lines)
    assert lines[0] == "server a?[2J"


@pytest.mark.parametrize("state", ["ok", "info", "degraded"])
def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    async def fixed(found: Found) -> list[Check]:
        return [Check("machine", "x", state, "text")]

    monkeypatch.setattr(doctor, "examine", fixed)
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    expected = ExitCode.DEGRADED if state == "degraded" else ExitCode.OK
    assert doctor.run(parser.parse_args(["--json"])) == expected
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] == (state != "degraded")
    assert answer["checks"][0]["state"] == state
    assert doctor.run(parser.parse_args([])) == expected
    assert state in capsys.readouterr().out
