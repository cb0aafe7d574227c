"""Guarded actions on the real vLLM: exactly that request, and the cache only at rest."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kvtop.attach import act
from kvtop.attach.act import Request
from kvtop.model.snapshot import Engine
from tests.faults.watching import Look, Watcher
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm


MOST_TOKENS = 2500
"""Long enough to be aborted on the way: some ten seconds on an idle machine."""


class Client(threading.Thread):
    """One streamed completion."""

    def __init__(self, url: str, letter: str, max_tokens: int) -> None:
        super().__init__()
        self._url, self._letter, self._max_tokens = url, letter, max_tokens
        self.finish_reason: str | None = None
        self.tokens = 0
        self.ended = False
        self.leave = threading.Event()
        self.start()

    def run(self) -> None:
        """Read to the end."""
        body = {
            "model": "tiny",
            "prompt": self._letter * 600,
            "max_tokens": self._max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=300, trust_env=False) as answer:
            for line in answer.iter_lines():
                if self.leave.is_set():
                    return
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    for choice in chunk["choices"]:
                        self.finish_reason = choice["finish_reason"] or self.finish_reason
                    self.tokens = (chunk.get("usage") or {}).get("completion_tokens", self.tokens)
                self.ended = self.ended or line == "data: [DONE]"


@contextmanager
def clients(url: str, number: int) -> Iterator[list[Client]]:
    """Some at once, each with a prompt of its own."""
    started = [Client(url, "abcdefgh"[i], MOST_TOKENS) for i in range(number)]
    try:
        yield started
    finally:
        for client in started:
            client.leave.set()
        for client in started:
            client.join()


def engine_of(look: Look) -> Engine:
    """The only one."""
    (engine,) = look.snapshot.engines
    return engine


def rows(look: Look) -> dict[str, Any]:
    """Requests by id."""
    return {r.id: r for r in engine_of(look).requests or ()}


def wait(watcher: Watcher, what: Any, limit_s: float = 30) -> Look:
    """The next look for which it is true."""
    look = watcher.until(what, limit_s, len(watcher.looks))
    assert look is not None, [(r.id, r.status, r.blocks) for r in rows(watcher.looks[-1]).values()]
    return look


def idle(look: Look) -> bool:
    """Nothing is there any more."""
    return not rows(look)


def test_an_abort_ends_that_request_gives_its_blocks_back_and_leaves_the_others(
    server: Server, watcher: Watcher
) -> None:
    wait(watcher, idle)
    with clients(server.url, 3) as started:
        look = wait(
            watcher, lambda look: sum((r.output_tokens or 0) > 20 for r in rows(look).values()) == 3
        )
        victim = max(rows(look).values(), key=lambda r: r.id)
        others = set(rows(look)) - {victim.id}
        pid = engine_of(look).pid
        assert pid is not None
        plan = act.plan(Request("abort", pid, victim.id))
        assert "code run once in the API server" in plan.way, plan
        begin = time.monotonic()
        said = act.act(Request("abort", pid, victim.id))
        took = time.monotonic() - begin
        assert said.done == "aborted", said
        look = wait(watcher, lambda look: victim.id not in rows(look))
        assert set(rows(look)) == others
        counts = engine_of(look).blocks
        assert counts is not None
        # Every block is with one of the other two, or free: nothing stays with the aborted one.
        held = sum(r.blocks for r in rows(look).values())
        assert counts.usable - counts.free - counts.cached == held
        assert (counts.held, counts.ghost) == (0, 0)
        # Once more is no error, and ends nobody else.
        assert act.act(Request("abort", pid, victim.id)).done == "sent"
        for client in started:
            client.join(180)
        # Its client sees the end of its stream; those of the others get all they asked for.
        assert sorted(str(client.finish_reason) for client in started) == ["abort", *["length"] * 2]
        assert all(client.ended for client in started)
        assert [client.tokens for client in started].count(MOST_TOKENS) == 2
    print(f"\nabort: {took:.2f} s from the request to vLLM's answer")


def test_a_reset_is_refused_while_requests_run_and_frees_what_is_cached_at_rest(
    server: Server, watcher: Watcher
) -> None:
    pid = engine_of(watcher.looks[-1]).pid
    assert pid is not None
    with clients(server.url, 6):
        wait(watcher, lambda look: any(r.output_tokens for r in rows(look).values()))
        said = act.act(Request("reset", pid))
        assert said.done == "refused", said
        assert "in use" in said.text
        counts = engine_of(watcher.looks[-1]).blocks
        assert counts is not None
    before = engine_of(wait(watcher, idle)).blocks
    assert before is not None
    assert before.cached > 0
    begin = time.monotonic()
    said = act.act(Request("reset", pid))
    took = time.monotonic() - begin
    assert said.done == "reset", said
    after = engine_of(wait(watcher, lambda look: engine_of(look).blocks.cached == 0)).blocks  # type: ignore[union-attr]
    assert after is not None
    assert after.free == before.free + before.cached
    print(f"\nreset: {took:.2f} s from the request to vLLM's answer")


def test_what_was_done_leaves_nothing_in_the_api_server(server: Server, watcher: Watcher) -> None:
    files = {path.name for path in server.sockets.iterdir()}
    assert not [name for name in files if name.startswith("act-")]
    assert not [
        f for f in watcher.looks[-1].findings if f.severity != "info" and "diagnosis" not in f.rule
    ]
