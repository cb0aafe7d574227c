"""Back end with frida (the extra `attach`): its agent's own thread runs the code.

frida makes a thread in the target and calls Python there under PyGILState_Ensure. It is
used in a process of its own, so that its memory does not stay in kvtop.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from kvtop.attach.ability import NO_PTRACE, Ability, AttachError, Injectee
from kvtop.attach.helper import last_line, run_helper
from kvtop.errors import ExitCode

DEADLINE_S = 60.0
"""For frida to start, attach, run the code and leave."""

SCRIPT = """
const find = name => {
  const address = Module.findGlobalExportByName ? Module.findGlobalExportByName(name)
                                                : Module.findExportByName(null, name);
  if (address === null) throw new Error('no function ' + name);
  return address;
};
rpc.exports = {
  run(code) {
    if (new NativeFunction(find('Py_IsInitialized'), 'int', [])() === 0)
      throw new Error('Python is not up yet');
    const ensure = new NativeFunction(find('PyGILState_Ensure'), 'int', []);
    const release = new NativeFunction(find('PyGILState_Release'), 'void', ['int']);
    const execute = new NativeFunction(find('PyRun_SimpleString'), 'int', ['pointer']);
    const text = Memory.allocUtf8String(code);
    const state = ensure();
    try {
      return execute(text);
    } finally {
      release(state);
    }
  }
};
"""
"""What frida's agent runs in the target; the names of frida 17, and those before."""

# frida goes on removing its agent after `detach` has returned, from outside and by ptrace. To
# leave in the middle of that crashes the target (seen with frida 17), so it is waited for.
_MAIN = """
import sys, time

pid, script = int(sys.argv[1]), sys.argv[2]
# Isolated as it is, this interpreter does not look where frida may be: in the user's site folder.
sys.path.append(sys.argv[3])
import frida

def agent_is_there():
    try:
        with open("/proc/%d/maps" % pid) as maps:
            return "frida" in maps.read()
    except OSError:
        return False

session = frida.get_local_device().attach(pid)
try:
    loaded = session.create_script(script)
    loaded.load()
    calls = getattr(loaded, "exports_sync", None) or loaded.exports
    result = calls.run(sys.stdin.read())
    loaded.unload()
finally:
    session.detach()
    end = time.monotonic() + 20.0
    while agent_is_there() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.5)
    if hasattr(frida, "shutdown"):
        frida.shutdown()
sys.exit(0 if result == 0 else 3)
"""


class FridaBackend:
    """See the module."""

    name = "frida"

    def available(self, target: Injectee) -> Ability:
        """Whether frida is installed beside kvtop."""
        del target
        return self.installed()

    @staticmethod
    def installed() -> Ability:
        """The same, whatever the target."""
        if importlib.util.find_spec("frida") is None:
            return Ability(False, "not installed: pip install 'vllm-kvtop[attach]'")
        return Ability(True, "")

    def run(self, target: Injectee, code: str) -> None:
        """Runs `code` on frida's thread in the target.

        Raises:
            AttachError: It did not run.
        """
        done = run_helper(
            [sys.executable, "-I", "-c", _MAIN, str(target.pid), SCRIPT, _folder()],
            code,
            DEADLINE_S,
            "frida",
        )
        if done.code == 0:
            return
        denied = "ermission" in done.output or "not permitted" in done.output
        raise AttachError(
            f"frida on process {target.pid}: {last_line(done.output)}",
            NO_PTRACE if denied else "",
            ExitCode.DENIED if denied else ExitCode.UNREACHABLE,
        )


def _folder() -> str:
    """Where frida is installed."""
    spec = importlib.util.find_spec("frida")
    origin = spec.origin if spec is not None else None
    return str(Path(origin).parents[1]) if origin else ""
