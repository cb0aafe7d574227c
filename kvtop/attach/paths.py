"""Where the probe of a process listens, seen from here.

The probe binds `<role>-<pid>.sock` (its own pid in its own pid namespace) in
`$KVTOP_DIR` or `/tmp/kvtop-<uid>` of its own mount namespace. From outside that is
reached through /proc/PID/root.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvtop.attach.procfs import Proc, map_uid, parse_environ
from kvtop.probe.rundir import SOCKET_NAME

_ANCESTORS = 8


@dataclass(frozen=True, slots=True)
class SocketFile:
    """One probe socket in a directory."""

    path: Path
    """Where it is, for this process."""
    role: str
    """`engine`, `api` or `worker`."""
    ns_pid: int
    """Pid in the namespace of the process that bound it."""
    uid: int
    """Owner of the socket."""


def list_sockets(folder: Path) -> list[SocketFile]:
    """Probe sockets in a directory that only its owner can write to. Never raises.

    A directory that others can write to, and a socket that belongs to another user than
    the directory, are passed over: anyone could have put it there.
    """
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o022:
            return []
        names = os.listdir(folder)
    except OSError:
        return []
    found: list[SocketFile] = []
    for name in sorted(names):
        match = SOCKET_NAME.fullmatch(name)
        if match is None:
            continue
        try:
            file = (folder / name).lstat()
        except OSError:
            continue
        if stat.S_ISSOCK(file.st_mode) and file.st_uid == about.st_uid:
            found.append(SocketFile(folder / name, match[1], int(match[2]), file.st_uid))
    return found


def kvtop_dir_of(proc: Proc, pid: int) -> str | None:
    """`$KVTOP_DIR` of a process; None: not set, or not readable.

    vLLM's engines and workers write over their environment with their title: their
    parent's, which they have inherited, stands in.
    """
    for _ in range(_ANCESTORS):
        raw = proc.read(f"{pid}/environ") or b""
        environ = parse_environ(raw)
        stat_ = proc.stat(pid)
        overwritten = not raw or raw.startswith(b"\0")
        if "KVTOP_DIR" in environ or not overwritten or stat_ is None or stat_.ppid <= 1:
            return environ.get("KVTOP_DIR") or None
        pid = stat_.ppid
    return None


def probe_folders(
    proc: Proc, pid: int, uid: int, kvtop_dir: str | None, *, foreign: bool
) -> list[Path]:
    """Directories where the probe of a process may listen, likeliest first.

    Args:
        proc: The /proc tree.
        pid: The process, as seen here.
        uid: Its user, as seen here; a user namespace may give it another number inside.
        kvtop_dir: `$KVTOP_DIR` of the process. None: not set.
        foreign: It lives in another mount namespace.
    """
    inside = map_uid(proc.text(f"{pid}/uid_map"), uid) if foreign else uid
    names = [kvtop_dir] if kvtop_dir else []
    names.append(f"/tmp/kvtop-{inside}")  # noqa: S108 - owners are checked by `list_sockets`
    if not foreign:
        return [Path(name) for name in names]
    return [Path(proc.root) / str(pid) / "root" / name.lstrip("/") for name in names]
