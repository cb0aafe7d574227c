"""The metrics source over HTTP: what it makes of answers, and of their absence."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvtop.errors import UsageError
from kvtop.model.snapshot import EngineMetrics, SourceState
from kvtop.sources import metrics
from kvtop.sources.base import Reading, SourceError, poll
from kvtop.sources.metrics import MAX_BYTES, MetricsPage, MetricsSource, stale_reason
from kvtop.sources.metrics_page import Samples, parse

DATA = Path(__file__).parent / "data"
BUSY = (DATA / "vllm-0.32-busy.txt").read_text()
TEXT = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}

Handler = Callable[[httpx.Request], httpx.Response]


def source(handler: Handler, url: str = "http://box:8000", **options: object) -> MetricsSource:
    transport = httpx.MockTransport(handler)
    return MetricsSource(url, lambda: httpx.AsyncClient(transport=transport), **options)  # type: ignore[arg-type]


def serve(text: str, version: httpx.Response | None = None) -> Handler:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/version"):
            return version or httpx.Response(200, json={"version": "0.32.0"})
        return httpx.Response(200, headers=TEXT, text=text)

    return handler


async def fails(handler: Handler) -> SourceError:
    reader = source(handler)
    with pytest.raises(SourceError) as caught:
        await reader.read()
    await reader.close()
    error = caught.value
    assert error.reason.isprintable()
    assert error.remedy
    return error


async def test_a_real_page() -> None:
    reader = source(serve(BUSY))
    page = await reader.read()
    await reader.close()
    assert page.url == "http://box:8000"
    assert page.models == {0: "tiny"}
    assert page.vllm_version == "0.32.0"
    assert page.restarted is False
    assert page.size_bytes == len(BUSY.encode())
    assert page.cache_config[0]["cache_dtype"] == "auto"
    engine = page.engines[0]
    assert engine.running == 6
    assert engine.num_blocks == 512
    assert engine.block_size_tokens == 128
    assert engine.prefix_caching is True
    assert engine.kv_size_tokens == 65536
    assert engine.generation_tokens_s is None
    assert engine.sleep_state == "awake"


async def test_two_data_parallel_engines_have_their_own_blocks() -> None:
    reader = source(serve((DATA / "vllm-0.32-data-parallel.txt").read_text()))
    page = await reader.read()
    assert {i: e.num_blocks for i, e in page.engines.items()} == {0: 64, 1: 64}
    assert page.models == {0: "tiny", 1: "tiny"}


async def test_rates_and_restart_by_the_given_clock() -> None:
    now = [0.0]
    body = ["vllm:generation_tokens_total 100\nprocess_start_time_seconds 1\n"]

    def handler(request: httpx.Request) -> httpx.Response:
        return serve(body[0])(request)

    reader = source(handler, monotonic=lambda: now[0])
    await reader.read()
    now[0], body[0] = 2.0, "vllm:generation_tokens_total 300\nprocess_start_time_seconds 1\n"
    page = await reader.read()
    assert page.engines[0].generation_tokens_s == 100
    now[0], body[0] = 4.0, "vllm:generation_tokens_total 400\nprocess_start_time_seconds 3\n"
    page = await reader.read()
    assert page.restarted is True
    assert page.engines[0].generation_tokens_s is None
    now[0] = 5.0
    assert (await reader.read()).restarted is False


async def test_asks_for_metrics_behind_the_root_path() -> None:
    paths: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return serve(BUSY)(request)

    reader = source(handler, "http://box/llm/metrics")
    await reader.read()
    await reader.read()
    assert paths == ["/llm/metrics", "/llm/version", "/llm/metrics"]
    assert reader.name == "metrics box/llm"


@pytest.mark.parametrize(
    "version",
    [
        httpx.Response(401), httpx.Response(404), httpx.Response(200, text="not json"),
        httpx.Response(200, json=[1]), httpx.Response(200, json={"version": 3}),
        httpx.Response(200, content=b"\xff"), httpx.Response(200, text="[" * 100_000),
    ],
)  # fmt: skip
async def test_a_server_that_hides_its_version_is_read_all_the_same(
    version: httpx.Response,
) -> None:
    asked = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        if request.url.path == "/version":
            asked += 1
            return httpx.Response(version.status_code, content=version.content)
        return serve(BUSY)(request)

    reader = source(handler)
    for _ in range(6):
        assert (await reader.read()).vllm_version is None
    assert asked == 3


@pytest.mark.parametrize(
    ("response", "reason", "remedy"),
    [
        (httpx.Response(404), "does not exist (404)", "root path"),
        (httpx.Response(401), "refuses kvtop (401)", "proxy"),
        (httpx.Response(403), "refuses kvtop (403)", "proxy"),
        (httpx.Response(500), "fails in the server (500)", "log"),
        (httpx.Response(502), "fails in the server (502)", "log"),
        (httpx.Response(503), "is not ready (503)", "wait"),
        (httpx.Response(204), "answers with status 204", "address"),
        (
            httpx.Response(307, headers={"location": "https://x/y"}),
            "redirects to https://x/y (307)",
            "--url",
        ),
        (httpx.Response(200, headers=TEXT, text=""), "is empty", "log"),
        (httpx.Response(200, headers=TEXT, text="up 1\n"), "no vLLM series", "--disable-log-stats"),
        (httpx.Response(200, html="<html>"), "not a metrics page but text/html", "root path"),
        (httpx.Response(200, json={}), "not a metrics page but application/json", "root path"),
        (httpx.Response(200, headers=TEXT, text="<html>"), "not a metrics page", "address"),
        (httpx.Response(200, headers=TEXT, text="vllm:num_requests_running x"), "format", ""),
        (
            httpx.Response(200, headers=TEXT, content=b"x" * (MAX_BYTES + 1)),
            "is larger than 8 MB",
            "address",
        ),
        (
            httpx.Response(200, headers={**TEXT, "content-encoding": "br"}, content=b"x"),
            "compressed",
            "vLLM itself",
        ),
    ],
)
async def test_answers_that_are_no_metrics(
    response: httpx.Response, reason: str, remedy: str
) -> None:
    error = await fails(lambda _: response)
    assert reason in error.reason
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (httpx.ConnectError("All connection attempts failed"), "nothing answers at box:8000"),
        (httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong"), "does not speak https"),
        (httpx.ConnectError("certificate verify failed: self-signed certificate"), "certificate"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), "no such host name"),
        (httpx.ConnectError("[Errno 101] Network is unreachable"), "cannot be reached"),
        (httpx.ConnectTimeout("x"), "does not answer within"),
        (httpx.ReadTimeout("x"), "does not answer within"),
        (httpx.ReadError(""), "reading box:8000 failed: ReadError"),
        (httpx.RemoteProtocolError("x"), "broke off or does not speak HTTP"),
    ],
)
async def test_answers_that_do_not_come(fault: Exception, reason: str) -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise fault

    assert reason in (await fails(handler)).reason


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], "asyncio.Future[None]"]


@asynccontextmanager
async def listening(talk: object) -> AsyncIterator[str]:
    """A real server on loopback; its address."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0)  # type: ignore[arg-type]
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_one_connection_is_kept_and_no_proxy_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            assert b"accept-encoding: identity" in head.lower()
            body = b'{"version":"1"}' if b"/version" in head else BUSY.encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n"
                % len(body)
            )
            writer.write(body)
            await writer.drain()
            if connections == 0:
                break

    async with listening(talk) as address:
        reader = MetricsSource(address)
        for _ in range(3):
            assert (await reader.read()).engines[0].running == 6
        await reader.close()
        await reader.close()
    assert connections == 1


