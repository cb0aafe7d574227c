"""What the back ends have in common: the interface, what they act on, how they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtop.errors import ExitCode, KvtopError

NO_PTRACE = (
    "run kvtop as root or as the user of the server, give its container the capability "
    "SYS_PTRACE, or set kernel.yama.ptrace_scope to 0"
)
"""What allows one process to look into another."""


class AttachError(KvtopError):
    """Code could not be put into a process. The process is as it was.

    Args:
        what: What went wrong and where, one plain sentence without a full stop.
        remedy: What to do about it; may be empty.
        code: Exit code of a command that ends with this.
    """

    def __init__(self, what: str, remedy: str = "", code: ExitCode = ExitCode.UNREACHABLE) -> None:
        super().__init__(what, remedy)
        self.code = code


class SimulatedError(AttachError):
    """The process is an engine of `kvtop demo`, which is left as it is.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        what = f"process {pid} is simulated by kvtop demo"
        super().__init__(what, "end it there", ExitCode.USAGE)


@dataclass(frozen=True, slots=True)
class Ability:
    """Whether a back end can reach a process."""

    ok: bool
    """It can."""
    reason: str
    """Why not, one plain phrase; empty when it can."""


@dataclass(frozen=True, slots=True)
class Injectee:
    """A process that code is to be put into."""

    pid: int
    """As seen from here."""
    start_ticks: int
    """Start time: with the pid it names the process for good."""
    uid: int
    """Its user, as seen from here."""
    python: tuple[int, int] | None = None
    """Version of its Python. None: not known."""
    executable: str | None = None
    """Its Python executable, as reached from here. None: not readable."""
    container: bool = False
    """It lives in another mount or pid namespace."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Code that the target runs only when its main thread gets to it."""

    begun: Callable[[], bool]
    """Whether it has begun."""
    withdraw: Callable[[], None]
    """Makes it do nothing where it has not begun; never raises."""


class Backend(Protocol):
    """One way of running Python code in a process."""

    @property
    def name(self) -> str:
        """Short name, for messages and `--via`."""

    def available(self, target: Injectee) -> Ability:
        """Whether it can reach this process; changes nothing there."""

    def run(self, target: Injectee, code: str) -> Waiting | None:
        """Starts the code there. Blocking, some seconds at most; does not wait for its effect.

        Args:
            target: The process.
            code: Python source text that only starts a daemon thread, and never raises.

        Returns:
            How to see whether it has begun. None: it runs.

        Raises:
            AttachError: It was not started, and the process is as it was.
        """
