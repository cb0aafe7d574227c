"""The player, against a clock that only moves when it waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtop.errors import UsageError
from kvtop.model.snapshot import Snapshot
from kvtop.session.reader import SessionReader
from kvtop.session.replay import Replay
from kvtop.session.writer import SessionWriter
from tests.session.common import recorded, small, stored


class FakeClock:
    """Time passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float, /) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


async def take(stream: AsyncIterator[Snapshot], number: int) -> list[Snapshot]:
    return [await asyncio.wait_for(anext(stream), 10) for _ in range(number)]


async def test_it_plays_what_was_recorded_in_its_own_time(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 30)
    clock = FakeClock()
    player = Replay(SessionReader(tmp_path / "a.kvtop"), clock)
    stream = player.snapshots()
    assert await take(stream, 30) == [stored(snapshot) for snapshot in live]
    assert clock.now - 100.0 == pytest.approx(live[-1].mono_s - live[0].mono_s, abs=1e-3)
    assert player.position().at_end
    await player.close()


@pytest.mark.parametrize("speed", [0.25, 4.0, 64.0])
async def test_speed(tmp_path: Path, speed: float) -> None:
    live = recorded(tmp_path / "a.kvtop", 20)
    clock = FakeClock()
    player = Replay(SessionReader(tmp_path / "a.kvtop"), clock, speed=speed)
    assert len(await take(player.snapshots(), 20)) == 20
    length = live[-1].mono_s - live[0].mono_s
    assert clock.now - 100.0 == pytest.approx(length / speed, abs=1e-3)
    await player.close()


async def test_a_late_screen_gets_the_newest_due(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 30)
    clock = FakeClock()
    player = Replay(SessionReader(tmp_path / "a.kvtop"), clock)
    stream = player.snapshots()
    await take(stream, 1)
    clock.now += 10.25
    assert (await take(stream, 1))[0].time_s == live[10].time_s
    assert (await take(stream, 1))[0].time_s == live[11].time_s
    await player.close()


async def test_pause_step_and_seek(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 100)
    player = Replay(SessionReader(tmp_path / "a.kvtop"), FakeClock(), playing=False)
    stream = player.snapshots()

    async def shown() -> int:
        snapshot = (await take(stream, 1))[0]
        tick = player.position().tick
        assert snapshot == stored(live[tick - 1])
        return tick

    assert await shown() == 1
    player.step(1)
    assert await shown() == 2
    player.step(-5)
    assert await shown() == 1
    player.seek_percent(100)
    assert await shown() == 100
    player.step(-1)
    assert await shown() == 99
    player.seek_time(live[40].time_s)
    assert await shown() == 41
    player.seek_text("-10s")
    tick = await shown()
    assert live[-1].time_s - live[tick - 1].time_s == pytest.approx(10, abs=1.1)
    player.seek(10_000)
    assert await shown() == 100
    with pytest.raises(UsageError):
        player.seek_text("teatime")
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    player.seek(7)
    await waiting
    player.play()
    assert await shown() == 8
    assert player.position().playing
    await player.close()


async def test_two_steps_before_the_screen_wakes_are_two(tmp_path: Path) -> None:
    recorded(tmp_path / "a.kvtop", 20)
    player = Replay(SessionReader(tmp_path / "a.kvtop"), FakeClock(), playing=False)
    stream = player.snapshots()
    await take(stream, 1)
    player.step(1)
    player.step(1)
    await take(stream, 1)
    assert player.position().tick == 3
    await player.close()


async def test_events(tmp_path: Path) -> None:
    recorded(tmp_path / "a.kvtop", 100, blocks=200, requests=12)
    player = Replay(SessionReader(tmp_path / "a.kvtop"), FakeClock(), playing=False)
    stream = player.snapshots()
    await take(stream, 1)
    event = player.seek_event("marker")
    assert event is not None
    assert (event.tick, event.text) == (100, "half")
    await take(stream, 1)
    assert player.position().tick == event.tick
    assert player.seek_event("marker") is None
    back = player.seek_event("preemption", -1)
    assert back is not None
    assert back.tick < event.tick
    await player.close()


async def test_what_came_before_a_jump(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 100)
    player = Replay(SessionReader(tmp_path / "a.kvtop"), FakeClock(), playing=False)
    stream = player.snapshots()
    player.seek(80)
    shown = (await take(stream, 1))[0]
    past = player.before(30.0)
    assert [s.time_s for s in past] == [s.time_s for s in live[80 - len(past) - 1 : 79]]
    assert 28 <= len(past) <= 31
    # Looking back does not move the player.
    assert player.position().tick == 80
    player.step(1)
    assert (await take(stream, 1))[0] == stored(live[80])
    assert shown == stored(live[79])
    await player.close()


async def test_a_growing_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    churn = small()
    writer = SessionWriter(path)
    live = [churn.tick()]
    writer.write(live[0])
    player = Replay(SessionReader(path), FakeClock(), speed=64)
    stream = player.snapshots()
    await take(stream, 1)
    assert player.position().growing
    for _ in range(5):
        live.append(churn.tick())
        writer.write(live[-1])
        assert await take(stream, 1) == [stored(live[-1])]
    writer.close()
    assert not player.position().growing
    await player.close()


async def test_the_feed_of_the_screen(tmp_path: Path) -> None:
    live = recorded(tmp_path / "a.kvtop", 5)
    player = Replay(SessionReader(tmp_path / "a.kvtop"), FakeClock())
    player.set_interval(2.0)
    player.set_visible(stacks=False)
    engine = live[0].engines[0]
    detail = await player.request_detail(engine, "nobody")
    assert "not recorded" in detail.error
    await player.close()


async def test_close_ends_the_stream(tmp_path: Path) -> None:
    recorded(tmp_path / "a.kvtop", 5)
    player = Replay(SessionReader(tmp_path / "a.kvtop"), FakeClock(), playing=False)
    stream = player.snapshots()
    await take(stream, 1)
    waiting = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    await player.close()
    assert await asyncio.wait_for(waiting, 5) is None
