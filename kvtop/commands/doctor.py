"""`kvtop doctor`: what kvtop can see on this machine, why not the rest, and what mends it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtop import __version__
from kvtop.attach.ability import NO_PTRACE, AttachError
from kvtop.attach.deliver import able, ready
from kvtop.attach.elf import python_version
from kvtop.attach.find import Found, find_servers, process_facts
from kvtop.attach.hello import ask
from kvtop.attach.probe import backends
from kvtop.attach.procfs import Proc
from kvtop.attach.select import members
from kvtop.attach.servers import FoundProcess, FoundServer
from kvtop.errors import ExitCode
from kvtop.sources.base import SourceError, one_line

OK, INFO, DEGRADED = "ok", "info", "degraded"
"""States of a check; only `degraded` changes the exit code."""

_CAP_SYS_PTRACE = 19
_DEADLINE_S = 8.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    section: str
    """`machine`, `gpus`, `tools`, or the key of a server."""
    name: str
    """What was looked at."""
    state: str
    """`ok`, `info` or `degraded`."""
    text: str
    """What was seen, one plain phrase."""
    remedy: str = ""
    """The command or setting that mends it; empty when there is nothing to mend."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `kvtop doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Looks at everything once, and prints a line for each thing.

    Returns:
        DEGRADED when something cannot be seen, else OK.
    """
    checks = asyncio.run(examine(find_servers()))
    degraded = any(check.state == DEGRADED for check in checks)
    if options.json:
        rows = [asdict(check) for check in checks]
        print(json.dumps({"kvtop": __version__, "ok": not degraded, "checks": rows}))
    else:
        print("\n".join(report(checks)))
    return ExitCode.DEGRADED if degraded else ExitCode.OK


def report(checks: Sequence[Check]) -> list[str]:
    """The checks as lines of text, by section."""
    lines: list[str] = []
    section = None
    for check in checks:
        if check.section != section:
            section = check.section
            lines += ["", _visible(section)] if lines else [_visible(section)]
        lines.append(f"  {check.state:<9}{_visible(check.name):<16} {_visible(check.text)}")
        if check.remedy:
            lines.append(f"  {'':<9}{'':<16} -> {_visible(check.remedy)}")
    return lines


def _visible(text: str) -> str:
    """Without control characters: names of models and processes come from outside."""
    return "".join(c if c.isprintable() else "?" for c in text)


async def examine(found: Found) -> list[Check]:
    """All checks. Takes seconds at most; what does not answer in time is degraded."""
    checks = [*machine(), *await _gpus(), *tools()]
    checks += [Check("machine", "discovery", INFO, note) for note in found.notes]
    if not found.servers:
        looked_for = "; ".join(found.looked_for)
        checks.append(
            Check(
                "servers",
                "vLLM",
                DEGRADED,
                "no vLLM server found",
                f"start one, or run kvtop where it can see it; looked for: {looked_for}",
            )
        )
    for server in found.servers:
        checks += await _server(server)
    for pid in found.stray_pids:
        checks.append(
            Check(
                "servers",
                f"worker {pid}",
                DEGRADED,
                "has lost its engine and still runs, holding its memory",
                f"kill {pid}",
            )
        )
    return sorted(checks, key=lambda check: _place(check.section))


def _place(section: str) -> int:
    order = ("machine", "gpus", "tools")
    return order.index(section) if section in order else len(order)


def machine(proc: Proc | None = None) -> list[Check]:
    """Rights of this user on this machine."""
    proc = proc or Proc()
    checks = [
        Check(
            "machine",
            "kvtop",
            OK,
            f"{__version__}, Python {platform.python_version()}, {platform.machine()}, "
            f"user {os.geteuid()}",
        )
    ]
    scope = proc.text("sys/kernel/yama/ptrace_scope").strip()
    may = has_ptrace(proc.text("self/status"))
    text = "CAP_SYS_PTRACE: any process can be looked into" if may else "no CAP_SYS_PTRACE"
    if may:
        checks.append(Check("machine", "ptrace", OK, text))
    elif scope in {"", "0"}:
        text += ": only processes of this user with no more rights than kvtop can be looked into"
        checks.append(Check("machine", "ptrace", OK, text))
    else:
        text += f", kernel.yama.ptrace_scope is {scope}: no other process can be looked into"
        checks.append(Check("machine", "ptrace", DEGRADED, text, NO_PTRACE))
    return checks


def has_ptrace(status: str) -> bool:
    """Whether /proc/self/status shows CAP_SYS_PTRACE in effect."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1)
    return False


