from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_feed import FakeEngine, FakeFeed

from kvtop.draw.screen import screen
from kvtop.draw.text import line_width
from kvtop.draw.view import View
from kvtop.model.snapshot import Finding, SourceState, SourceStatus
from kvtop.ui.app import KvtopApp
from kvtop.ui.desk import Desk
from kvtop.ui.keys import footer_keys


class HandFeed(FakeFeed):
    """Snapshots only when the test says so."""

    def __init__(self, **engine: int) -> None:
        super().__init__(FakeEngine(**engine))
        self.queue: asyncio.Queue = asyncio.Queue()

    async def snapshots(self):
        while True:
            yield await self.queue.get()

    async def push(self, pilot, seconds: float = 1.0):
        self.engine.step(seconds)
        snap = self.engine.snapshot()
        self.queue.put_nowait(snap)
        await settle(pilot)
        return snap


async def settle(pilot) -> None:
    for _ in range(3):
        await pilot.pause()


def text(app: KvtopApp) -> str:
    return "\n".join("".join(part for part, _ in line) for line in app.canvas.lines)


def start(feed: FakeFeed, **view) -> KvtopApp:
    return KvtopApp(feed, View(**view), feed.engine.snapshot())


async def test_the_first_snapshot_is_on_screen_at_once() -> None:
    snap = FakeEngine().snapshot()
    app = KvtopApp(HandFeed(), View(), snap)
    async with app.run_test(size=(100, 30)):
        assert [line_width(line) for line in app.canvas.lines] == [100] * 30
        shown = screen(snap, app.view, 100, 30, footer_keys(app.view))
        assert list(app.canvas.lines) == shown


async def test_textual_shows_the_lines_themselves() -> None:
    app = start(HandFeed())
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot)
        strips = app.screen._compositor.render_strips()
        assert ["".join(s.text for s in strip) for strip in strips] == text(app).split("\n")


async def test_a_new_snapshot_is_drawn_and_only_changed_lines_are_made_again() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(100, 30)) as pilot:
        snap = await feed.push(pilot)
        assert app.view.now_s == snap.time_s
        assert list(app.canvas.lines) == screen(snap, app.view, 100, 30, footer_keys(app.view))
        strips = [app.canvas.render_line(y) for y in range(30)]
        await pilot.press("tab")
        again = [app.canvas.render_line(y) for y in range(30)]
        same = sum(a is b for a, b in zip(strips, again, strict=True))
        assert 5 < same < 30


async def test_only_the_newest_of_several_is_drawn_and_the_charts_have_all() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(100, 30)) as pilot:
        for _ in range(5):
            feed.engine.step(1.0)
            feed.queue.put_nowait(feed.engine.snapshot())
        await settle(pilot)
        assert app.view.now_s == feed.engine.time
        assert len(app.view.history) == 6


async def test_a_pause_freezes_screen_and_charts_and_loses_nothing() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("space")
        before = text(app)
        assert "PAUSED" in before
        for _ in range(3):
            await feed.push(pilot)
        assert text(app) == before
        assert len(app.view.history) == 1
        await pilot.press("space")
        await settle(pilot)
        assert app.view.now_s == feed.engine.time
        assert len(app.view.history) == 4


async def test_an_open_request_is_fetched_again_and_its_blocks_are_lit() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("down", "enter")
        await settle(pilot)
        request = app.view.detail.request_id
        assert feed.asked == [request]
        one = next(one for one in feed.engine.live if one.id == request)
        assert app.view.lit_blocks == frozenset(one.blocks)
        assert request in text(app)
        feed.engine.live[feed.engine.live.index(one)].limit = 10**6
        await feed.push(pilot)
        assert feed.asked == [request, request]
        await pilot.press("escape")
        assert app.view.lit_blocks == frozenset()


async def test_a_request_that_left_keeps_its_last_table_and_lights_nothing() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("enter")
        await settle(pilot)
        table = app.view.detail.tables
        one = next(o for o in feed.engine.live if o.id == app.view.detail.request_id)
        one.limit = 0
        await feed.push(pilot)
        assert app.view.detail.tables == table
        assert app.view.lit_blocks == frozenset()
        assert "no longer in the scheduler" in text(app)


async def test_keys_reach_the_feed() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("+", "t", "t")
        assert feed.intervals == [0.5]
        assert feed.visible == [False, True]


async def test_only_the_processes_on_screen_are_sampled() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.pause()
        (engine,) = feed.engine.snapshot().engines
        assert set(feed.looked_at) == {engine.pid, *engine.worker_pids, *engine.api_pids}
        await pilot.press("p")
        assert feed.looked_at == (engine.pid,)
        await pilot.press("p", "p", "p")
        assert len(feed.looked_at) > 1


