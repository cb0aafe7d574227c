"""Guarded actions in a process that is like an API server, by the real way in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvtop.attach import act, act_http
from kvtop.attach.ability import Ability, Backend, Injectee
from kvtop.attach.act import Request
from kvtop.attach.act_code import act_code
from kvtop.attach.native import NativeBackend
from kvtop.attach.procfs import Proc
from kvtop.attach.servers import FoundEngine, FoundProcess, FoundServer

TARGET = Path(__file__).with_name("act_target.py")


class Unable:
    """A way that is not there."""

    name = "unable"

    def available(self, target: Injectee) -> Ability:
        """Never."""
        return Ability(False, "not allowed here")

    def run(self, target: Injectee, code: str) -> None:
        """Never asked."""
        raise AssertionError


@contextmanager
def target(folder: Path, kind: str = "new") -> Iterator[tuple[FoundProcess, Path]]:
    """A running one, and the file that it writes what was asked to."""
    asked = folder / f"asked-{kind}-{time.monotonic_ns()}"
    asked.touch()
    env = {**os.environ, "KVTOP_DIR": str(folder / "kvtop")}
    child = subprocess.Popen(
        [sys.executable, str(TARGET), str(asked), kind], env=env, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        yield process(child.pid), asked
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def process(pid: int) -> FoundProcess:
    stat = Proc().stat(pid)
    assert stat is not None
    return FoundProcess(pid=pid, ns_pid=pid, uid=os.geteuid(), start_ticks=stat.start_ticks)


def server(*apis: FoundProcess, url: str | None = None, **more: object) -> FoundServer:
    engine = FoundEngine(process(os.getpid()), 0)
    return FoundServer("127.0.0.1:1", url, apis, (engine,), **more)  # type: ignore[arg-type]


def do(request: Request, found: FoundServer | None, among: tuple[Backend, ...] | None = None):  # type: ignore[no-untyped-def]
    ways = among if among is not None else (NativeBackend(),)
    return act.act(request, server_of=lambda _pid: found, among=ways)


def abort(request_id: str, *client_ids: str) -> Request:
    return Request("abort", 1, request_id, client_ids)


RESET = Request("reset", 1)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_request_is_aborted_and_no_other(tmp_path: Path) -> None:
    with target(tmp_path) as (api, asked):
        said = do(abort("alive-1"), server(api))
        assert said.done == "aborted", said
        assert lines(asked) == ["abort alive-1"]
        # The note is taken away, and it is all that was there.
        assert list((tmp_path / "kvtop").iterdir()) == []


def test_an_older_vllm_has_one_kind_of_id(tmp_path: Path) -> None:
    with target(tmp_path, "old") as (api, asked):
        assert do(abort("alive-2"), server(api)).done == "aborted"
        said = do(RESET, server(api))
        assert said.done == "sent"
        assert "does not say" in said.text
        assert lines(asked) == ["old abort alive-2", "old reset"]


def test_a_request_that_lost_its_client_is_told_to_the_engine(tmp_path: Path) -> None:
    with target(tmp_path) as (api, asked):
        said = do(abort("zombie\n'\"\\u2028"), server(api))
        assert said.done == "sent", said
        assert len(lines(asked)) == 2  # The id has a line end in it.
        assert lines(asked)[0] == "sent zombie"


def test_with_two_api_servers_the_one_that_knows_it_is_asked(tmp_path: Path) -> None:
    with target(tmp_path, "old") as (one, _), target(tmp_path) as (two, asked):
        assert do(abort("alive-1"), server(one, two)).done == "aborted"
        # Each knows the same names; a third only the engine can know, and it is told once.
        assert do(abort("zombie"), server(one, two)).done == "sent"
        assert [line for line in lines(asked) if line.startswith("sent")] == []


def test_a_reset_while_requests_run_is_refused_and_said(tmp_path: Path) -> None:
    with target(tmp_path) as (api, asked):
        said = do(RESET, server(api))
        assert said.done == "refused"
        assert "in use" in said.text
        for name in ("alive-1", "alive-2"):
            do(abort(name), server(api))
        assert do(RESET, server(api)).done == "reset"
        # Never with running requests thrown out.
        assert [line for line in lines(asked) if "reset" in line] == ["reset False False"] * 2


def test_where_no_client_is_found_nothing_happens(tmp_path: Path) -> None:
    with target(tmp_path, "none") as (api, asked):
        said = do(abort("alive-1"), server(api))
        assert said.done == "failed"
        assert "no engine client" in said.text
        assert lines(asked) == []


def test_a_note_that_nobody_came_back_for_is_taken_away(tmp_path: Path) -> None:
    with target(tmp_path) as (api, _):
        folder = tmp_path / "kvtop"
        folder.mkdir(mode=0o700)
        for name, at in (("act-old.txt", 1.0), ("act-new.txt", time.time()), ("other.txt", 1.0)):
            (folder / name).write_text("{}")
            os.utime(folder / name, (at, at))
        assert do(abort("alive-1"), server(api)).done == "aborted"
        assert {path.name for path in folder.iterdir()} == {"act-new.txt", "other.txt"}


def test_code_that_comes_too_late_does_nothing(tmp_path: Path) -> None:
    with target(tmp_path) as (api, asked):
        late = act_code("abort", "alive-1", "act-x.txt", time.time() - 1, even_unknown=True)
        ready = Injectee(api.pid, api.start_ticks, api.uid, sys.version_info[:2], sys.executable)
        NativeBackend().run(ready, late)
        time.sleep(0.5)
        assert lines(asked) == []


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (None, "not on this machine"),
        (server(demo=True), "DEMO"),
        (server(offline=True), "in-process"),
        (server(), "API server is not there"),
    ],
)
def test_what_cannot_be_asked_says_why(found: FoundServer | None, why: str) -> None:
    plan = act.plan(RESET, server_of=lambda _pid: found, among=())
    assert plan.way == ""
    assert why in plan.reason
    assert why in do(RESET, found).text


class Http:
    """An HTTP server with chosen routes and answers."""

    def __init__(self, paths: dict[str, tuple[int, bytes]]) -> None:
        self.asked: list[tuple[str, bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Quiet."""

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self._answer(405 if self.path in paths else 404, b"{}")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                outer.asked.append((self.path, body))
                self._answer(*paths[self.path])

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Http:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.mark.parametrize(
    ("answer", "done"),
    [
        ((200, b'{"success": true}'), "reset"),
        ((200, b'{"success": false}'), "refused"),
        ((200, b""), "sent"),
        ((401, b"{}"), "failed"),
    ],
)
def test_a_route_of_the_server_is_used_for_a_reset(answer: tuple[int, bytes], done: str) -> None:
    with Http({"/reset_prefix_cache": answer}) as http:
        found = server(process(os.getpid()), url=http.url)
        plan = act.plan(RESET, server_of=lambda _pid: found, among=(Unable(),))
        assert "POST /reset_prefix_cache" in plan.way
        assert do(RESET, found, (Unable(),)).done == done
        assert http.asked == [("/reset_prefix_cache", b"")]


