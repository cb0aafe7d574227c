"""Back end for Python 3.14 and newer: `sys.remote_exec` (PEP 768).

The interpreter runs the code itself, on its main thread, between two instructions: the
safest way there is. A main thread that waits in C gets to it only when it wakes up.
"""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from kvtop.attach.ability import NO_PTRACE, Ability, AttachError, Injectee, Waiting
from kvtop.attach.helper import last_line, run_helper
from kvtop.errors import ExitCode

DEADLINE_S = 10.0
"""For the interpreter that makes the request."""
_ASK = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"


class RemoteExecBackend:
    """See the module.

    Args:
        proc_root: Where /proc is mounted.
    """

    name = "remote_exec"

    def __init__(self, proc_root: str = "/proc") -> None:
        self._root = proc_root

    def available(self, target: Injectee) -> Ability:
        """Whether the target is new enough, and an interpreter of its version is at hand."""
        if target.python is None:
            return Ability(False, "the version of its Python is not known")
        if target.python < (3, 14):
            major, minor = target.python
            return Ability(False, f"needs Python 3.14 in the target, this is {major}.{minor}")
        if self._interpreter(target) is None:
            return Ability(False, "its Python cannot be run from here")
        return Ability(True, "")

    @staticmethod
    def _interpreter(target: Injectee) -> str | None:
        """The target's own interpreter, or ours where it has the same version."""
        if not target.container and target.executable is not None:
            return target.executable if os.access(target.executable, os.X_OK) else None
        return sys.executable if sys.version_info[:2] == target.python else None

    def run(self, target: Injectee, code: str) -> Waiting:
        """Asks the target's interpreter to run `code`.

        The text goes into a private file in the target's /tmp, since `sys.remote_exec`
        takes a path; the first thing it does is to remove that file. Code that is withdrawn
        is a file that removes itself and does nothing more: to remove it from here would
        make the interpreter complain in the target's log when it gets to it.

        Raises:
            AttachError: The request was not made.
        """
        interpreter = self._interpreter(target)
        if interpreter is None:
            raise AttachError(f"the Python of process {target.pid} cannot be run from here")
        name = f"kvtop-{target.pid}-{secrets.token_hex(8)}.py"
        inside = f"/tmp/{name}"  # noqa: S108 - made with O_EXCL
        folder = Path(self._root) / str(target.pid) / "root/tmp"
        outside = folder / name
        remove = f"try:\n    __import__('os').unlink({inside!r})\nexcept OSError:\n    pass\n"
        try:
            _write(outside, remove + code, target.uid)
        except OSError as error:
            raise AttachError(
                f"no file can be made in /tmp of process {target.pid}: {error.strerror}"
            ) from error
        done = run_helper(
            [interpreter, "-I", "-c", _ASK, str(target.pid), inside], "", DEADLINE_S, "its Python"
        )
        if done.code == 0:
            # A target has room for one request: what was withdrawn before is not read any more.
            for old in folder.glob(f"kvtop-{target.pid}-*.py"):
                if old != outside:
                    with suppress(OSError):
                        old.unlink()
            return Waiting(
                begun=lambda: not os.path.lexists(outside),
                withdraw=lambda: _replace(outside, remove, target.uid),
            )
        with suppress(OSError):
            outside.unlink()
        denied = "PermissionError" in done.output
        raise AttachError(
            f"sys.remote_exec on process {target.pid}: {last_line(done.output)}",
            NO_PTRACE if denied else "",
            ExitCode.DENIED if denied else ExitCode.UNREACHABLE,
        )


def _write(path: Path, text: str, uid: int) -> None:
    """A new file that only `uid` can read.

    Raises:
        OSError: It cannot be made.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, text.encode())
        if uid not in {-1, os.geteuid()}:
            os.fchown(handle, uid, -1)
    finally:
        os.close(handle)


def _replace(path: Path, text: str, uid: int) -> None:
    """Puts another file in the place of one, in one step."""
    beside = path.with_suffix(".no")
    with suppress(OSError):
        _write(beside, text, uid)
        # The code may have begun, and removed its file, since it was last looked for.
        if os.path.lexists(path):
            os.replace(beside, path)
        else:
            os.unlink(beside)
