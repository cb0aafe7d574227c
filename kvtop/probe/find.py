"""Finds out what this process is, by looking at what its threads are doing.

vLLM gives a plugin no handle on its objects, and freezes the garbage collector's heap
(0.32), so the frames are walked: the engine core's main thread runs a method of it, the
API server's event loop has a task that reads its output processor, a worker's main thread
runs a method of the worker.

Frames lead to objects of anybody's. None of their code is run: attributes are read from
instance dictionaries, past properties, `__getattr__` and lazy modules, and classes are told
by `type`.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
from collections.abc import Iterator
from types import (
    CoroutineType,
    FrameType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any

MAX_FRAMES = 200
"""Frames looked at in one thread."""
ENGINE_MODULES = ("vllm.v1.engine.", "vllm.entrypoints.")
"""Where the classes of engines and front ends are; a worker's process runs none of them."""
NAMES = ("self", "engine_core", "engine", "llm", "llm_engine", "engine_client", "output_processor")
"""Local variables looked at."""
IN_PROCESS = ("engine_core", "engine_core")
"""From an engine to the core that its client has in the same process."""


_inherited: list[FrameType] = []
"""In a forked child: the frames that were its parent's, and say nothing of the child."""


def inherit(frame: FrameType | None) -> None:
    """Notes, in a forked child, that a frame and all under it are the parent's."""
    while frame is not None:
        _inherited.append(frame)
        frame = frame.f_back


def forget() -> None:
    """Lets these frames go once the role is known."""
    _inherited.clear()


# What `type` says of a class, whatever its metaclass says.
_bases = type.__dict__["__mro__"].__get__
_namespace = type.__dict__["__dict__"].__get__


def own(obj: Any) -> dict[str, Any]:
    """The instance dictionary of an object, found without running code of its class."""
    kind = type(obj)
    if issubclass(kind, (ModuleType, type)):
        return {}
    for base in _bases(kind):
        entry = _namespace(base).get("__dict__")
        if entry is not None:
            if type(entry) not in (GetSetDescriptorType, MemberDescriptorType):
                return {}
            found = entry.__get__(obj)
            return found if type(found) is dict else {}
    return {}


def path(obj: Any, *names: str) -> Any:
    """Follows instance attributes; None as soon as one is absent."""
    for name in names:
        obj = own(obj).get(name)
        if obj is None:
            return None
    return obj


def _is_dict(obj: Any) -> bool:
    return issubclass(type(obj), dict)


def _locals(frame: FrameType) -> dict[str, Any]:
    """The interesting local variables of a frame, keeping nothing else of it alive."""
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:
        # A module: its locals are its namespace. A class body may have anything there.
        names_here = frame.f_locals
        if type(names_here) is not dict:
            return {}
        return {n: names_here[n] for n in NAMES if n in names_here}
    names = [n for n in NAMES if n in code.co_varnames or n in code.co_freevars]
    if not names:
        return {}
    mapping = frame.f_locals
    found = {n: mapping[n] for n in names if n in mapping}
    if sys.version_info < (3, 13) and isinstance(mapping, dict):
        # Up to 3.12 it is a copy that the frame keeps, with references to every local.
        mapping.clear()
    return found


def _candidates() -> Iterator[Any]:
    """Objects that the running frames belong to, the main thread's first."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    me = threading.get_ident()
    for ident in sorted(frames, key=lambda i: i != main):
        if ident == me:
            continue
        frame: FrameType | None = frames[ident]
        depth = 0
        while frame is not None and depth < MAX_FRAMES:
            if frame in _inherited:
                break
            yield from _locals(frame).values()
            frame = frame.f_back
            depth += 1


def engine_in(obj: Any) -> Any:
    """The engine core that an object is or leads to; None: none with a block pool yet."""
    for names in ((), ("engine_core",), IN_PROCESS, ("llm_engine", *IN_PROCESS)):
        target = path(obj, *names)
        scheduler = path(target, "scheduler")
        manager = path(scheduler, "kv_cache_manager")
        if manager is None or not _is_dict(path(scheduler, "requests")):
            continue
        for pool in (path(manager, "block_pool"), path(manager, "coordinator", "block_pool")):
            blocks = path(pool, "blocks")
            if issubclass(type(blocks), list) and len(blocks):
                return target
    return None


def find_engine() -> Any:
    """The engine core that runs in this process, or None."""
    for obj in _candidates():
        engine = engine_in(obj)
        if engine is not None:
            return engine
    return None


def find_engine_by_gc() -> Any:
    """The same by looking at every object; holds all threads for some 50 ms."""
    module = sys.modules.get("vllm.v1.engine.core")
    kind = getattr(module, "EngineCore", None)
    if not isinstance(kind, type):
        return None
    for obj in gc.get_objects():
        if issubclass(type(obj), kind) and engine_in(obj) is not None:
            return obj
    return None


def _output_processor(obj: Any) -> Any:
    """The output processor that an object has beside its client of an engine core.

    Without that client it is still being built, and may turn out to hold the engine itself
    (an in-process `LLM`). A client that has an engine core in this process is no front end.
    """
    for owner in (obj, path(obj, "engine"), path(obj, "llm_engine")):
        processor = path(owner, "output_processor")
        if path(owner, "engine_core") is None or path(owner, *IN_PROCESS) is not None:
            continue
        if _is_dict(path(processor, "request_states")):
            return processor
    return None


def find_front_end() -> Any:
    """The output processor of the API server that runs in this process, or None."""
    loops = []
    for obj in _candidates():
        processor = _output_processor(obj)
        if processor is not None:
            return processor
        loops += [
            loop
            for loop in (obj, path(obj, "_loop"))
            if issubclass(type(loop), asyncio.AbstractEventLoop)
        ]
    for loop in loops:
        try:
            tasks = asyncio.all_tasks(loop)
        except RuntimeError:
            continue  # Changed while it was copied; looked at again soon.
        for task in tasks:
            coroutine = task.get_coro()
            frame = coroutine.cr_frame if type(coroutine) is CoroutineType else None
            if frame is None:
                continue
            for value in _locals(frame).values():
                processor = _output_processor(value)
                if processor is not None:
                    return processor
                # Only an asynchronous front end reads it in a task, and its engine core is
                # always in another process.
                if _is_dict(path(value, "request_states")):
                    return value
    return None


def find_worker() -> Any:
    """The worker (an object with a model runner and a rank) of this process, or None.

    None too while an engine around it is still being built: then it is the engine's process.
    """
    found = None
    for obj in _candidates():
        module = _namespace(type(obj)).get("__module__")
        if type(module) is str and module.startswith(ENGINE_MODULES):
            return None
        for candidate in (obj, path(obj, "worker"), path(obj, "worker", "worker")):
            attributes = own(candidate)
            if attributes.get("model_runner") is not None and "rank" in attributes:
                found = candidate if found is None else found
    return found
