"""Puts the probe into running processes, and takes it out again."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtop import __version__
from kvtop.attach import deliver
from kvtop.attach.ability import AttachError, Backend, SimulatedError
from kvtop.attach.deliver import Delivery, may_look
from kvtop.attach.hello import Hello, ask
from kvtop.attach.native import NativeBackend
from kvtop.attach.outside import visible
from kvtop.attach.paths import kvtop_dir_of, list_sockets, probe_folders
from kvtop.attach.payload import NOTE_PREFIX, NOTHING_FOUND, attach_code, detach_code
from kvtop.attach.procfs import Proc
from kvtop.attach.remote import RemoteExecBackend
from kvtop.attach.servers import FoundProcess
from kvtop.attach.titles import Role, classify
from kvtop.attach.with_frida import FridaBackend
from kvtop.attach.with_gdb import GdbBackend
from kvtop.errors import ExitCode

_MAX_NOTE = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done to one process."""

    pid: int
    """The process, as seen from here."""
    role: str
    """`engine`, `api` or `worker`."""
    changed: bool
    """The probe was put in or taken out."""
    text: str
    """One plain phrase."""


def backends() -> tuple[Backend, ...]:
    """All back ends, in the order in which they are tried."""
    return (RemoteExecBackend(), NativeBackend(), FridaBackend(), GdbBackend())


def attach(
    process: FoundProcess,
    role: str,
    *,
    among: Sequence[Backend] | None = None,
    replace: bool = False,
    any_process: bool = False,
) -> Outcome:
    """Puts the probe into a process, and waits until it answers. Blocking, seconds.

    Args:
        process: The process.
        role: What it is, for messages.
        among: Back ends to try, in order. None: all.
        replace: Put a probe of this version in the place of one of another version.
        any_process: Also where no vLLM is loaded.

    Raises:
        SimulatedError: It is an engine of `kvtop demo`.
        AttachError: The probe is not in; the process goes on as it was.
    """
    running = _hello(process)
    if _simulated(process, running):
        raise SimulatedError(process.pid)
    if running is not None and (running.version == __version__ or not replace):
        same = running.version == __version__
        more = "" if same else f"; this is kvtop {__version__}, --replace puts its own in"
        return Outcome(
            process.pid,
            role,
            False,
            f"a probe runs in it already (kvtop {running.version}, {running.loaded_by}){more}",
        )
    _check_folder(process)
    started = time.monotonic()
    # It gives up by itself, and does not begin later than that, before it is given up here.
    give_up_s = deliver.DEADLINE_S * 0.8
    code = attach_code(
        replace=replace,
        any_process=any_process,
        give_up_s=give_up_s,
        expires_s=time.time() + give_up_s,
    )
    delivery = Delivery(process, code, lambda: _hello(process), lambda: _failure(process))
    hello, way = delivery.run(backends() if among is None else among)
    took = time.monotonic() - started
    if hello.loaded_by != "attach":
        return Outcome(process.pid, role, False, f"a probe came up by itself ({hello.loaded_by})")
    state = "" if hello.state == "ok" else f", {hello.state}: {hello.reason}"
    return Outcome(process.pid, role, True, f"probe attached with {way} in {took:.1f} s{state}")


def detach(process: FoundProcess, role: str, *, among: Sequence[Backend] | None = None) -> Outcome:
    """Takes the probe out of a process: methods restored, thread ended, socket gone.

    Args:
        process: The process.
        role: What it is, for messages.
        among: Back ends to try, in order. None: all.

    Raises:
        SimulatedError: It is an engine of `kvtop demo`.
        AttachError: It is still in.
    """
    if _simulated(process, None):
        raise SimulatedError(process.pid)
    may_look(process)
    socket = socket_of(process)
    if socket is None:
        return Outcome(process.pid, role, False, "there is no probe in it")
    if _simulated(process, ask(socket)):
        raise SimulatedError(process.pid)

    def gone() -> bool | None:
        return None if socket.exists() else True

    delivery = Delivery(process, detach_code(), gone, lambda: _failure(process))
    _, way = delivery.run(backends() if among is None else among)
    return Outcome(process.pid, role, True, f"probe taken out with {way}")


