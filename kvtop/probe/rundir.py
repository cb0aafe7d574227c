"""The private directory of the probe sockets, and who may come in."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct

SOCKET_NAME = re.compile(r"(engine|api|worker)-([0-9]{1,10})\.sock")


class RefusedError(Exception):
    """The directory or socket cannot be used safely; the text says why."""


def default_directory() -> str:
    """`$KVTOP_DIR`, else `/tmp/kvtop-<uid>`."""
    return os.environ.get("KVTOP_DIR") or f"/tmp/kvtop-{os.geteuid()}"  # noqa: S108


def prepare(directory: str) -> None:
    """Makes the directory, or checks that it is ours alone.

    Raises:
        RefusedError: It is a link, belongs to somebody else or others can enter it.
    """
    made_here = directory == f"/tmp/kvtop-{os.geteuid()}"  # noqa: S108
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise RefusedError(f"cannot make {directory}: {error.strerror}") from error
    info = os.lstat(directory)
    if not stat.S_ISDIR(info.st_mode):
        raise RefusedError(f"{directory} is not a directory")
    if info.st_uid != os.geteuid():
        raise RefusedError(f"{directory} belongs to user {info.st_uid}")
    if info.st_mode & 0o077:
        # A directory that the user named may serve other things; only our own is tightened.
        if not made_here:
            raise RefusedError(f"{directory} can be entered by others; it must have mode 0700")
        os.chmod(directory, 0o700)


def sweep(directory: str) -> None:
    """Removes sockets that nobody listens on any more.

    A process of another pid namespace may share the directory, so a pid that is not found
    here is not enough.
    """
    for name in os.listdir(directory):
        match = SOCKET_NAME.fullmatch(name)
        if match is None or _alive(int(match[2])):
            continue
        path = os.path.join(directory, name)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0.2)
            try:
                probe.connect(path)
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:
                    remove(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything; the state is the letter behind it.
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def remove(path: str) -> None:
    """Removes a socket file, if it is there."""
    try:
        os.unlink(path)
    except OSError:
        pass


def listen(directory: str, role: str) -> tuple[socket.socket, str]:
    """A listening socket `<role>-<pid>.sock` with mode 0600.

    Raises:
        RefusedError: It cannot be made there.
    """
    prepare(directory)
    try:
        sweep(directory)
    except OSError:
        pass
    path = os.path.join(directory, f"{role}-{os.getpid()}.sock")
    remove(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Nobody else can enter the directory, so the moment before chmod is private too.
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen(16)
        server.setblocking(False)
    except OSError as error:
        server.close()
        raise RefusedError(f"cannot listen on {path}: {error}") from error
    return server, path


def admitted(connection: socket.socket) -> bool:
    """Whether the peer is the same user, or root."""
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return False
    uid = struct.unpack("3i", packed)[1]
    return uid in (0, os.geteuid())


def listen_tcp(address: str) -> socket.socket:
    """A listening TCP socket for `host:port`; an empty host is loopback.

    Raises:
        RefusedError: The address is no address, or cannot be listened on.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    shown = repr(address[:80])
    if not (port.isascii() and port.isdecimal() and len(port) <= 5):
        raise RefusedError(f"KVTOP_PROBE_TCP={shown} is not host:port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
        server.listen(16)
        server.setblocking(False)
    except (OSError, OverflowError, ValueError) as error:
        # ValueError: a host name that cannot be one.
        server.close()
        raise RefusedError(f"cannot listen on {shown}: {error}") from error
    return server