def test_an_abort_goes_by_http_only_where_no_way_in_is_and_the_id_is_known() -> None:
    with Http({"/abort_requests": (200, b"")}) as http:
        found = server(process(os.getpid()), url=http.url)
        assert do(abort("r-1"), found, (Unable(),)).done == "failed"
        assert http.asked == []
        said = do(abort("r-1", "r"), found, (Unable(),))
        assert said.done == "sent"
        assert http.asked == [("/abort_requests", b'{"request_ids":["r"]}')]


def test_without_route_and_way_the_reasons_are_told() -> None:
    with Http({}) as http:
        found = server(process(os.getpid()), url=http.url)
        plan = act.plan(RESET, server_of=lambda _pid: found, among=(Unable(),))
        assert plan.way == ""
        assert "VLLM_SERVER_DEV_MODE" in plan.reason
        assert "not allowed here" in plan.reason


@pytest.mark.parametrize("head", [b"HTTP/1.1 405 x\r\n\r\n", b"HTTP/1.1 405 x\r\na"])
def test_a_server_that_answers_a_byte_at_a_time_is_not_waited_for(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act_http, "LOOK_S", 0.3)
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        with suppress(OSError), listener.accept()[0] as connection:
            connection.sendall(head)
            while not over.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            path, why = act_http.route_of(url, None, "reset")
            assert thread.is_alive()
        finally:
            over.set()
            thread.join()
    assert path == ""
    assert "does not answer within" in why


def test_the_process_of_its_own_wants_the_flag_and_a_request() -> None:
    command = [sys.executable, "-m", "kvtop.attach.act"]
    bare = subprocess.run(command, input=b"{}", capture_output=True, check=False)
    assert (bare.returncode, bare.stdout) == (2, b"")
    for text in (b"{}", b"[", b'{"what": "kill", "pid": 1}', b'{"what": "abort", "pid": 1}'):
        done = subprocess.run(
            [*command, "--allow-actions"], input=text, capture_output=True, check=False
        )
        assert done.returncode == 2
        assert json.loads(done.stdout)["done"] == "failed"