def folders_of(process: FoundProcess) -> list[Path]:
    """Directories where the probe of a process may listen and leave its note."""
    proc = Proc()
    foreign = proc.link(f"{process.pid}/ns/mnt") != proc.link("self/ns/mnt")
    given = kvtop_dir_of(proc, process.pid)
    return probe_folders(proc, process.pid, process.uid, given, foreign=foreign)


def _check_folder(process: FoundProcess) -> None:
    """Sees before anything is put in whether the probe can listen in its directory.

    The probe refuses a directory that it does not have for itself alone: `rundir.prepare`.

    Raises:
        AttachError: It cannot.
    """
    given = kvtop_dir_of(Proc(), process.pid)
    if given is not None and not given.startswith("/"):
        return  # It counts from the directory that the process is in, which may change.
    folder = folders_of(process)[0]
    try:
        about = folder.lstat()
    except (OSError, ValueError):
        return  # The probe makes it, or says why it cannot.
    shown = visible(given or f"/tmp/kvtop-{process.uid}", 200)  # noqa: S108 - only named
    where = f"process {process.pid} is to keep its probe's socket in {shown}, which"
    remedy = "mend it, or start the server with another KVTOP_DIR"
    if not stat.S_ISDIR(about.st_mode):
        raise AttachError(f"{where} is not a directory", remedy, ExitCode.DENIED)
    if process.uid not in {-1, about.st_uid}:
        what = f"{where} belongs to user {about.st_uid} and not to {process.uid}"
        raise AttachError(what, remedy, ExitCode.DENIED)
    # The directory of the probe's own naming is tightened by the probe.
    if given is not None and about.st_mode & 0o077:
        raise AttachError(f"{where} others can enter", f"chmod 700 {shown}", ExitCode.DENIED)


def _code_of(process: FoundProcess, note: str) -> ExitCode:
    """Exit code for what the target wrote: a directory that it cannot use is a refusal."""
    if note == NOTHING_FOUND:
        return ExitCode.UNREACHABLE
    folder = kvtop_dir_of(Proc(), process.pid) or "/tmp/kvtop-"  # noqa: S108 - only compared
    return ExitCode.DENIED if visible(folder, _MAX_NOTE) in note else ExitCode.BAD_DATA


def socket_of(process: FoundProcess) -> Path | None:
    """Socket of the probe of a process, looked for now; None: there is none."""
    folders = [process.probe_socket.parent] if process.probe_socket else []
    for folder in [*folders, *folders_of(process)]:
        for file in list_sockets(folder):
            if file.ns_pid == process.ns_pid and file.uid in {process.uid, 0}:
                return file.path
    return None


def _hello(process: FoundProcess) -> Hello | None:
    """What the probe of a process answers now; None: nothing answers."""
    path = socket_of(process)
    return None if path is None else ask(path)


def _simulated(process: FoundProcess, hello: Hello | None) -> bool:
    """Whether it is an engine of `kvtop demo`, by its command line or by what its probe says.

    kvtop knows such an engine by its probe alone: without it, it would look gone.
    """
    if hello is not None and hello.loaded_by == "demo":
        return True
    title = classify(Proc().cmdline(process.pid))
    return title is not None and title.role is Role.DEMO


def _failure(process: FoundProcess) -> AttachError | None:
    """What our code has left word of; None: nothing."""
    note = _take_note(process)
    if not note:
        return None
    return AttachError(f"process {process.pid}: {note}", code=_code_of(process, note))


def _take_note(process: FoundProcess) -> str:
    """The note that our code left in the target's private directory; it is removed.

    Empty: there is none. Control characters are made visible: it is text from outside.
    """
    for folder in folders_of(process):
        path = folder / f"{NOTE_PREFIX}{process.ns_pid}.txt"
        text = read_private(path, process.uid)
        if text:
            return visible(text, _MAX_NOTE)
    return ""


def read_private(path: Path, uid: int) -> str:
    """A small file of this user's, which is removed. Empty: there is none."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(handle).st_uid != uid:
                return ""
            text = os.read(handle, _MAX_NOTE).decode("utf-8", "replace")
        finally:
            os.close(handle)
        path.unlink()
    except OSError:
        return ""
    return text