async def _gpus() -> list[Check]:
    from kvtop.sources.nvml import NvmlSource

    source = NvmlSource()
    try:
        gpus = await _in_time(source.read)
    except SourceError as error:
        return [Check("gpus", "NVML", DEGRADED, error.reason, error.remedy)]
    finally:
        await source.close()
    checks = []
    for gpu in gpus:
        name = f"GPU {gpu.index}"
        if gpu.error:
            checks.append(Check("gpus", name, DEGRADED, gpu.error))
            continue
        missing = [
            what
            for what, value in (
                ("memory", gpu.mem_used_bytes),
                ("utilization", gpu.util_percent),
                ("memory by process", gpu.processes),
            )
            if value is None
        ]
        text = gpu.name or "unnamed"
        if missing:
            text += f"; this GPU or driver does not tell: {', '.join(missing)}"
        checks.append(Check("gpus", name, INFO if missing else OK, text))
    return checks


def tools() -> list[Check]:
    """What is installed beside kvtop."""
    from kvtop.attach.with_frida import FridaBackend
    from kvtop.sources.stacks_spy import find_py_spy

    checks = []
    if find_py_spy():
        checks.append(Check("tools", "py-spy", OK, "installed"))
    else:
        remedy = "pip install py-spy beside kvtop"
        checks.append(Check("tools", "py-spy", DEGRADED, "not installed: no Python frames", remedy))
    if platform.machine() == "x86_64":
        checks.append(Check("tools", "ptrace", OK, "built in"))
    else:
        checks.append(Check("tools", "ptrace", INFO, "attaching without tools needs x86-64"))
    frida = FridaBackend.installed()
    checks.append(Check("tools", "frida", OK if frida.ok else INFO, frida.reason or "installed"))
    gdb = shutil.which("gdb") is not None
    checks.append(
        Check("tools", "gdb", OK if gdb else INFO, "installed" if gdb else "not installed")
    )
    return checks


async def _server(server: FoundServer) -> list[Check]:
    """Everything about one server."""
    section = f"server {server.key}"
    checks = []
    kind = [f"model {server.model}"] if server.model else []
    kind += ["in a container"] if server.container else []
    kind += ["in-process LLM, no HTTP"] if server.offline else []
    kind += ["simulated"] if server.demo else []
    if server.orphan:
        checks.append(
            Check(
                section,
                "API server",
                DEGRADED,
                "is gone; the engine still runs and holds its memory",
                f"kill {server.engines[0].pid}",
            )
        )
    elif not server.engines:
        checks.append(Check(section, "engine", INFO, "starting: no engine process yet"))
    if kind:
        checks.append(Check(section, "server", INFO, ", ".join(kind)))
    checks += await _metrics(section, server)
    checks += _plugins(section, server)
    for process, role in members(server):
        checks += await _process(section, process, role)
    return checks


async def _metrics(section: str, server: FoundServer) -> list[Check]:
    if server.url is None:
        if server.apis and not server.offline:
            text = "its HTTP side cannot be reached from here"
            return [Check(section, "/metrics", DEGRADED, text, "name its address with --url")]
        return []
    from kvtop.sources.metrics import MetricsSource

    source = MetricsSource(server.url)
    try:
        page: Any = await _in_time(source.read)
    except SourceError as error:
        return [Check(section, "/metrics", DEGRADED, one_line(error.reason), error.remedy)]
    finally:
        await source.close()
    version = f", vLLM {page.vllm_version}" if page.vllm_version else ""
    return [Check(section, "/metrics", OK, f"{server.url} answers{version}")]


