"""The text that is run once in an API server to abort a request or to reset the prefix cache.

It finds vLLM's own client of the engine (`AsyncLLM`, vllm/v1/engine/async_llm.py in 0.32) by
what it has, as the probe finds its parts, and calls that object's own methods on the event loop
that it lives in. It changes nothing itself, puts nothing into the process, and leaves a private
note of how it went, which is taken away.
"""

from __future__ import annotations

from kvtop.attach.payload import LEAVE, boot, probe_sources

NOTE_PREFIX = "act-"
"""Name of the note beside the probe sockets: this, a random word, and `.txt`."""
WAIT_S = 15.0
"""How long vLLM may take for what it was asked."""

_ACT = (
    LEAVE
    + """
import asyncio, concurrent.futures, inspect, json, time, types

def note(done, text):
    leave(name, json.dumps({"done": done, "text": text[:300]}).encode("ascii"))

def finder():
    # The probe's own way to look at running frames; a module of nobody's, dropped afterwards.
    module = types.ModuleType("kvtop_act_find")
    exec(compile(find_source, "<kvtop act>", "exec", dont_inherit=True), module.__dict__)
    return module

def chain(coroutine):
    # What a task waits in, from the outermost coroutine to the innermost.
    for _ in range(100):
        if type(coroutine) is not types.CoroutineType:
            return
        if coroutine.cr_frame is not None:
            yield coroutine.cr_frame
        coroutine = coroutine.cr_await

def client_in(find, obj):
    for owner in (obj, find.path(obj, "engine_client"), find.path(obj, "engine")):
        states = find.path(owner, "output_processor", "request_states")
        if not issubclass(type(states), dict) or find.path(owner, "engine_core") is None:
            continue
        if inspect.iscoroutinefunction(getattr(type(owner), method, None)):
            return owner
    return None

def found_client():
    find = finder()
    loops = []
    for obj in find._candidates():
        for loop in (obj, find.path(obj, "_loop")):
            if issubclass(type(loop), asyncio.AbstractEventLoop) and loop not in loops:
                loops.append(loop)
    for loop in loops:
        for _ in range(20):
            try:
                tasks = asyncio.all_tasks(loop)
                break
            except RuntimeError:
                time.sleep(0.01)  # It changed while it was copied.
        else:
            continue
        for task in tasks:
            for frame in chain(task.get_coro()):
                for value in find._locals(frame).values():
                    client = client_in(find, value)
                    if client is not None:
                        return client, loop
    return None, None

async def abort(client):
    processor = client.output_processor
    parents = getattr(processor, "parent_requests", None) or {}
    if request_id in processor.request_states or request_id in parents:
        # From 0.14 a request has an id of its own beside the one that its client gave it.
        if "internal" in inspect.signature(client.abort).parameters:
            await client.abort(request_id, internal=True)
        else:
            await client.abort(request_id)
        return "aborted", "the API server aborted it, its client was told"
    if not even_unknown:
        return "unknown", "this API server does not know the request"
    # Nobody waits for its answer any more; only the engine can know it.
    send = getattr(client.engine_core, "abort_requests_async", None)
    if send is None:
        return "failed", "no client waits for it, and this vLLM offers no way to tell the engine"
    await send([request_id])
    return "sent", "no client waits for it; the abort was sent to the engine"

async def reset_prefix_cache(client):
    result = await client.reset_prefix_cache()
    if result is None:
        return "sent", "vLLM took it and does not say how it went"
    if result:
        return "reset", "vLLM says that the prefix cache is reset"
    return "refused", "vLLM refused: blocks are in use; it resets only an engine at rest"

def main():
    if time.time() > expires:
        return  # Nobody waits for it any more, and nobody would expect it now.
    client, loop = found_client()
    if client is None:
        return note("failed", "no engine client with %s() was found in it" % method)
    future = asyncio.run_coroutine_threadsafe(globals()[method](client), loop)
    try:
        note(*future.result(wait_s))
    except concurrent.futures.TimeoutError:
        future.cancel()
        note("failed", "vLLM did not answer within %g s" % wait_s)
    except BaseException as error:
        note("failed", "%s: %s" % (type(error).__name__, error))

try:
    main()
except BaseException as error:
    try:
        note("failed", "%s: %s" % (type(error).__name__, error))
    except BaseException:
        pass
"""
)

METHODS = {"abort": "abort", "reset": "reset_prefix_cache"}
"""What kvtop can ask for, and the method of vLLM's client that does it."""


def act_code(
    what: str, request_id: str, note_name: str, expires_s: float, *, even_unknown: bool
) -> str:
    """Source text that does one thing in the API server that runs it, once.

    Args:
        what: `abort` or `reset`.
        request_id: The engine's id of the request to abort.
        note_name: File name of the note, from `NOTE_PREFIX`.
        expires_s: Wall clock after which it does nothing: a process that was stuck all the
            time must not do it when nobody expects it any more.
        even_unknown: Send the abort to the engine even where the API server does not know
            the request.
    """
    head = (
        f"method = {METHODS[what]!r}\n"
        f"request_id = {request_id!r}\n"
        f"name = {note_name!r}\n"
        f"expires = {expires_s!r}\n"
        f"even_unknown = {even_unknown!r}\n"
        f"wait_s = {WAIT_S!r}\n"
        f"find_source = {probe_sources()['kvtop.probe.find'][1]!r}\n"
    )
    return boot(head + _ACT)
