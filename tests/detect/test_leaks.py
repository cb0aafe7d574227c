"""Each way of losing blocks: found in time with the exact ids, alone, and over when mended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import DEFAULTS, apply_overrides
from kvtop.model.snapshot import Phase
from tests.detect.build import PID, Sim, alarms, first, names, one, watch


def test_ghosts_are_found_at_the_fifth_idle_reading_and_not_at_the_fourth() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=6)
    watch(sim, judge, 3)
    lost = sim.end_but_lose("a", 3)

    history = watch(sim, judge, 6)

    assert first(history, "leak.ghost-blocks") == 4
    finding = one(history[4], "leak.ghost-blocks")
    assert finding.block_ids == tuple(lost)
    assert finding.engine_pid == PID
    assert finding.severity == "warning"
    assert finding.since_s == sim.time_s - 5
    assert "3 of 63" in finding.evidence["ghost blocks"]
    assert finding.disproof
    assert alarms(history[4]) == {"leak.ghost-blocks"}


def test_ghosts_under_load_need_time_and_steps() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    sim.start("stays", blocks=4)
    watch(sim, judge, 2)
    lost = sim.end_but_lose("a", 2)

    history = watch(sim, judge, 25)

    assert first(history, "leak.ghost-blocks") == DEFAULTS.ghost_busy_s
    assert one(history[-1], "leak.ghost-blocks").block_ids == tuple(lost)
    assert all(alarms(f) <= {"leak.ghost-blocks"} for f in history)


def test_ghosts_without_steps_under_load_are_not_judged() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    sim.start("stays", blocks=4)
    watch(sim, judge, 2)
    sim.end_but_lose("a", 2)

    history = [judge.judge(sim.tick(steps=0)) for _ in range(60)]

    assert not any(alarms(f) for f in history)


def test_ghosts_that_change_their_ids_are_no_leak() -> None:
    sim, judge = Sim(), Judge()
    sim.start("stays", blocks=4)

    def each(i: int) -> None:
        sim.extra_refs = {30 + i % 20: 1}

    history = watch(sim, judge, 60, each=each)

    assert not any("leak.ghost-blocks" in names(f) for f in history)


def test_ghosts_end_when_the_blocks_are_free_again_and_only_after_the_clear_time() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=6)
    watch(sim, judge, 2)
    lost = sim.end_but_lose("a", 3)
    watch(sim, judge, 8)
    sim.give(lost)

    history = watch(sim, judge, 8)

    there = ["leak.ghost-blocks" in names(f) for f in history]
    assert there == [True] * 4 + [False] * 4


def test_a_large_leak_is_critical_and_tells_when_the_pool_is_gone() -> None:
    sim, judge = Sim(), Judge()
    for i in range(4):
        sim.start(f"r{i}", blocks=4)
    sim.start("stays", blocks=2)
    for i in range(4):
        watch(sim, judge, 30)
        sim.end_but_lose(f"r{i}", 4)
    history = watch(sim, judge, 30)

    finding = one(history[-1], "leak.ghost-blocks")
    assert finding.severity == "critical"
    assert len(finding.block_ids) == 16
    assert "minute" in finding.evidence["grows by"]
    assert finding.evidence["pool is gone in"].endswith("min")


def test_ghosts_are_counted_without_columns_but_only_at_idle() -> None:
    sim, judge = Sim(), Judge()
    sim.columns = False
    sim.start("a", blocks=4)
    sim.start("b", blocks=4)
    sim.end_but_lose("a", 2)
    busy = watch(sim, judge, 40)
    sim.end("b")
    idle = watch(sim, judge, 6)

    assert not any(alarms(f) for f in busy)
    assert first(idle, "leak.ghost-blocks") == 4
    assert one(idle[-1], "leak.ghost-blocks").block_ids == ()


def test_ghosts_wait_for_the_audit_that_confirms_them() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    watch(sim, judge, 1)
    sim.end_but_lose("a", 2)
    sim.probe_fields = {"verified_age_s": 20.0}

    history = watch(sim, judge, 30)

    assert first(history, "leak.ghost-blocks") == 19


def test_a_bumped_ref_count_is_found_while_its_request_lives_and_becomes_a_ghost_after() -> None:
    sim, judge = Sim(), Judge()
    req = sim.start("a", blocks=4)
    watch(sim, judge, 2)
    bumped = req.blocks[1]
    sim.refs[bumped] += 1

    history = watch(sim, judge, 8)

    assert first(history, "leak.ref-mismatch") == DEFAULTS.mismatch_s
    finding = one(history[-1], "leak.ref-mismatch")
    assert finding.block_ids == (bumped,)
    assert finding.severity == "warning"
    assert finding.evidence["ref count for holders"] == f"{bumped}: 2 for 1"
    assert alarms(history[-1]) == {"leak.ref-mismatch"}

    sim.end("a")
    after = watch(sim, judge, 12)
    assert one(after[-1], "leak.ghost-blocks").block_ids == (bumped,)
    assert "leak.ref-mismatch" not in names(after[-1])


def test_a_ref_count_below_its_holders_is_critical() -> None:
    sim, judge = Sim(), Judge()
    req = sim.start("a", blocks=4)
    watch(sim, judge, 1)
    sim.refs[req.blocks[0]] -= 1

    history = watch(sim, judge, 8)

    assert one(history[-1], "leak.ref-mismatch").severity == "critical"


def test_saturated_counts_are_equal_and_no_mismatch() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    shot = sim.tick()
    pool = shot.engines[0].pools[0]
    full = bytes([255]) * len(pool.states or b"")
    shots = []
    for i in range(12):
        s = sim.tick()
        engine = s.engines[0]
        pool = replace(engine.pools[0], refs=full, tables=full)
        shots.append(judge.judge(replace(s, engines=(replace(engine, pools=(pool,)),))))
        assert i >= 0
    assert not any(alarms(f) for f in shots)


def test_the_free_queue_that_disagrees_breaks_the_identity_and_shows_both_sides() -> None:
    sim, judge = Sim(), Judge()
    watch(sim, judge, 2)
    sim.free_queue_error = -7

    history = watch(sim, judge, 8)

    assert first(history, "leak.broken-identity") == DEFAULTS.identity_s
    finding = one(history[-1], "leak.broken-identity")
    assert finding.severity == "critical"
    assert finding.evidence["free + cached"] == "63"
    assert finding.evidence["length of the free queue"] == "56"

    sim.free_queue_error = 0
    assert "leak.broken-identity" not in names(watch(sim, judge, 8)[-1])


def test_an_orphan_table_is_named_with_its_id() -> None:
    sim, judge = Sim(), Judge()
    req = sim.start("lost", blocks=5)
    sim.start("stays", blocks=2)
    watch(sim, judge, 2)
    req.phase, req.status, req.reason = Phase.HELD, "NO REQUEST", "orphan table"

    history = watch(sim, judge, 14)

    assert first(history, "leak.orphan-table") == DEFAULTS.orphan_table_s
    finding = one(history[-1], "leak.orphan-table")
    assert finding.request_ids == ("lost",)
    assert finding.evidence["blocks"] == "5"
    assert alarms(history[-1]) == {"leak.orphan-table"}

    sim.end("lost")
    assert not alarms(watch(sim, judge, 6)[-1])


def test_a_zombie_is_named_after_its_time_and_only_with_client_data() -> None:
    sim, judge = Sim(), Judge()
    req = sim.start("z", blocks=3, client="live")
    sim.start("other", blocks=3, client="live")
    watch(sim, judge, 2)
    req.client = "gone"

    def each(i: int) -> None:
        req.client_gone_s = float(i)
        sim.decode("z", 1)

    history = watch(sim, judge, 15, each=each)

    assert first(history, "leak.zombie-request") == DEFAULTS.zombie_s
    finding = one(history[-1], "leak.zombie-request")
    assert finding.request_ids == ("z",)
    assert "tokens left to generate" in finding.evidence
    assert alarms(history[-1]) == {"leak.zombie-request"}

    sim.end("z")
    assert not alarms(watch(sim, judge, 6)[-1])


def test_a_finished_request_kept_by_a_connector_is_no_zombie() -> None:
    sim, judge = Sim(), Judge()
    sim.start("other", client="live")
    req = sim.start("done", client="gone", client_gone_s=100.0)
    req.phase, req.status, req.reason, req.held_s = Phase.HELD, "FINISHED", "connector", 100.0

    assert not any(alarms(f) for f in watch(sim, judge, 20))


@pytest.mark.parametrize("lease_s", [480.0, 30.0])
def test_a_connector_hold_is_information_within_its_lease_and_a_leak_past_it(
    lease_s: float,
) -> None:
    limits = apply_overrides({"lease_s": lease_s, "lease_grace_s": 5})
    sim, judge = Sim(), Judge(limits)
    req = sim.start("kept", blocks=7)
    req.phase, req.status, req.reason = Phase.HELD, "FINISHED_LENGTH_CAPPED", "connector"

    def each(i: int) -> None:
        req.held_s = float(i)

    history = watch(sim, judge, int(lease_s) + 12, each=each)

    assert first(history, "leak.delayed-free") == DEFAULTS.delayed_free_s
    early = one(history[20], "leak.delayed-free")
    assert early.severity == "info"
    assert early.request_ids == ("kept",)
    assert "20 s" in early.evidence["oldest"]
    at = first(history, "leak.held-past-lease")
    assert at == lease_s + 5
    assert not any(alarms(f) for f in history[:at])
    assert one(history[-1], "leak.held-past-lease").evidence["blocks"] == "7"

    sim.end("kept")
    assert not names(watch(sim, judge, 6)[-1], "leak.")


def test_blocks_that_wait_for_a_step_for_ever_are_found_with_their_ids() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    sim.start("stays", blocks=2)
    watch(sim, judge, 2)
    waiting = sim.end_into_fence("a")

    history = watch(sim, judge, 14)

    assert first(history, "leak.fence-stuck") == DEFAULTS.fence_s
    assert one(history[-1], "leak.fence-stuck").block_ids == tuple(waiting)
    assert alarms(history[-1]) == {"leak.fence-stuck"}

    sim.fenced.clear()
    sim.give(waiting)
    assert not alarms(watch(sim, judge, 6)[-1])


def test_blocks_that_wait_for_a_step_or_two_are_no_leak() -> None:
    sim, judge = Sim(), Judge()
    sim.start("stays", blocks=2)

    def each(i: int) -> None:
        sim.give(sim.fenced)
        sim.fenced = []
        sim.start(f"r{i}", blocks=4)
        sim.end_into_fence(f"r{i}")

    assert not any(alarms(f) for f in watch(sim, judge, 90, each=each))


@pytest.mark.parametrize(("sound", "told_at"), [(0, DEFAULTS.floor_moments - 1), (40, 6)])
def test_a_falling_floor_is_told_with_slope_and_time_left(sound: int, told_at: int) -> None:
    """However many sound moments there were before it began to fall."""
    sim, judge = Sim(blocks=513), Judge()
    # Blocks that the probe cannot place: counted used although no request is there.
    gone = 0

    def look(live: bool) -> tuple[object, ...]:
        s = sim.tick(10.0)
        engine = s.engines[0]
        counts = engine.pools[0].counts
        counts = replace(counts, free=counts.free - gone, used=counts.used + gone)
        pool = replace(
            engine.pools[0], counts=counts, free_queue=None, states=None, refs=None, tables=None
        )
        engine = replace(engine, pools=(pool,), counters=None)
        return judge.judge(replace(s, engines=(engine,)))

    last: tuple[object, ...] = ()
    told = []
    for i in range(-sound, 10):
        sim.start(f"r{i}", blocks=4)
        look(True)
        sim.end(f"r{i}")
        gone += 4 if i >= 0 else 0
        last = look(False)
        told.append(bool(names(last, "leak.")))
    finding = one(last, "leak.floor-falling")  # type: ignore[arg-type]
    assert told.index(True) == sound + told_at
    assert finding.evidence["floor"].endswith("-> 472 of 512 blocks")
    assert "an hour" in finding.evidence["slope"]
    assert "min" in finding.evidence["time left"]


def test_the_floor_of_a_healthy_engine_does_not_fall() -> None:
    sim, judge = Sim(), Judge()
    for i in range(40):
        sim.start(f"r{i}", blocks=1 + i % 5)
        judge.judge(sim.tick())
        sim.end(f"r{i}", cache=True)
        assert not names(judge.judge(sim.tick()), "leak.")


@pytest.mark.parametrize(
    ("version", "lease_s", "says"),
    [
        (None, 480, "the longest that vLLM's own connectors have"),
        ("0.10.2", 480, "after 120 s"),
        ("0.15.1", 480, "NIXL's and Mooncake's in this vLLM"),
        ("0.32.0", 480, "NIXL's prefill side has 30 s, renewed"),
        ("not a version", 480, "the longest"),
        ("0.32.0", 30, "as set in [findings]"),
    ],
)
def test_a_hold_says_whose_lease_it_is_measured_by(
    version: str | None, lease_s: int, says: str
) -> None:
    sim, judge = Sim(), Judge(apply_overrides({"lease_s": lease_s}))
    sim.engine_fields = {"vllm_version": version}
    req = sim.start("sent", blocks=5)
    req.phase, req.status, req.reason = Phase.HELD, "FINISHED_LENGTH_CAPPED", "connector"
    told = one(watch(sim, judge, 8)[-1], "leak.delayed-free").evidence["lease"]
    assert says in told
    assert told.startswith("8 min" if lease_s == 480 else "30 s")


def test_the_release_balance_alarms_only_when_nothing_else_explains_it() -> None:
    sim, judge = Sim(blocks=64), Judge()
    sim.columns = False
    sim.start("stays", blocks=2)

    def each(i: int) -> None:
        # Half of what is handed out never comes back by a way that is counted.
        sim.start(f"r{i}", blocks=8)
        sim.end(f"r{i}")
        sim.counters["freed"] -= 4

    history = watch(sim, judge, 120, each=each)

    at = first(history, "leak.imbalance")
    assert at is not None
    assert 60 <= at <= 90
    assert one(history[-1], "leak.imbalance").evidence["ratio"] == "0.50"


def test_the_release_balance_of_a_ramp_is_healthy() -> None:
    sim, judge = Sim(blocks=2049, max_num_seqs=4096), Judge()

    def each(i: int) -> None:
        sim.start(f"r{i}", blocks=8)

    assert not any(alarms(f) for f in watch(sim, judge, 200, each=each))


def test_a_finding_starts_and_ends_the_same_whatever_the_interval() -> None:
    for dt_s in (0.25, 1.0, 2.0, 5.0):
        sim, judge = Sim(), Judge()
        req = sim.start("a", blocks=4)
        watch(sim, judge, 2, dt_s=dt_s)
        sim.refs[req.blocks[0]] += 1
        history = watch(sim, judge, int(12 / dt_s) + 1, dt_s=dt_s)
        at = first(history, "leak.ref-mismatch")
        assert at is not None
        assert DEFAULTS.mismatch_s <= at * dt_s <= DEFAULTS.mismatch_s + dt_s