def _plugins(section: str, server: FoundServer) -> list[Check]:
    """`VLLM_PLUGINS` is an allow-list: without kvtop in it the probe silently does not load."""
    if server.launcher_pid is None:
        return []
    environ = Proc().environ(server.launcher_pid)
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvtop" not in [name.strip() for name in allowed.split(",")]:
        return [
            Check(
                section,
                "VLLM_PLUGINS",
                INFO,
                f"is {one_line(allowed, 80)!r}: vLLM does not load the kvtop plugin by itself",
                "add kvtop to it at the next start; `kvtop attach` works all the same",
            )
        ]
    return []


async def _process(section: str, process: FoundProcess, role: str) -> list[Check]:
    """One process: who it is, whether it has a probe, and whether it can get one."""
    name = f"{role} {process.pid}"
    facts = process_facts(process.pid)
    if facts is None:
        return [Check(section, name, DEGRADED, "has just ended")]
    python = python_version(Proc(), process.pid)
    about = [f"user {process.uid}" if process.uid >= 0 else "user not readable"]
    about += [f"Python {python[0]}.{python[1]}"] if python else []
    about += [f"pid {process.ns_pid} in its container"] if process.ns_pid != process.pid else []
    checks = []
    if process.uid not in {-1, os.geteuid()} and os.geteuid() != 0:
        # Where its probe listens only its user can look: there may be one.
        text = "belongs to another user: its probe, if it has one, cannot be asked"
        text += f", {', '.join(about)}"
        remedy = f"run kvtop as user {process.uid} or as root"
        return [Check(section, name, DEGRADED, text, remedy)]
    if facts.state in "Tt":
        remedy = f"kill -CONT {process.pid}"
        checks.append(Check(section, name, DEGRADED, "is stopped and does nothing", remedy))
    hello = ask(process.probe_socket) if process.probe_socket else None
    if hello is not None:
        text = f"probe {hello.version} ({hello.loaded_by})"
        about += [f"vLLM {hello.vllm_version}"] if hello.vllm_version else []
        about += [f"not available: {', '.join(hello.missing)}"] if hello.missing else []
        fine = hello.state == "ok" and hello.version == __version__
        remedy = "" if hello.version == __version__ else f"kvtop attach --replace {process.pid}"
        if hello.state != "ok":
            text += f" {hello.state}: {hello.reason}"
        checks.append(
            Check(section, name, OK if fine else DEGRADED, f"{text}, {', '.join(about)}", remedy)
        )
    else:
        checks.append(_without_probe(section, name, process, ", ".join(about)))
    spy = await _py_spy(process)
    if spy:
        checks.append(Check(section, name, DEGRADED, f"no Python frames: {spy[0]}", spy[1]))
    return checks


def _without_probe(section: str, name: str, process: FoundProcess, about: str) -> Check:
    silent = "its probe does not answer" if process.probe_socket else "no probe"
    try:
        way = able(ready(process), backends())[0].name
    except AttachError as error:
        text = f"{silent} and cannot be attached: {error.what}, {about}"
        return Check(section, name, DEGRADED, text, error.remedy)
    text = f"{silent}, can be attached with {way}, {about}"
    return Check(section, name, DEGRADED, text, f"kvtop attach {process.pid}")


async def _py_spy(process: FoundProcess) -> tuple[str, str] | None:
    """Why py-spy cannot read a process, and what to do; None: it can, or it just missed."""
    from kvtop.sources.stacks_spy import GoneError, TransientError, dump, find_py_spy

    py_spy = find_py_spy()
    if py_spy is None:
        return None
    try:
        await dump(py_spy, process.pid, 3.0)
    except SourceError as error:
        return error.reason, error.remedy
    except (TransientError, GoneError):
        return None
    return None


async def _in_time(read: Callable[[], Awaitable[Any]]) -> Any:
    """The result of a source's read.

    Raises:
        SourceError: It failed, or did not answer in time.
    """
    task = asyncio.ensure_future(read())
    done, _ = await asyncio.wait({task}, timeout=_DEADLINE_S)
    if not done:
        task.cancel()
        raise SourceError(f"no answer within {_DEADLINE_S:g} s")
    return task.result()