async def test_nobody_there() -> None:
    async with listening(lambda r, w: w.close()) as address:
        pass
    reader = MetricsSource(address)
    with pytest.raises(SourceError, match=f"nothing answers at {address}"):
        await reader.read()
    await reader.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"\x16\x03\x01junk\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 99\r\n\r\nvllm:num",
    ],
)  # fmt: skip
async def test_a_server_that_breaks_off(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with listening(talk) as address:
        reader = MetricsSource(address)
        with pytest.raises(SourceError, match="broke off or does not speak HTTP"):
            await reader.read()
        await reader.close()


async def test_a_server_that_is_silent() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with listening(talk) as address:
        reader = MetricsSource(address, lambda: httpx.AsyncClient(trust_env=False, timeout=0.1))
        with pytest.raises(SourceError, match="does not answer within"):
            await reader.read()
        await reader.close()


async def test_a_gigantic_page_is_dropped_while_it_comes() -> None:
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n")
        chunk = b"a" * 1_000_000
        try:
            while sent < 100_000_000:
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
        except ConnectionError:
            pass
        writer.close()

    async with listening(talk) as address:
        reader = MetricsSource(address)
        with pytest.raises(SourceError, match="larger than 8 MB"):
            await reader.read()
        await reader.close()
    assert sent < 50_000_000


async def test_a_big_page_is_read_whole() -> None:
    lines = [f'vllm:num_requests_running{{engine="{i}"}} {i}\n' for i in range(64)]
    filler = "# HELP x " + "y" * 1000 + "\n"
    page = await source(serve("".join(lines) + filler * 700)).read()
    assert [e.running for e in page.engines.values()] == list(range(64))


def test_nonsense_is_refused_at_once() -> None:
    with pytest.raises(UsageError):
        MetricsSource("ftp://x")


def frozen(seconds: float | None) -> MetricsPage:
    engine = EngineMetrics(running=3, gauges_frozen_s=seconds)
    return MetricsPage("http://b", {0: engine}, {}, {}, None, None, False, 1)


def test_stale_reason() -> None:
    assert stale_reason(frozen(None)) == ""
    assert stale_reason(frozen(5.0)) == ""
    assert stale_reason(frozen(12.4)) == (
        "engine 0 says 3 running, but no counter has moved for 12 s"
    )


async def test_a_server_that_stands_still_is_stale_in_the_poll_loop() -> None:
    class Clock:
        now = 0.0

        def time(self) -> float:
            return self.now

        def monotonic(self) -> float:
            return self.now

        async def sleep(self, seconds: float) -> None:
            self.now += seconds
            if self.now > 15:
                raise asyncio.CancelledError

    clock = Clock()
    reader = source(serve(BUSY), monotonic=clock.monotonic)
    seen: list[Reading[MetricsPage]] = []
    with pytest.raises(asyncio.CancelledError):
        await poll(reader, clock, seen.append, stale=stale_reason)
    states = [r.status.state for r in seen]
    assert states[:3] == [SourceState.STARTING, SourceState.OK, SourceState.OK]
    assert states[-1] is SourceState.STALE
    assert seen[-1].status.since_s == 10


def big_page() -> str:
    line = 'vllm:request_success_total{engine="0",finished_reason="stop"} 1\n'
    return BUSY + line * 5000


async def test_a_big_page_is_read_in_a_thread_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def watch(text: str) -> Samples:
        threads.append(threading.current_thread())
        return parse(text)

    monkeypatch.setattr(metrics, "parse", watch)
    reader = source(serve(big_page()))
    for _ in range(2):
        assert (await reader.read()).engines[0].running == 6
        await reader.close()
    assert all(thread.daemon for thread in threads)
    assert threading.main_thread() not in threads
    # Closed and read again: the ended thread is not the one that is used.
    assert threads[0] is not threads[1]


async def test_a_page_that_takes_too_long_is_said_and_no_second_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, begun = threading.Event(), 0

    def hang(text: str) -> Samples:
        nonlocal begun
        begun += 1
        go_on.wait(30)
        return parse(text)

    monkeypatch.setattr(metrics, "parse", hang)
    monkeypatch.setattr(metrics, "PARSE_DEADLINE_S", 0.05)
    reader = source(serve(big_page()))
    for _ in range(2):
        with pytest.raises(SourceError, match="cannot be read within") as caught:
            await reader.read()
        assert caught.value.remedy
    assert begun == 1
    go_on.set()
    await reader.close()


async def test_values_at_the_edge_of_floats_give_no_infinity() -> None:
    now = [0.0]
    body = ["vllm:kv_cache_usage_perc 1.7e308\nvllm:prompt_tokens_total 0\n"]

    def handler(request: httpx.Request) -> httpx.Response:
        return serve(body[0])(request)

    reader = source(handler, monotonic=lambda: now[0])
    await reader.read()
    now[0], body[0] = 0.9, "vllm:kv_cache_usage_perc 0.5\nvllm:prompt_tokens_total 1.7e308\n"
    engine = (await reader.read()).engines[0]
    assert (engine.kv_used_percent, engine.prompt_tokens_s) == (50, None)
    body[0] = "vllm:kv_cache_usage_perc 1.7e308\n"
    assert (await reader.read()).engines[0].kv_used_percent is None
