"""Starts the probe in this process, stops it, and says how it is doing.

One probe a process. After a fork the child has no thread of ours, and starts its own.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvtop.probe import find, rundir, runtime
from kvtop.probe.engine import EngineRole
from kvtop.probe.facts import EngineFacts
from kvtop.probe.server import Connection, Request, Server
from kvtop.probe.version import VERSION

STARTING_PERIOD_S = 0.25
"""How often the role is looked for in the first two minutes."""
LATER_PERIOD_S = 3.0
"""And after that."""
GIVE_UP_S = 600.0
"""A process without a role by then is none of vLLM's: the thread ends."""
GC_TRIES_S = (60.0, 180.0)
"""When the slow search through all objects is tried."""

logger = logging.getLogger("kvtop.probe")


class Probe:
    """The probe of one process.

    Args:
        loaded_by: `plugin`, `attach` or `demo`.
        directory: Where the socket goes; None: `rundir.default_directory()`.
        make_role: Gives the role, or None while there is none yet.
    """

    def __init__(
        self,
        loaded_by: str,
        directory: str | None,
        make_role: Callable[[Probe], Any],
    ) -> None:
        self.loaded_by = loaded_by
        self.directory = directory or rundir.default_directory()
        self.pid = os.getpid()
        self.since = time.monotonic()
        self.state = "starting"
        self.reason = ""
        self.socket_path = ""
        self.role: Any = None
        self.ready = threading.Event()
        self._make_role = make_role
        self._stop = threading.Event()
        self._server: Server | None = None
        self._thread = threading.Thread(target=self._run, name="kvtop-probe", daemon=True)

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Takes everything out: methods restored, socket removed, thread ended.

        Args:
            timeout_s: How long to wait for the thread.

        Returns:
            Whether the thread has ended.
        """
        self._stop.set()
        server = self._server
        if server is not None:
            server.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def disown(self) -> None:
        """In a forked child: closes what belongs to the parent, and touches nothing else."""
        server = self._server
        if server is not None:
            server.abandon()

    def wake(self) -> None:
        """Wakes the thread; called from the engine's."""
        server = self._server
        if server is not None:
            server.wake()

    def status(self) -> dict[str, Any]:
        """What is known of this probe, for whoever loaded it."""
        return {
            "kvtop": VERSION,
            "pid": self.pid,
            "role": None if self.role is None else self.role.name,
            "state": self.state,
            "reason": self.reason,
            "socket": self.socket_path,
            "loaded_by": self.loaded_by,
        }

    def _run(self) -> None:
        try:
            if self._find_role():
                self._serve()
        except rundir.RefusedError as error:
            self.reason = str(error)
            logger.warning("kvtop: no probe in process %d: %s", self.pid, error)
        except Exception as error:
            self.reason = f"{type(error).__name__}: {error}"
        finally:
            self.state = "stopped"
            self._clean_up()
            self.ready.set()

    def _find_role(self) -> bool:
        while not self._stop.is_set():
            try:
                self.role = self._make_role(self)
            except Exception as error:
                # Objects under construction may do anything; they are looked at again.
                self.reason = f"{type(error).__name__}: {error}"
            if self.role is not None:
                find.forget()
                self.reason = ""
                return True
            waited = time.monotonic() - self.since
            if waited > GIVE_UP_S:
                find.forget()
                self.reason = "this process has no part of an engine"
                return False
            self._stop.wait(STARTING_PERIOD_S if waited < 120.0 else LATER_PERIOD_S)
        return False

    def _serve(self) -> None:
        token = os.environ.get("KVTOP_PROBE_TOKEN", "")
        address = os.environ.get("KVTOP_PROBE_TCP", "")
        server = Server(self._handle, token)
        self._server = server
        listener, self.socket_path = rundir.listen(self.directory, self.role.name)
        server.add_listener(listener)
        # Only one process of a server can have the address, and it is the engine's.
        if address and self.role.name == "engine":
            if token:
                try:
                    server.add_listener(rundir.listen_tcp(address))
                except rundir.RefusedError as error:
                    logger.warning("kvtop: %s", error)
            else:
                logger.warning("kvtop: KVTOP_PROBE_TCP needs KVTOP_PROBE_TOKEN; not listening")
        self.role.start()
        self.state = "ok"
        if "multiprocessing.util" in sys.modules:
            # Processes that multiprocessing starts run these at their end, and not atexit.
            sys.modules["multiprocessing.util"].Finalize(None, _at_exit, exitpriority=1)
        self.ready.set()
        while not self._stop.is_set():
            server.poll(self.role.timeout_s())
            self.role.work()

    def _handle(self, connection: Connection, request: Request) -> None:
        if request.path == ["v1", "hello"]:
            connection.answer(200, runtime.hello(self.role, self.loaded_by, self.since))
        elif request.path[:1] != ["v1"] or not self.role.handle(connection, request):
            connection.answer(404, b'{"error":"no such path"}')

    def _clean_up(self) -> None:
        if self.role is not None:
            try:
                self.role.stop()
            except Exception as error:
                self.reason = f"{type(error).__name__}: {error}"
        if self.socket_path:
            rundir.remove(self.socket_path)
            try:
                # vLLM ends its engine cores and workers with SIGKILL: their sockets are left.
                rundir.sweep(self.directory)
            except OSError:
                pass
        server, self._server = self._server, None
        if server is not None:
            server.close()


