"""Fake /proc trees, and real Python targets of several versions."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attach_targets import Target

TREES = Path(__file__).with_name("trees")


class FakeProc:
    """Builds a /proc tree in a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tmp = root / "tmp"
        self.tmp.mkdir(parents=True)
        (root / "stat").write_text("cpu 1 2 3\nbtime 1000\n")
        self.listening: dict[int, str] = {}
        self._ns(root / "self")

    def _ns(self, folder: Path, mnt: str = "mnt:[1]", net: str = "net:[1]") -> None:
        (folder / "ns").mkdir(parents=True)
        (folder / "ns/mnt").symlink_to(mnt)
        (folder / "ns/net").symlink_to(net)

    def load(self, name: str) -> dict[str, Any]:
        """Adds all processes of a recorded tree."""
        tree: dict[str, Any] = json.loads((TREES / name).read_text())
        tcp = "\n".join(tree["tcp"]) + "\n"
        for pid, process in tree["processes"].items():
            folder = self.root / pid
            self._ns(folder)
            (folder / "stat").write_text(process["stat"])
            (folder / "status").write_text(process["status"])
            (folder / "cmdline").write_bytes(process["cmdline"].encode("utf-8", "surrogateescape"))
            (folder / "environ").write_bytes(b"")
            self._net(folder, tcp)
            (folder / "fd").mkdir()
            for at, target in enumerate(process["fds"]):
                (folder / "fd" / str(at)).symlink_to(target)
        return tree

    def _net(self, folder: Path, tcp: str) -> None:
        (folder / "net").mkdir()
        (folder / "net/tcp").write_text(tcp)
        (folder / "net/tcp6").write_text("head\n")

    def add(
        self,
        pid: int,
        argv: list[str],
        *,
        ppid: int = 1,
        comm: str = "python3",
        pgrp: int | None = None,
        state: str = "S",
        start: int = 5000,
        uid: int = 1000,
        ns_pids: tuple[int, ...] | None = None,
        listen: tuple[str, int] | None = None,
        mnt: str = "mnt:[1]",
        net: str = "net:[1]",
        environ: bytes = b"HOME=/\0",
    ) -> Path:
        """Adds one process; `listen` is (hex address, port)."""
        folder = self.root / str(pid)
        self._ns(folder, mnt, net)
        group = pid if pgrp is None else pgrp
        numbers = [
            ppid,
            group,
            group,
            0,
            -1,
            4194304,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            20,
            0,
            1,
            0,
            start,
            9,
        ]
        (folder / "stat").write_text(
            f"{pid} ({comm}) {state} {' '.join(map(str, numbers))} 256 0 0\n"
        )
        ids = " ".join(map(str, ns_pids or (pid,)))
        (folder / "status").write_text(
            f"Name:\t{comm}\nPid:\t{pid}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{ids}\n"
        )
        (folder / "cmdline").write_bytes("\0".join(argv).encode() + b"\0" if argv else b"")
        (folder / "environ").write_bytes(environ)
        (folder / "fd").mkdir()
        rows = ["sl local rem st"]
        if listen:
            address, port = listen
            (folder / "fd/3").symlink_to(f"socket:[{pid}00]")
            rows.append(f"0: {address}:{port:04X} 0:0 0A 0:0 0:0 0 {uid} 0 {pid}00 1 0")
        self._net(folder, "\n".join(rows) + "\n")
        return folder

    def remove(self, pid: int) -> None:
        """The process ends."""
        shutil.rmtree(self.root / str(pid))


@pytest.fixture
def fake_proc(tmp_path: Path) -> FakeProc:
    """An empty /proc."""
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def bind() -> Iterator[Callable[[Path], Path]]:
    """Binds Unix sockets, below a directory whose path is short enough."""
    opened: list[socket.socket] = []

    def make(path: Path) -> Path:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            one = socket.socket(socket.AF_UNIX)
            one.bind(path.name)
        finally:
            os.chdir(before)
        opened.append(one)
        return path

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def make_target(tmp_path: Path) -> Iterator[Callable[..., Target]]:
    """Starts targets, with probe sockets in a directory of the test's own."""
    made: list[Target] = []
    folder = tmp_path / "k"
    folder.mkdir(mode=0o700)

    def make(
        python: str = sys.executable,
        mode: str = "idle",
        wrap: list[str] | None = None,
        environ: dict[str, str] | None = None,
    ) -> Target:
        target = Target(python, mode, {"KVTOP_DIR": str(folder), **(environ or {})}, wrap or [])
        made.append(target)
        return target

    yield make
    for target in made:
        target.end()