async def test_typing_a_search() -> None:
    app = start(HandFeed())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(
            "slash", "w", "a", "i", "t", "question_mark", "space", "left_square_bracket"
        )
        assert app.view.search == "wait? ["
        await pilot.press("escape")
        assert app.view.search == ""


async def test_quit_returns_0() -> None:
    app = start(HandFeed())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("q")
    assert app.return_value == 0
    assert app.fault is None


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (5, 3), (20, 6)])
async def test_tiny_terminals(size: tuple[int, int]) -> None:
    app = start(HandFeed())
    async with app.run_test(size=size) as pilot:
        await pilot.press("tab", "enter", "h", "escape", "s")
        assert [line_width(line) for line in app.canvas.lines] == [size[0]] * size[1]


async def test_resize_draws_anew() -> None:
    app = start(HandFeed())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.resize_terminal(150, 45)
        await settle(pilot)
        assert [line_width(line) for line in app.canvas.lines] == [150] * 45


async def test_mouse() -> None:
    app = start(HandFeed())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.click(offset=(10, 7))
        assert app.view.focus == "kv"


async def test_a_feed_that_fails_ends_the_app_with_its_error() -> None:
    class Failing(FakeFeed):
        async def snapshots(self):
            raise RuntimeError("told to fail")
            yield

    app = KvtopApp(Failing(), View())
    async with app.run_test(size=(80, 24)):
        # The app is over: nothing can wait for its messages any more.
        while app.fault is None:
            await asyncio.sleep(0.01)
    assert isinstance(app.fault, RuntimeError)


async def test_a_feed_that_ends_leaves_the_last_snapshot_on_screen() -> None:
    class Short(FakeFeed):
        async def snapshots(self):
            yield self.engine.snapshot()

    app = KvtopApp(Short(), View())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "Requests" in text(app)
        assert app.fault is None


async def test_before_the_first_snapshot() -> None:
    app = KvtopApp(HandFeed(), View())
    async with app.run_test(size=(80, 24)) as pilot:
        assert "Reading" in text(app)
        await pilot.press("down", "enter", "e", "g", "tab")
        assert "Reading" in text(app)


async def test_an_engine_that_goes_and_comes_back() -> None:
    feed = HandFeed()
    app = start(feed)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "enter")
        feed.queue.put_nowait(replace(feed.engine.snapshot(), engines=()))
        await settle(pilot)
        assert "No vLLM" in text(app)
        await pilot.press("escape")
        await feed.push(pilot)
        assert "Requests" in text(app)


async def test_a_stream_that_has_not_looked_yet_takes_no_engine_off_the_screen() -> None:
    feed = HandFeed()
    app = start(feed)
    status = SourceStatus("discovery", "discovery", SourceState.STARTING, feed.engine.time)
    async with app.run_test(size=(80, 24)) as pilot:
        feed.queue.put_nowait(replace(feed.engine.snapshot(), engines=(), sources=(status,)))
        await settle(pilot)
        assert "No vLLM" not in text(app)
        snap = await feed.push(pilot)
        assert app.view.now_s == snap.time_s


async def test_what_the_judge_says_is_on_screen_and_follows_the_snapshot() -> None:
    feed = HandFeed()
    pid = feed.engine.snapshot().engines[0].pid
    leak = Finding("leak.ghost-blocks", "critical", feed.engine.time, pid, "12 blocks are lost.")
    told = []

    def judge(snapshot):
        told.append(snapshot.time_s)
        return (leak,) if len(told) > 1 else ()

    app = KvtopApp(feed, View(), feed.engine.snapshot(), desk=Desk(judge))
    async with app.run_test(size=(100, 30)) as pilot:
        await feed.push(pilot)
        assert "12 blocks are lost" not in text(app)
        await pilot.press("space")
        await feed.push(pilot)
        # A frozen screen shows what held at its moment; the judge goes on.
        assert "12 blocks are lost" not in text(app)
        assert len(told) == 2
        await pilot.press("space")
        assert "critical: 12 blocks are lost." in text(app)
        await pilot.press("w", "enter")
        assert "It would be wrong if" in text(app) or "What it means" in text(app)


async def test_a_recording_is_in_the_header_and_asks_for_a_note(tmp_path) -> None:
    feed = HandFeed()
    app = KvtopApp(feed, View(), feed.engine.snapshot(), desk=Desk(folder=tmp_path))
    async with app.run_test(size=(120, 30)) as pilot:

        async def until(wanted: str) -> None:
            for _ in range(500):
                if wanted in text(app):
                    return
                await pilot.pause(0.01)
            raise AssertionError(text(app))

        await pilot.press("m")
        assert "nothing is recorded" in text(app)
        await pilot.press("R")
        await until("recording to ")
        await feed.push(pilot)
        await until("REC ")
        await pilot.press("m", "h", "i", "enter")
        assert "marker set: hi" in text(app)
        await pilot.press("R")
        await until("1 snapshots")
        assert "REC " not in text(app)
