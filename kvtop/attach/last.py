"""The last snapshot that a probe leaves on disk when its engine core dies of an exception."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvtop.errors import BadDataError, DeniedError, NotFoundError
from kvtop.probe.last import FILE_NAME, MAX_BYTES
from kvtop.probe.rundir import SOCKET_NAME


def last_snapshot(probe_socket: Path | None, since_s: float) -> Path | None:
    """The file that the probe behind a socket has left.

    Args:
        probe_socket: Where it listened. None: nobody knows.
        since_s: Older files (Unix seconds) are of another process of the same number.
    """
    name = SOCKET_NAME.fullmatch(probe_socket.name) if probe_socket else None
    if probe_socket is None or name is None:
        return None
    found = []
    try:
        for entry in os.scandir(probe_socket.parent):
            match = FILE_NAME.fullmatch(entry.name)
            if match is not None and match[1] == name[2]:
                changed = entry.stat(follow_symlinks=False).st_mtime
                if changed >= since_s:
                    found.append((changed, entry.path))
    except OSError:
        return None
    return Path(max(found)[1]) if found else None


def read_last(path: Path) -> bytes:
    """The body of such a file, bounded.

    Raises:
        NotFoundError, DeniedError: It cannot be opened.
        BadDataError: It is not a file, or a far too large one.
    """
    try:
        # A pipe of that name must not be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise BadDataError(f"{path} is not a file")
            body = file.read(MAX_BYTES + 65_536)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise DeniedError(f"{path} cannot be read: {reason}") from None
    if len(body) > MAX_BYTES + 4096:
        raise BadDataError(f"{path} is too large for a last snapshot")
    return body
