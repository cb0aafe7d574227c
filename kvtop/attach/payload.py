"""The text that is run inside the target: the whole probe, as one piece of source.

It recreates the `kvtop.probe` modules in the target's `sys.modules` from their source
text. It reads no file there and leaves none, but for a private note of what went wrong.
"""

from __future__ import annotations

import base64
import hashlib
import json
import textwrap
import zlib
from functools import lru_cache
from importlib import resources

from kvtop import __version__

NOTE_PREFIX = "attach-"
"""Name of the note beside the probe sockets: this, the process's own pid, and `.txt`."""
NOTHING_FOUND = "it is still starting, or has no part of an engine: there is nothing to watch yet"
"""The note where the probe has found nothing in time."""

LEAVE = """
import os, sys

def leave(name, data):
    # Beside the probe's socket, readable by this user only; whoever reads it takes it away.
    folder = os.environ.get("KVTOP_DIR") or "/tmp/kvtop-%d" % os.geteuid()
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        pass
    about = os.lstat(folder)
    if about.st_uid != os.geteuid() or about.st_mode & 0o022:
        return
    path = os.path.join(folder, name)
    part = path + ".part"
    try:
        os.unlink(part)
    except FileNotFoundError:
        pass
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, data)
    finally:
        os.close(handle)
    os.rename(part, path)
"""
"""Defines how code that runs in a target leaves a note there, whole or not at all."""

_COMMON = (
    LEAVE
    + """
def note(text):
    try:
        leave("attach-%d.txt" % os.getpid(), text.encode("utf-8", "replace")[:500])
    except Exception:
        pass
"""
)

_ATTACH = (
    _COMMON
    + """
def load():
    import importlib.abc, importlib.util

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            if name not in sources:
                return None
            return importlib.util.spec_from_loader(
                name, self, is_package=sources[name][0], origin="kvtop attach"
            )

        def exec_module(self, module):
            name = module.__name__
            code = compile(sources[name][1], "<%s>" % name, "exec", dont_inherit=True)
            module.__kvtop_digest__ = digest
            exec(code, module.__dict__)

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        for name in sorted(sources):
            if name != "kvtop" or "kvtop" not in sys.modules:
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)

def main():
    import importlib, time

    if time.time() > expires_s:
        return None  # A process that was stuck: nobody waits for this any more.
    vllm = sys.modules.get("vllm")
    if vllm is None and not any_process:
        return note("it is not a vLLM process: no module of that name is loaded")
    if vllm is not None and not any(n.startswith("vllm.v1.") for n in list(sys.modules)):
        old = getattr(vllm, "__version__", "of unknown version")
        return note("vLLM %s has no V1 engine in this process" % old)
    control = sys.modules.get("kvtop.probe.control")
    running = control.status() if control is not None else None
    if running is not None and running.get("state") == "stopped":
        running = None
    if running is not None and running.get("kvtop") != kvtop_version and not replace:
        return note("a probe of version %s is in it already" % running.get("kvtop"))
    if getattr(control, "__kvtop_digest__", None) != digest and (running is None or replace):
        if running is not None:
            control.stop()
        for name in [n for n in sys.modules if n.split(".")[:2] == ["kvtop", "probe"]]:
            del sys.modules[name]
        load()
        control = sys.modules["kvtop.probe.control"]
    control.start(loaded_by="attach")
    probe = control.current()
    if probe is None:
        return None
    if not probe.ready.wait(give_up_s):
        if probe.loaded_by == "attach":
            control.stop()
        return note(nothing)
    if probe.state == "stopped" and probe.reason:
        note(probe.reason)
"""
)

_DETACH = (
    _COMMON
    + """
def main():
    control = sys.modules.get("kvtop.probe.control")
    if control is None:
        return note("there is no probe in it")
    if control.stop().get("state") != "stopped":
        note("the probe did not stop")
"""
)

_RUN = """
import threading

try:
    # One at a time, whichever way and however often the text came in.
    with sys.__dict__.setdefault("_kvtop_attach_lock", threading.Lock()):
        main()
except BaseException as error:
    note("%s: %s" % (type(error).__name__, error))
"""

# What runs on the borrowed or new thread: it only starts a daemon thread. A name of its own and
# nothing left in __main__, since PyRun_SimpleString runs there.
_BOOT = """
try:
    (lambda: __import__("threading").Thread(
        target=lambda: exec(__import__("zlib").decompress(__import__("base64").b64decode({data!r})),
                            {{"__name__": "kvtop_attach"}}),
        name="kvtop-attach", daemon=True).start())()
except BaseException:
    pass
"""


def probe_sources() -> dict[str, tuple[bool, str]]:
    """Module name to (is a package, source text) of the probe, and of its parent package."""
    found: dict[str, tuple[bool, str]] = {
        "kvtop": (True, f"__version__ = {__version__!r}\n"),
    }
    for entry in sorted(resources.files("kvtop.probe").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".py"):
            stem = entry.name[:-3]
            name = "kvtop.probe" if stem == "__init__" else f"kvtop.probe.{stem}"
            found[name] = (stem == "__init__", entry.read_text(encoding="utf-8"))
    return found


def digest_of(sources: dict[str, tuple[bool, str]]) -> str:
    """A name for exactly this source text."""
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]


def attach_code(
    *,
    replace: bool = False,
    any_process: bool = False,
    give_up_s: float = 25.0,
    expires_s: float = float("inf"),
) -> str:
    """Source text that starts the probe in the process that runs it.

    Running it where the same probe runs already does nothing.

    Args:
        replace: Take out a running probe of another version first.
        any_process: Do not ask for vLLM's modules; for tests and simulated engines.
        give_up_s: A probe that finds nothing to watch in that time is taken out again.
        expires_s: Unix time after which it does nothing.
    """
    options = {
        "kvtop_version": __version__,
        "replace": replace,
        "any_process": any_process,
        "give_up_s": give_up_s,
        "nothing": NOTHING_FOUND,
    }
    head = "".join(f"{name} = {value!r}\n" for name, value in options.items())
    return boot(f"{_sources()}{head}expires_s = float({str(expires_s)!r})\n{_ATTACH}{_RUN}")


@lru_cache(maxsize=1)
def _sources() -> str:
    sources = probe_sources()
    return f"sources = {sources!r}\ndigest = {digest_of(sources)!r}\n"


def detach_code() -> str:
    """Source text that takes the probe out of the process that runs it.

    The modules stay, unused: a second attach of the same probe uses them again, so that
    attaching and detaching many times leaves nothing behind each time.
    """
    return boot(_DETACH + _RUN)


def boot(text: str) -> str:
    """Pure ASCII source that runs `text` on a daemon thread and returns at once."""
    data = base64.b64encode(zlib.compress(textwrap.dedent(text).encode(), 9)).decode("ascii")
    return _BOOT.format(data=data)
