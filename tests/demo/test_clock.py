from __future__ import annotations

import time

import pytest

from kvtop.demo.clock import PacedClock


class FakeTime:
    """Real time under the test's control: sleeping is what makes it pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_real_time_follows_simulated_time_without_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    clock = PacedClock(speed=4.0)
    for _ in range(100):
        clock.advance(0.025)
        fake.now += 0.001  # The step's own work.
    assert clock.now_s == pytest.approx(2.5)
    assert fake.now - 1000.0 == pytest.approx(2.5 / 4.0, abs=0.002)


def test_time_lost_to_a_stop_is_not_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    clock = PacedClock()
    clock.advance(0.1)
    fake.now += 30.0  # SIGSTOP
    clock.advance(0.1)
    before = fake.now
    clock.advance(0.1)
    assert fake.now - before == pytest.approx(0.1)


def test_a_long_wait_ends_soon_after_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime(monkeypatch)
    clock = PacedClock()

    def sleep(seconds: float) -> None:
        fake.sleep(seconds)
        clock.stopping = True

    monkeypatch.setattr(time, "sleep", sleep)
    clock.wait_until(3600.0)
    assert sum(fake.slept) <= 0.2
