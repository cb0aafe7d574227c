"""A directory that the probe would refuse is told before anything is put into the process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtop.attach import probe
from kvtop.attach.ability import AttachError
from kvtop.attach.procfs import Proc
from kvtop.attach.servers import FoundProcess
from kvtop.errors import ExitCode


def this_process(**changes: int) -> FoundProcess:
    stat = Proc().stat(os.getpid())
    assert stat is not None
    pid = os.getpid()
    about = {"uid": os.getuid(), **changes}
    return FoundProcess(pid=pid, ns_pid=pid, start_ticks=stat.start_ticks, **about)


def refused(monkeypatch: pytest.MonkeyPatch, folder: Path, process: FoundProcess) -> AttachError:
    monkeypatch.setattr(probe, "kvtop_dir_of", lambda proc, pid: str(folder))
    monkeypatch.setattr(probe.Delivery, "run", lambda *_: pytest.fail("something was put in"))
    with pytest.raises(AttachError) as caught:
        probe.attach(process, "engine")
    assert caught.value.code == ExitCode.DENIED
    assert str(folder) in caught.value.what
    assert caught.value.line().isprintable()
    return caught.value


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777])
def test_a_directory_that_others_can_enter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    tmp_path.chmod(mode)
    error = refused(monkeypatch, tmp_path, this_process())
    assert "others can enter" in error.what
    assert error.remedy == f"chmod 700 {tmp_path}"


def test_a_file_and_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        error = refused(monkeypatch, tmp_path / name, this_process())
        assert "is not a directory" in error.what


def test_a_directory_of_somebody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    error = refused(monkeypatch, tmp_path, this_process(uid=os.getuid() + 1))
    assert "belongs to user" in error.what


def test_a_private_or_absent_directory_is_let_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    for folder in (tmp_path, tmp_path / "none", Path("x" * 5000)):
        monkeypatch.setattr(probe, "kvtop_dir_of", lambda proc, pid, f=folder: str(f))
        probe._check_folder(this_process())


def test_what_the_target_says_of_its_directory_is_a_refusal_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "kvtop_dir_of", lambda proc, pid: "/run/k")
    process = this_process()
    assert probe._code_of(process, "cannot make /run/k: Read-only") == ExitCode.DENIED
    assert probe._code_of(process, "vLLM 0.6 has no V1 engine") == ExitCode.BAD_DATA
