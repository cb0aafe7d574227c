"""Where an API server listens, from its open sockets and its command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtop.attach.outside import base_url, shown_host, visible
from kvtop.attach.procfs import Listener, Proc, parse_local_addresses
from kvtop.attach.titles import DEFAULT_PORT, ServerArgs

_MAX_SOCKET_PATH = 107
"""Bytes that the path of a Unix socket may have: unix(7)."""
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - read, never bound
_LOOPBACK = ("127.", "::1", "::ffff:127.")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server answers."""

    key: str | None = None
    """`host:port` or `unix:/path`. None: nowhere."""
    url: str | None = None
    """Base address. None: none, or not reachable from this network namespace."""
    uds: Path | None = None
    """Unix socket as reached from here."""
    listening: bool = False
    """The socket was seen open."""
    unreadable: tuple[int, ...] = ()
    """Processes whose open files this user may not read."""
    note: str = ""
    """Why there is no url, one plain line."""


def address_of(proc: Proc, pids: Sequence[int], args: ServerArgs, *, foreign_net: bool) -> Address:
    """Address of the server whose API processes are `pids` (not empty).

    Args:
        proc: The /proc tree.
        pids: API server processes; they share their listening socket.
        args: Their command line; it decides where the sockets cannot be read.
        foreign_net: They live in another network namespace.
    """
    if args.headless:
        return Address()
    if args.uds:
        return _unix(proc, pids[0], args.uds, foreign_net=foreign_net)
    unreadable: list[int] = []
    inodes: set[str] = set()
    for pid in pids:
        opened = proc.socket_inodes(pid)
        if opened is None:
            unreadable.append(pid)
        else:
            inodes |= opened
    listeners = proc.listeners(pids[0])
    chosen = choose([one for one in listeners if one.inode in inodes], args.port)
    wanted = args.port or DEFAULT_PORT
    if chosen is None and unreadable:
        chosen = choose([one for one in listeners if one.port == wanted], args.port)
    host = chosen.address if chosen else args.host or "0.0.0.0"  # noqa: S104
    port = chosen.port if chosen else wanted
    listening, closed = chosen is not None, tuple(unreadable)
    reachable = _reachable(proc, pids[0], host, foreign_net=foreign_net)
    if reachable is None:
        note = (
            f"port {port} of pid {pids[0]} is open in another network namespace only; "
            "name the address that is mapped to it with --url"
        )
        return Address(None, None, None, listening, closed, note)
    name = shown_host(reachable)
    if name is None:
        note = f"--host {visible(reachable)!r} of pid {pids[0]} is not a host that can be asked"
        return Address(None, None, None, listening, closed, note)
    url = base_url("https" if args.tls else "http", name, port, args.root_path)
    note = ""
    if url is None:
        path = visible(args.root_path)
        note = f"--root-path {path!r} of pid {pids[0]} cannot be part of a URL as it is"
    return Address(f"{name}:{port}", url, None, listening, closed, note)


def _unix(proc: Proc, pid: int, uds: str, *, foreign_net: bool) -> Address:
    """Address of a server on a Unix socket."""
    inside = Path(proc.root) / str(pid) / "root" / uds.lstrip("/")
    path = inside if foreign_net else Path(uds)
    try:
        fits = len(os.fsencode(uds)) <= _MAX_SOCKET_PATH
        listening = fits and path.exists()
    except (OSError, ValueError):
        fits = listening = False
    if not fits:
        note = f"--uds {visible(uds)!r} of pid {pid} cannot be the path of a Unix socket"
        return Address(note=note)
    return Address(f"unix:{uds}", None, path, listening)


def choose(listeners: Sequence[Listener], port: int | None) -> Listener | None:
    """The HTTP socket among the listening ones of an API server.

    The port of the command line, else vLLM's default, else the lowest: other sockets
    of the process have ports that the kernel chose, which are high.
    """
    for wanted in (port, DEFAULT_PORT):
        for one in listeners:
            if one.port == wanted:
                return one
    return min(listeners, key=lambda one: one.port, default=None)


def _reachable(proc: Proc, pid: int, host: str, *, foreign_net: bool) -> str | None:
    """The host to connect to from here; None where only the other namespace can reach it."""
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    if not foreign_net:
        return _ANY.get(host, host)
    if host.startswith(_LOOPBACK):
        return None
    if host not in _ANY:
        return host
    own = parse_local_addresses(proc.text(f"{pid}/net/fib_trie"))
    return own[0] if own else None
