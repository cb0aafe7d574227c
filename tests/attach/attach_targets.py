"""Python interpreters of this machine, and processes to attach to."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from kvtop.attach.procfs import Proc
from kvtop.attach.servers import FoundProcess

TARGET = Path(__file__).with_name("target.py")


VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""What kvtop is tested to attach to."""


def interpreters() -> dict[str, str]:
    """Python by version: the one of the tests, `KVTOP_PYTHONS`, pyenv's, those on PATH.

    `KVTOP_PYTHONS` has absolute paths, parted as in PATH.
    """
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": os.path.realpath(sys.executable)}
    for path in os.environ.get("KVTOP_PYTHONS", "").split(os.pathsep):
        if path:
            # Named by hand: one that does not run is a mistake, not a reason to skip.
            found.setdefault(_ask(path, "'%d.%d' % sys.version_info[:2]"), path)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in VERSIONS:
        beside = sorted(versions.glob(f"{version}.*/bin/python{version}"))
        path = str(beside[-1]) if beside else shutil.which(f"python{version}")
        if path and version not in found and _works(path):
            found[version] = path
    return found


@functools.cache
def _ask(path: str, what: str) -> str:
    text = f"import sys, zlib; print({what})"
    done = subprocess.run([path, "-c", text], capture_output=True, text=True, check=True)
    return done.stdout[:-1]


def _works(path: str) -> bool:
    return (
        subprocess.run([path, "-c", "import zlib"], capture_output=True, check=False).returncode
        == 0
    )


INTERPRETERS = interpreters()


class Target:
    """A Python process that looks like an engine core to discovery and to the probe."""

    def __init__(self, python: str, mode: str, environ: dict[str, str], wrap: list[str]) -> None:
        script = [str(TARGET), *mode.split()]
        self.child = subprocess.Popen(
            [*wrap, python, *script] if wrap else ["VLLM::EngineCore", *script],
            executable=None if wrap else python,
            stdout=subprocess.PIPE,
            text=True,
            # A name in the place of its path keeps Python from finding its library by it.
            env={**os.environ, **environ, "PYTHONHOME": _ask(python, "sys.base_prefix")},
        )
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line.startswith("up"), f"the target did not start: {line!r}"
        self.pid = self.child.pid

    def process(self, pid: int | None = None) -> FoundProcess:
        """As discovery gives it."""
        pid = pid or self.pid
        stat, identity = Proc().stat(pid), Proc().identity(pid)
        assert stat is not None
        assert identity is not None
        return FoundProcess(pid, identity.ns_pids[-1], identity.uid, stat.start_ticks)

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def thread_names(self) -> list[str]:
        return [
            Path(f"/proc/{self.pid}/task/{tid}/comm").read_text()
            for tid in os.listdir(f"/proc/{self.pid}/task")
        ]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def mappings(self) -> int:
        return len(Path(f"/proc/{self.pid}/maps").read_text().splitlines())

    def state(self) -> str:
        stat = Proc().stat(self.pid)
        return stat.state if stat else "X"

    def settle(self, threads: int, descriptors: int) -> None:
        """Waits until no more are left: threads end, and give back, in their own time."""
        for _ in range(500):
            if (self.threads(), self.descriptors()) == (threads, descriptors):
                return
            time.sleep(0.02)

    def end(self) -> None:
        self.child.kill()
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()
