"""Aborting a request or resetting the prefix cache from the screen: asked, done, watched.

Whether and how it can be done is looked at first, on a thread; then comes the question; then it
is done by a process of its own, as attaching is; then the snapshots tell what came of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from kvtop.draw.text import visible, wrap
from kvtop.draw.view import Dialog
from kvtop.model.blocks import BlockCounts
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Engine, Snapshot
from kvtop.stream.threads import Worker
from kvtop.ui.act_keys import question, shown_id
from kvtop.ui.attaching import child_environment
from kvtop.ui.effects import Act

WATCH_S = 15.0
"""How long the effect is looked for in the snapshots."""
_MOST_TEXT = 4000
_CELLS = 70


@dataclass
class _Watched:
    """An action that was done, and whose effect is still to be seen."""

    act: Act
    mono_s: float | None
    before: BlockCounts | None
    certain: bool = True
    """vLLM itself said that it was done."""


class Acting:
    """Does what was asked for, one thing after the other.

    Args:
        start: Runs a coroutine beside the screen.
        say: Shows a message.
        show: Shows a dialog; False: the user is in another one, or types.
        log: Writes a line into the running session and for the shell; it has the whole id of
            the request, as text from outside: hiding names finds only whole ones.
        recording: Whether a recording runs.
    """

    def __init__(
        self,
        start: Callable[[Coroutine[Any, Any, None]], None],
        say: Callable[[str], None],
        show: Callable[[Dialog], bool],
        log: Callable[[str], None],
        recording: Callable[[], bool],
    ) -> None:
        self._start = start
        self._say = say
        self._show = show
        self._log = log
        self._recording = recording
        self._worker = Worker("kvtop actions")
        self._asked: dict[str, Act] = {}
        self._busy = False
        self._watched: list[_Watched] = []
        self._newest: Snapshot | None = None

    def ask(self, act: Act) -> None:
        """Look whether it can be done; then a question, or why it cannot."""
        if self._busy:
            self._say("another action is being looked at")
            return
        self._busy = True
        self._say(f"looking how to {_what(act)}")
        self._start(self._ask(act))

    async def _ask(self, act: Act) -> None:
        try:
            way, reason, engines = await self._worker.call(lambda: plan(act))
        finally:
            self._busy = False
        if not way:
            self._say(f"cannot {_what(act)}: {reason}")
            self._explain(f"Cannot {_what(act)}", reason)
            return
        self._say("")
        token = str(time.monotonic_ns())
        self._asked = {token: act}
        # A key that was meant for something else must not be the answer.
        if not self._show(question(act, way, engines, recording=self._recording(), token=token)):
            self._asked = {}
            self._say(f"did not ask to {_what(act)}: something else is open; press the key again")

    def do(self, token: str) -> None:
        """The answer was yes."""
        act = self._asked.pop(token, None)
        if act is None:
            return
        if _is_over(act, self._newest):
            self._say(f"nothing was done: request {shown_id(_id(act))} has ended by itself")
        else:
            self._log(f"action: {_logged(act)} on {act.engine.server}, confirmed")
            self._say(f"asking vLLM to {_what(act)}")
            self._start(self._do(act))

    async def _do(self, act: Act) -> None:
        before = _counts(self._newest, act.engine)
        done, text = await self._worker.call(lambda: run(act))
        text = visible(text)
        self._log(f"action: {_logged(act)}: {text}")
        if done in ("failed", "refused", "unknown"):
            self._say(f"could not {_what(act)}: {text}")
            self._explain(f"Could not {_what(act)}", text)
            return
        self._say(f"{_what(act)}: {text}")
        done_s = self._newest.mono_s if self._newest is not None else None
        self._watched.append(_Watched(act, done_s, before, certain=done != "sent"))

    def look(self, snapshot: Snapshot) -> None:
        """Look for the effect of what was done."""
        self._newest = snapshot
        for watched in list(self._watched):
            if watched.mono_s is None:
                watched.mono_s = snapshot.mono_s
            text = _effect(watched, snapshot)
            if text is None and snapshot.mono_s - watched.mono_s > WATCH_S:
                text = f"no effect was seen within {WATCH_S:.0f} s"
            if text is not None:
                self._watched.remove(watched)
                self._log(f"action: {_logged(watched.act)}: {text}")
                self._say(f"{_what(watched.act)}: {text}")

    def _explain(self, title: str, text: str) -> None:
        lines = tuple(((part, ""),) for part in wrap(text, _CELLS))
        self._show(Dialog("message", title, lines))


def _what(act: Act) -> str:
    if act.request is not None:
        return f"abort request {shown_id(act.request.id)}"
    return "reset the prefix cache"


def _logged(act: Act) -> str:
    return f"abort request {act.request.id}" if act.request is not None else _what(act)


def _id(act: Act) -> str:
    return act.request.id if act.request is not None else ""


def _is_over(act: Act, snapshot: Snapshot | None) -> bool:
    """Whether the request to abort has ended while the question was asked."""
    engine = _engine(snapshot, act.engine)
    if act.request is None or engine is None or engine.requests is None:
        return False
    return all(row.id != act.request.id for row in engine.requests)


def _engine(snapshot: Snapshot | None, engine: Engine) -> Engine | None:
    key = engine_key(engine)
    engines = snapshot.engines if snapshot is not None else ()
    return next((e for e in engines if engine_key(e) == key), None)


def _counts(snapshot: Snapshot | None, engine: Engine) -> BlockCounts | None:
    found = _engine(snapshot, engine)
    return found.blocks if found is not None else None


def _effect(watched: _Watched, snapshot: Snapshot) -> str | None:
    """What a snapshot shows of it. None: nothing yet."""
    engine = _engine(snapshot, watched.act.engine)
    if engine is None or engine.requests is None or engine.blocks is None:
        return None
    counts = engine.blocks
    before = watched.before
    if watched.act.request is not None:
        if any(r.id == watched.act.request.id for r in engine.requests):
            return None
        why = "" if watched.certain else ", by the abort or by its own end"
        return f"it is gone{why}; {counts.free + counts.cached} blocks are free or cached now"
    if counts.cached and (before is None or counts.cached >= before.cached):
        return None
    was = "" if before is None else f", {before.cached} before"
    return f"{counts.cached} cached blocks now{was}, {counts.free} free"


def plan(act: Act) -> tuple[str, str, int]:
    """Whether and how it can be done. Blocking, up to some seconds.

    Returns:
        The way, or nothing and why not; and the engines of the server.
    """
    # Imported at the first action: the screen starts without it.
    from kvtop.attach import act as doing

    try:
        found = doing.plan(_request(act))
    except Exception as error:
        return "", f"a fault of kvtop's own: {type(error).__name__}: {error}", 1
    return visible(found.way), visible(found.reason), found.engines


def _request(act: Act) -> Any:
    from kvtop.attach.act import Request

    request_id = act.request.id if act.request is not None else ""
    return Request(act.what, act.engine.pid or 0, request_id, act.client_ids)


def run(act: Act) -> tuple[str, str]:
    """Do it, in a process of its own. Blocking, seconds.

    Returns:
        `aborted`, `reset`, `sent`, `refused` or `failed`, and one plain phrase.
    """
    text = json.dumps(asdict(_request(act)))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvtop.attach.act", "--allow-actions"],
            check=False,
            input=text.encode(),
            capture_output=True,
            cwd="/",
            env=child_environment(os.environ),
            start_new_session=True,
        )
        row = json.loads(done.stdout[:_MOST_TEXT])
        return str(row["done"]), str(row["text"])
    except OSError as error:
        return "failed", f"it did not start: {error}"
    except (ValueError, KeyError, TypeError):
        said = (done.stderr or done.stdout)[-200:].decode("utf-8", "replace").strip()
        return "failed", f"it ended with code {done.returncode}: {said}"
