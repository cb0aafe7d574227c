"""What a command line says of a process: is it part of a vLLM server, and which part.

Pure functions. Sources: `set_process_title` and its callers in vLLM 0.32
(`utils/system_utils.py`, `v1/engine/core.py`, `v1/executor/multiproc_executor.py`,
`v1/utils.py`, `v1/engine/coordinator.py`); 0.10 has the same without the `DP`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from kvtop.attach.outside import port_number, whole

DEFAULT_PORT = 8000
"""vLLM's own default of `--port`."""

_TITLE = re.compile(
    r"(?P<prefix>[^\s:/]+)::"
    r"(?P<role>EngineCore|Worker|APIServer|DPCoordinator)"
    r"(?P<suffix>(?:_[A-Z]*[0-9]+)*)"
)
_MAX_RANK_DIGITS = 6
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*(?:-\w+)?")
_SERVER_MODULES = frozenset(
    {
        "vllm.entrypoints.openai.api_server",
        "vllm.entrypoints.api_server",
        "vllm.entrypoints.grpc_server",
    }
)
_COMMAND_MODULES = frozenset({"vllm", "vllm.entrypoints.cli.main"})
# Options of the interpreter that take the next word: it is not the script.
_PYTHON_OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


class Role(str, Enum):
    """Which part of a server a process is."""

    ENGINE = "engine"
    """The engine core: scheduler and block pool."""
    WORKER = "worker"
    """Runs the model, under an engine core."""
    API = "api"
    """Answers HTTP; also the process that starts the others."""
    COORDINATOR = "coordinator"
    """Balances data-parallel engines; holds no blocks."""
    SPAWNED = "spawned"
    """Started by Python's multiprocessing and not titled: vLLM before 0.10, or starting."""
    HELPER = "helper"
    """Resource trackers and the like."""
    DEMO = "demo"
    """The simulated engine of `kvtop demo`."""
    PYTHON = "python"
    """A Python process of which the command line says nothing more."""


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """What the command line of an API server says."""

    model: str | None = None
    """First served model name, else the model; None: not on the command line."""
    host: str | None = None
    """`--host`."""
    port: int | None = None
    """`--port`; None: not given, vLLM's default or a `--config` file holds it."""
    uds: str | None = None
    """`--uds`: listens on this Unix socket instead of TCP."""
    root_path: str = ""
    """`--root-path`, without the slash at its end."""
    tls: bool = False
    """Serves https."""
    headless: bool = False
    """Engines only, no HTTP."""


@dataclass(frozen=True, slots=True)
class Title:
    """What one process says it is."""

    role: Role
    """Which part."""
    rank: int | None = None
    """Data-parallel rank of an engine core or number of an API server, where titled."""
    titled: bool = False
    """True: it names itself; False: told from its arguments."""
    own_front: bool = False
    """True for an API server with engines of its own below a supervisor (`APIServer_DP0`)."""


def classify(argv: tuple[str, ...]) -> Title | None:
    """What the process with these arguments is; None: nothing to do with vLLM or Python.

    `sh -c "vllm serve ..."`, `timeout 9 vllm serve ...` and clients such as
    `vllm bench serve` are not servers.
    """
    if not argv:
        return None
    if "::" in argv[0]:
        return _from_title(argv[0].strip())
    words = _program(argv)
    if words is None:
        return None
    if not words:
        return Title(Role.PYTHON)
    first, rest = words[0], words[1:]
    if first == "-c":
        return _from_code(rest[0] if rest else "")
    if first in _SERVER_MODULES:
        return Title(Role.API)
    if first in _COMMAND_MODULES:
        return Title(Role.API if rest[:1] == ("serve",) else Role.PYTHON)
    if first.startswith("kvtop.demo"):
        return Title(Role.DEMO)
    if first in {"kvtop", "kvtop.cli"} and rest[:1] == ("demo",) and "--serve" in rest:
        return Title(Role.DEMO)
    return Title(Role.PYTHON)


def _from_title(title: str) -> Title | None:
    match = _TITLE.fullmatch(title)
    if match is None or match["prefix"] == "ray":
        return None
    suffix = match["suffix"]
    digits = re.search(r"[0-9]+", suffix)
    rank = whole(digits[0], _MAX_RANK_DIGITS) if digits else None
    role = {
        "EngineCore": Role.ENGINE,
        "Worker": Role.WORKER,
        "APIServer": Role.API,
        "DPCoordinator": Role.COORDINATOR,
    }[match["role"]]
    own_front = role is Role.API and suffix.startswith("_DP")
    return Title(role, rank, titled=True, own_front=own_front)


def _from_code(code: str) -> Title:
    if "multiprocessing.spawn" in code or "multiprocessing.forkserver" in code:
        return Title(Role.SPAWNED)
    if "multiprocessing.resource_tracker" in code:
        return Title(Role.HELPER)
    return Title(Role.PYTHON)


def _program(argv: tuple[str, ...]) -> tuple[str, ...] | None:
    """The module, script name or `-c` with its arguments; None: not a Python program.

    A script is reduced to its file name: `/opt/venv/bin/vllm` is `vllm`.
    """
    name = _base(argv[0])
    if not _PYTHON.fullmatch(name):
        return (name, *argv[1:]) if name in {"vllm", "kvtop"} else None
    at = 1
    while at < len(argv):
        word = argv[at]
        if word in _PYTHON_OPTIONS_WITH_VALUE:
            at += 2
        elif word.startswith("-m") or (re.fullmatch(r"-[a-zA-Z]*m", word) is not None):
            module = word[2:] if word.startswith("-m") and len(word) > 2 else None
            return (module, *argv[at + 1 :]) if module else argv[at + 1 :]
        elif word.startswith("-c") or re.fullmatch(r"-[a-zA-Z]*c", word) is not None:
            code = word[2:] if word.startswith("-c") and len(word) > 2 else None
            return ("-c", code, *argv[at + 1 :]) if code else ("-c", *argv[at + 1 :])
        elif word.startswith("-") and word != "-":
            at += 1
        else:
            return (_base(word).removesuffix(".py"), *argv[at + 1 :])
    return ()


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def server_args(argv: tuple[str, ...]) -> ServerArgs:
    """Reads the options of an API server that kvtop needs; unknown ones are passed over."""
    words = (_program(argv) or ()) if argv else ()
    options = words[1:]
    serve = options[:1] == ("serve",)
    if serve:
        options = options[1:]
    model = _option(options, "model")
    if model is None and serve and options and not options[0].startswith("-"):
        model = options[0]
    keys = (_option(options, "ssl-keyfile"), _option(options, "ssl-certfile"))
    root = (_option(options, "root-path") or "").strip("/")
    return ServerArgs(
        model=_option(options, "served-model-name") or model,
        host=_option(options, "host"),
        port=port_number(_option(options, "port")),
        uds=_option(options, "uds"),
        root_path=f"/{root}" if root else "",
        tls=any(keys),
        headless="--headless" in options,
    )


def _option(words: tuple[str, ...], name: str) -> str | None:
    """Value of `--name value` or `--name=value`, dashes and underscores alike; the last wins."""
    value = None
    for at, word in enumerate(words):
        if not word.startswith("--"):
            continue
        given, equals, inline = word[2:].partition("=")
        if given.replace("_", "-") != name:
            continue
        if equals:
            value = inline
        elif at + 1 < len(words) and not words[at + 1].startswith("--"):
            value = words[at + 1]
    return value
