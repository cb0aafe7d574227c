"""What one tick of a busy engine takes, in bytes: the budget of ten megabytes an hour."""

from __future__ import annotations

from kvtop.session.frames import FrameEncoder, total_bytes
from kvtop.session.writer import KEY_EVERY
from tests.session.churn import Churn

BUDGET_BYTES = 10_000_000 / 3600


def test_frames_of_a_busy_engine_leave_room_for_the_tables() -> None:
    churn = Churn(blocks=20_000, requests=256)
    for _ in range(60):
        churn.tick()
    encoder = FrameEncoder()
    frames = [encoder.encode(churn.tick(), key=n % KEY_EVERY == 0) for n in range(KEY_EVERY)]
    assert sum(len(frame.names) for frame in frames[1:]) > 300
    sizes = total_bytes(frames)
    # The typed tables and the ids of new requests take the rest.
    assert sum(sizes.values()) / len(frames) < 0.6 * BUDGET_BYTES
    quiet = encoder.encode(churn.snapshot(), key=False)
    assert len(quiet.blocks) < 100
