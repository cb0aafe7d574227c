"""The two things that kvtop can do to a server: abort one request, reset the prefix cache.

Only when a user has asked for it (`kvtop --allow-actions`) and said yes. Both are vLLM's own:
its HTTP route where it serves one, else the method of its engine client (`AsyncLLM`), called
once in the API server by the ways in that `kvtop attach` has. The probe takes no part in it.

    python -m kvtop.attach.act --allow-actions < request.json

is how the screen runs it: a process of its own that is not ended while it stands inside
another one. It prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvtop.attach import probe
from kvtop.attach.ability import AttachError, Backend
from kvtop.attach.act_code import NOTE_PREFIX, WAIT_S, act_code
from kvtop.attach.act_http import Said, ask_to_abort, ask_to_reset, route_of
from kvtop.attach.deliver import DEADLINE_S, Delivery, able, ready
from kvtop.attach.find import find_servers
from kvtop.attach.outside import visible
from kvtop.attach.servers import FoundProcess, FoundServer

WHATS = ("abort", "reset")
"""All that can be asked for."""
_MAX_INPUT = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What a user has asked for."""

    what: str
    """`abort` or `reset`."""
    pid: int
    """The engine core concerned, or any process of its server."""
    request_id: str = ""
    """The engine's id of the request to abort."""
    client_ids: tuple[str, ...] = ()
    """The ids by which clients may know it, and it alone; for vLLM's HTTP route."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How it would be done."""

    way: str
    """One plain phrase, for the question. Empty: it cannot be done."""
    reason: str = ""
    """Why it cannot be done."""
    engines: int = 1
    """Engines of the server: a reset concerns all of them."""


def plan(
    request: Request,
    *,
    server_of: Callable[[int], FoundServer | None] | None = None,
    among: Sequence[Backend] | None = None,
) -> Plan:
    """Look whether and how it can be done; changes nothing. Blocking, up to some seconds.

    Args:
        request: What is asked for.
        server_of: Finds the server of a process. None: on this machine.
        among: Ways into a process. None: all.
    """
    server = _fit(request, server_of)
    if isinstance(server, str):
        return Plan("", server)
    reasons = []
    for way in _order(request.what):
        if way == "http":
            path, why = _route(server, request)
            found = f"HTTP: POST {path} of {server.key}" if path else ""
        else:
            found, why = _inside(server, among)
        if found:
            return Plan(found, engines=max(len(server.engines), 1))
        reasons.append(why)
    return Plan("", "; ".join(reasons))


def act(
    request: Request,
    *,
    server_of: Callable[[int], FoundServer | None] | None = None,
    among: Sequence[Backend] | None = None,
) -> Said:
    """Do it, by the first way that works. Blocking, seconds. Never raises KvtopError.

    Args: see `plan`.
    """
    server = _fit(request, server_of)
    if isinstance(server, str):
        return Said("failed", server)
    reasons = []
    for way in _order(request.what):
        said = _by_http(server, request) if way == "http" else _in_apis(server, request, among)
        if said.done != "failed":
            return said
        reasons.append(said.text)
    return Said("failed", "; ".join(reasons))


def _order(what: str) -> tuple[str, ...]:
    # The route for aborting knows requests by their clients' ids, which need not be unique, and
    # never says how it went; the route for resetting is as good as the method behind it.
    return ("inside", "http") if what == "abort" else ("http", "inside")


def _fit(
    request: Request, server_of: Callable[[int], FoundServer | None] | None
) -> FoundServer | str:
    """The server that it is about; or why there is none to act on."""
    server = find_servers().server_of(request.pid) if server_of is None else server_of(request.pid)
    if server is None:
        return "its server is not on this machine"
    if server.demo:
        return "DEMO: the engine is simulated, there is nothing to act on"
    if server.offline:
        return "it is an in-process LLM: there is no API server to ask"
    if not server.apis:
        return "its API server is not there any more, or not on this machine"
    return server


# By vLLM's HTTP route.


def _route(server: FoundServer, request: Request) -> tuple[str, str]:
    """The path at which the server takes it; else nothing, and why."""
    if server.url is None:
        return "", "its address is not known"
    if request.what == "abort" and not request.client_ids:
        return "", "the id that its client gave it is not known"
    return route_of(server.url, server.uds, request.what)