_lock = threading.Lock()
_current: Probe | None = None
_hooked = False


def current() -> Probe | None:
    """The probe of this process, if one was started here."""
    probe = _current
    return probe if probe is not None and probe.pid == os.getpid() else None


def start(loaded_by: str = "plugin", directory: str | None = None) -> dict[str, Any]:
    """Starts the probe in this vLLM process; does nothing when it runs already.

    Args:
        loaded_by: `plugin` or `attach`.
        directory: Where the socket goes; None: `$KVTOP_DIR` or `/tmp/kvtop-<uid>`.

    Returns:
        `Probe.status()`, and `already`: whether it ran before.
    """
    return _begin(Probe(loaded_by, directory, _discover))


def install(
    engine_core_like: Any,
    index: int = 0,
    loaded_by: str = "demo",
    directory: str | None = None,
    timeout_s: float = 5.0,
) -> Probe:
    """Starts the probe on an engine that the caller has in hand.

    Args:
        engine_core_like: Has `.scheduler` with `.requests` and `.kv_cache_manager`; optional
            `.model`, `.vllm_version`, `.block_bytes`.
        index: Data-parallel rank.
        loaded_by: What `/v1/hello` says.
        directory: Where the socket goes; None: `$KVTOP_DIR` or `/tmp/kvtop-<uid>`.
        timeout_s: How long to wait until it listens.

    Raises:
        LookupError: There is no block pool in it.
        RuntimeError: A probe runs in this process already, or it could not listen.
    """
    facts = EngineFacts(engine_core_like)
    probe = Probe(
        loaded_by,
        directory,
        lambda p: EngineRole(facts, index, p.wake, loaded_by == "demo", p.directory),
    )
    if _begin(probe)["already"]:
        raise RuntimeError("a probe runs in this process already")
    probe.ready.wait(timeout_s)
    if probe.state != "ok":
        raise RuntimeError(probe.reason or "the probe did not start in time")
    return probe


def stop() -> dict[str, Any]:
    """Takes the probe out of this process.

    Returns:
        `Probe.status()` afterwards, and `already`: whether there was none.
    """
    global _current  # noqa: PLW0603
    with _lock:
        probe = current()
        if probe is None:
            return {"kvtop": VERSION, "pid": os.getpid(), "state": "stopped", "already": True}
        ended = probe.stop()
        if ended:
            _current = None
        return {**probe.status(), "already": False}


def status() -> dict[str, Any] | None:
    """`Probe.status()` of this process's probe; None: there is none."""
    probe = current()
    return None if probe is None else probe.status()


def _begin(probe: Probe) -> dict[str, Any]:
    global _current, _hooked  # noqa: PLW0603
    with _lock:
        running = current()
        if running is not None and running.state != "stopped":
            return {**running.status(), "already": True}
        _current = probe
        if not _hooked:
            _hooked = True
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_after_fork)
        probe.start()
    return {**probe.status(), "already": False}


def _discover(probe: Probe) -> Any:
    engine = find.find_engine()
    if engine is None:
        tries = [t for t in GC_TRIES_S if t <= time.monotonic() - probe.since]
        if len(tries) > getattr(probe, "gc_tries", 0):
            probe.gc_tries = len(tries)  # type: ignore[attr-defined]
            engine = find.find_engine_by_gc()
    if engine is not None:
        return EngineRole(EngineFacts(engine), None, probe.wake, directory=probe.directory)
    processor = find.find_front_end()
    if processor is not None:
        return runtime.front_end(processor)
    found = find.find_worker()
    return None if found is None else runtime.worker(found)


def _at_exit() -> None:
    probe = current()
    if probe is not None:
        probe.stop(timeout_s=0.5)


def _after_fork() -> None:
    """In a forked child: the parent's probe is not ours, and vLLM loads no plugin again."""
    global _current, _lock  # noqa: PLW0603
    _lock = threading.Lock()
    before = _current
    _current = None
    if before is None or before.state == "stopped":
        return
    try:
        before.disown()
        find.inherit(sys._getframe().f_back)
        if before.loaded_by == "plugin":
            start(before.loaded_by, before.directory)
    except Exception:
        pass
