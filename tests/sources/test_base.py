"""The poll loop: every outcome becomes a reading, and failures are asked less often."""

import asyncio
import contextlib

import pytest

from kvtop.model.snapshot import SourceState
from kvtop.sources.base import Reading, SourceError, one_line, poll


class FakeClock:
    """Time that moves only in `sleep`, and that ends the loop after a number of sleeps."""

    def __init__(self, sleeps: int) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.left = sleeps

    def time(self) -> float:
        return 1_000_000 + self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.left -= 1
        if self.left <= 0:
            raise asyncio.CancelledError
        self.now += seconds
        await asyncio.sleep(0)


class Scripted:
    """A source that plays a list of outcomes: a value, an exception, or None for a hang."""

    name, kind, period_s, target_pid = "test 1", "nvml", 1.0, 7

    def __init__(self, *script: object, deadline_s: float = 0.02) -> None:
        self.script = list(script)
        self.deadline_s = deadline_s
        self.reads = 0

    async def read(self) -> object:
        self.reads += 1
        item = self.script.pop(0)
        if item is None:
            await asyncio.Event().wait()
        if isinstance(item, BaseException):
            raise item
        return item

    async def close(self) -> None:
        pass


async def run(source: Scripted, **options: object) -> tuple[list[Reading[object]], FakeClock]:
    clock = FakeClock(len(source.script))
    seen: list[Reading[object]] = []
    with contextlib.suppress(asyncio.CancelledError):
        await poll(source, clock, seen.append, **options)  # type: ignore[arg-type]
    return seen, clock


async def test_starts_with_a_starting_reading_then_values() -> None:
    seen, clock = await run(Scripted("a", "b"))
    assert [r.status.state for r in seen] == [SourceState.STARTING, SourceState.OK, SourceState.OK]
    assert [r.value for r in seen] == [None, "a", "b"]
    assert seen[0].status.value_time_s is None
    assert seen[2].status.since_s == seen[1].status.since_s == 1_000_100
    assert seen[2].status.value_time_s == 1_000_101
    assert seen[1].status.target_pid == 7
    assert clock.slept == [1.0, 1.0]


async def test_failure_keeps_the_last_value_and_its_time() -> None:
    broken = SourceError("it is gone", "start it")
    seen, _ = await run(Scripted("a", broken, broken, "b"))
    second = seen[3]
    assert second.status.state is SourceState.FAILED
    assert (second.status.reason, second.status.remedy) == ("it is gone", "start it")
    assert second.value == "a"
    assert second.status.value_time_s == 1_000_100
    assert second.status.since_s == seen[2].status.since_s == 1_000_101
    assert seen[4].status.state is SourceState.OK
    assert seen[4].status.reason == ""
    assert seen[4].value == "b"


async def test_pauses_double_to_ten_seconds_and_are_reset_by_success() -> None:
    broken = SourceError("no")
    _, clock = await run(Scripted(*[broken] * 6, "a", broken, "b"))
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 1.0, 1.0, 1.0]


async def test_a_longer_interval_than_the_longest_pause_is_kept() -> None:
    broken = SourceError("no")
    _, clock = await run(Scripted(broken, broken), interval=lambda: 30.0)
    assert clock.slept == [30.0, 30.0]


async def test_a_read_that_hangs_fails_at_its_deadline_and_the_next_one_is_fresh() -> None:
    source = Scripted(None, "a")
    seen, _ = await run(source)
    assert seen[1].status.state is SourceState.FAILED
    assert seen[1].status.reason == "no answer within 0.02 s"
    assert seen[2].value == "a"
    assert source.reads == 2


async def test_no_second_read_beside_one_that_ignores_its_cancellation() -> None:
    release = asyncio.Event()

    class Stubborn(Scripted):
        async def read(self) -> object:
            self.reads += 1
            if self.reads == 1:
                while not release.is_set():
                    with contextlib.suppress(asyncio.CancelledError):
                        await release.wait()
                raise ValueError("late")
            return "fresh"

    source = Stubborn(1, 2, 3)
    clock = FakeClock(4)
    seen: list[Reading[object]] = []

    def publish(reading: Reading[object]) -> None:
        seen.append(reading)
        if len(seen) == 3:
            release.set()

    with contextlib.suppress(asyncio.CancelledError):
        await poll(source, clock, publish)
    assert [r.status.state.value for r in seen[1:3]] == ["failed", "failed"]
    assert seen[-1].value == "fresh"
    assert source.reads <= 3


@pytest.mark.parametrize("fault", [ValueError("a\x1b[2Jb\nc"), KeyError("x"), OSError(5, "io")])
async def test_a_fault_of_kvtop_is_named_and_survived(fault: Exception) -> None:
    seen, _ = await run(Scripted(fault, "a"))
    reason = seen[1].status.reason
    assert reason.startswith("kvtop failed while reading test 1: ")
    assert reason.isprintable()
    assert seen[2].value == "a"


async def test_a_read_that_cancels_itself_does_not_end_the_loop() -> None:
    seen, _ = await run(Scripted(asyncio.CancelledError(), "a"))
    assert seen[1].status.state is SourceState.FAILED
    assert seen[2].value == "a"


async def test_a_stale_value_is_shown_as_stale() -> None:
    seen, _ = await run(Scripted("a", "b"), stale=lambda v: "it stands still" if v == "b" else "")
    assert [r.status.state.value for r in seen[1:]] == ["ok", "stale"]
    assert seen[2].status.reason == "it stands still"


async def test_cancelling_ends_it_even_while_a_read_hangs() -> None:
    source = Scripted(None, deadline_s=1000.0)
    task = asyncio.ensure_future(poll(source, FakeClock(9), lambda _: None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_one_line() -> None:
    assert one_line("a\r\n\x1b[31mb\u202e c") == "a [31mb c"
    assert one_line("x" * 300, 10) == "xxxxxxx..."
