from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtop.attach import probe
from kvtop.attach.ability import AttachError, SimulatedError
from kvtop.attach.find import find_servers
from kvtop.attach.hello import Hello
from kvtop.attach.probe import Outcome
from kvtop.attach.servers import Found, FoundEngine, FoundProcess, FoundServer
from kvtop.commands import attach, detach
from kvtop.demo.launch import running
from kvtop.errors import ExitCode, NotFoundError, UsageError

SERVER = FoundServer(
    key="127.0.0.1:8000",
    url="http://127.0.0.1:8000",
    apis=(FoundProcess(10, 10, 0, 1),),
    engines=(FoundEngine(FoundProcess(20, 20, 0, 1), 0, (FoundProcess(30, 30, 0, 1),), (10,)),),
)
ARGUMENTS = {attach: "attach", detach: "detach"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a command line on a machine with one server; `fail` are pids that refuse."""
    asked: list[tuple[str, int]] = []

    def start(command: Any, *words: str, fail: tuple[int, ...] = (), found: Any = None) -> int:
        def act(name: str) -> Callable[..., Outcome]:
            def do(process: FoundProcess, role: str, **options: Any) -> Outcome:
                asked.append((name, process.pid))
                if process.pid in fail:
                    raise AttachError("it \x1b refuses", "ask again", ExitCode.DENIED)
                return Outcome(process.pid, role, True, f"done with {sorted(options)}")

            return do

        monkeypatch.setattr(attach, "find_servers", lambda: found or Found((SERVER,), ()))
        monkeypatch.setattr(probe, "attach", act("attach"))
        monkeypatch.setattr(probe, "detach", act("detach"))
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        code: int = command.run(parser.parse_args(words))
        return code

    start.asked = asked  # type: ignore[attr-defined]
    return start


@pytest.mark.parametrize("command", [attach, detach], ids=["attach", "detach"])
def test_all_processes_of_the_server_engine_first(
    run: Any, capsys: pytest.CaptureFixture[str], command: Any
) -> None:
    assert run(command) == ExitCode.OK
    assert run.asked == [(ARGUMENTS[command], pid) for pid in (20, 10, 30)]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["engine 20", "api 10", "worker 30"]


def test_any_process_names_its_server(run: Any) -> None:
    assert run(attach, "30") == ExitCode.OK
    assert [pid for _, pid in run.asked] == [20, 10, 30]


def test_some_fail(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(attach, fail=(30,)) == ExitCode.DEGRADED
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "worker 30: it ? refuses; ask again"


def test_all_fail_gives_the_first_code(run: Any) -> None:
    assert run(attach, fail=(10, 20, 30)) == ExitCode.DENIED


def test_json(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run(attach, "--json", fail=(10,))
    rows = json.loads(capsys.readouterr().out)["processes"]
    assert [(row["pid"], row["role"], row["ok"], row["changed"]) for row in rows] == [
        (20, "engine", True, True),
        (10, "api", False, False),
        (30, "worker", True, True),
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["abc"], UsageError),
        (["4194305"], NotFoundError),
        (["20", "--all"], UsageError),
        (["--via", "magic"], UsageError),
    ],
)
def test_bad_input(run: Any, words: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        run(attach, *words)
    assert run.asked == []


def test_nothing_found(run: Any) -> None:
    with pytest.raises(NotFoundError, match="no vLLM server"):
        run(attach, found=Found((), ("processes",)))


def test_the_named_way_only() -> None:
    (chosen,) = attach.ways("ptrace") or ()
    assert chosen.name == "ptrace"
    assert attach.ways(None) is None
    assert tuple(backend.name for backend in probe.backends()) == attach.WAYS


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Pid of a simulated engine, the only server there is."""
    with running(directory=tmp_path / "run") as engine:
        found = find_servers(socket_dir=engine.directory)
        monkeypatch.setattr(attach, "find_servers", lambda: found)
        yield engine.pid
        assert engine.socket.exists()


@pytest.mark.parametrize("command", [attach, detach], ids=["attach", "detach"])
def test_a_simulated_engine_is_left_alone(
    demo: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Any
) -> None:
    monkeypatch.setattr(probe, "backends", lambda: pytest.fail("it was to be reached"))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    line = f"engine {demo}: process {demo} is simulated by kvtop demo; end it there"
    for words, code in (([str(demo)], ExitCode.USAGE), (["--all"], ExitCode.OK)):
        assert command.run(parser.parse_args(words)) == code
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == line


def test_a_probe_that_says_it_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Hello("1", "engine", 5, "ok", "", "demo", None, ())
    monkeypatch.setattr(probe, "_hello", lambda _process: said)
    with pytest.raises(SimulatedError):
        probe.attach(FoundProcess(os.getpid(), os.getpid(), os.getuid(), 1), "engine", among=())