def _by_http(server: FoundServer, request: Request) -> Said:
    path, why = _route(server, request)
    if server.url is None or not path:
        return Said("failed", why)
    if request.what == "abort":
        return ask_to_abort(server.url, server.uds, path, request.client_ids)
    return ask_to_reset(server.url, server.uds, path)


# In the API server.


def _inside(server: FoundServer, among: Sequence[Backend] | None) -> tuple[str, str]:
    backends = probe.backends() if among is None else among
    why = ""
    for process in server.apis:
        try:
            way = able(ready(process), backends)[0].name
        except AttachError as error:
            why = error.what
            continue
        return f"code run once in the API server, pid {process.pid}, with {way}", ""
    return "", why


def _in_apis(server: FoundServer, request: Request, among: Sequence[Backend] | None) -> Said:
    """The API server that knows the request is asked; a reset may be asked of any."""
    backends = probe.backends() if among is None else among
    reasons: list[str] = []
    asked: list[FoundProcess] = []
    for process in server.apis:
        said = _in_one(process, request, backends, even_unknown=len(server.apis) == 1)
        if said.done not in ("failed", "unknown"):
            return said
        reasons.append(said.text)
        if said.done == "unknown":
            asked.append(process)
    if len(asked) == len(server.apis):
        # No API server knows it, and none was left out: it has lost its client.
        return _in_one(asked[0], request, backends, even_unknown=True)
    return Said("failed", "; ".join(dict.fromkeys(reasons)))


def _in_one(
    process: FoundProcess, request: Request, backends: Sequence[Backend], *, even_unknown: bool
) -> Said:
    name = f"{NOTE_PREFIX}{secrets.token_hex(8)}.txt"
    # What is begun later could be done after it was called a failure.
    expires_s = time.time() + DEADLINE_S - WAIT_S
    code = act_code(request.what, request.request_id, name, expires_s, even_unknown=even_unknown)
    _sweep(process)
    delivery = Delivery(process, code, lambda: _note(process, name), lambda: None)
    try:
        return delivery.run(backends)[0]
    except AttachError as error:
        return Said("failed", error.line())


def _sweep(process: FoundProcess) -> None:
    """Take away notes for which a kvtop that was killed never came back."""
    for folder in probe.folders_of(process):
        with contextlib.suppress(OSError):
            for path in folder.glob(f"{NOTE_PREFIX}*.txt*"):
                if time.time() - path.lstat().st_mtime > 2 * DEADLINE_S:
                    probe.read_private(path, process.uid)


def _note(process: FoundProcess, name: str) -> Said | None:
    """What the code has left. None: nothing yet."""
    for folder in probe.folders_of(process):
        text = probe.read_private(folder / name, process.uid)
        if text:
            return _read(text)
    return None


def _read(text: str) -> Said:
    """What a note says. It is text from outside."""
    try:
        row = json.loads(text)
        done, said = str(row["done"]), visible(str(row["text"]), 300)
    except (ValueError, TypeError, KeyError, RecursionError):
        return Said("failed", "the API server's answer cannot be read")
    known = ("aborted", "unknown", "sent", "reset", "refused", "failed")
    return Said(done if done in known else "failed", said)


# As a process of its own.


def parse(text: str) -> Request:
    """A request as the screen writes it.

    Raises:
        ValueError: It is none.
    """
    row = json.loads(text)
    if not isinstance(row, dict) or row.get("what") not in WHATS:
        raise ValueError("not a request")
    ids = row.get("client_ids") or []
    if not (isinstance(row.get("pid"), int) and isinstance(ids, list)):
        raise ValueError("not a request")  # noqa: TRY004 - a text that is wrong, not a call
    request_id = str(row.get("request_id") or "")
    if row["what"] == "abort" and not request_id:
        raise ValueError("no request is named")
    return Request(row["what"], row["pid"], request_id, tuple(str(one) for one in ids))


def main() -> int:
    """Read one request, do it, print how it went."""
    if sys.argv[1:] != ["--allow-actions"]:
        sys.stderr.write("this is run by the screen of `kvtop --allow-actions`\n")
        return 2
    try:
        request = parse(sys.stdin.read(_MAX_INPUT))
    except (ValueError, RecursionError) as error:
        sys.stdout.write(json.dumps(asdict(Said("failed", f"not understood: {error}"))) + "\n")
        return 2
    sys.stdout.write(json.dumps(asdict(act(request))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
