from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.demo.request import Request, RequestStatus
from kvtop.demo.scheduler import Scheduler
from kvtop.demo.steps import PauseState, SchedulerOutput

MakeScheduler = Callable[..., Scheduler]
MakeRequest = Callable[..., Request]
Check = Callable[..., None]


def tokens_for(scheduler: Scheduler, output: SchedulerOutput, token: int = 5) -> dict[str, int]:
    return {
        name: token
        for name in output.num_scheduled_tokens
        if not scheduler.requests[name].is_prefill_chunk
    }


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    scheduler.update_from_output(output, tokens_for(scheduler, output))
    return output


ACTION = st.tuples(
    st.sampled_from(["add", "add", "add_session", "step", "step", "step", "abort", "abort_mid"]),
    st.integers(0, 500),
    st.integers(1, 300),
)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(actions=st.lists(ACTION, max_size=80))
def test_every_block_has_its_holders_after_every_action(
    make_scheduler: MakeScheduler,
    make_request: MakeRequest,
    scheduler_check: Check,
    actions: list[tuple[str, int, int]],
) -> None:
    scheduler = make_scheduler(blocks=64, seqs=6, budget=96)
    for number, (kind, which, length) in enumerate(actions):
        names = list(scheduler.requests)
        if kind.startswith("add"):
            # Few different beginnings, so that prefixes are hit.
            prompt = [which % 3] * min(length, 200) + [which] * (length % 50 + 1)
            scheduler.add_request(
                make_request(
                    f"r{number}",
                    prompt,
                    max_tokens=length,
                    stop_after=which + 1,
                    resumable=kind == "add_session",
                )
            )
        elif kind == "step":
            step(scheduler)
        elif kind == "abort" and names:
            scheduler.finish_requests(names[which % len(names)], RequestStatus.FINISHED_ABORTED)
        elif kind == "abort_mid" and names:
            output = scheduler.schedule()
            sampled = tokens_for(scheduler, output)
            scheduler_check(scheduler)
            scheduler.finish_requests(names[which % len(names)], RequestStatus.FINISHED_ABORTED)
            scheduler_check(scheduler)
            scheduler.update_from_output(output, sampled)
            assert not scheduler.deferred_frees
        scheduler_check(scheduler)
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    scheduler_check(scheduler)
    assert scheduler.kv_cache_manager.usage == 0.0
    assert scheduler.num_waiting_for_streaming_input == 0
    assert not scheduler.deferred_waiting


def test_a_long_prompt_is_computed_in_parts_within_the_budget(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(budget=100)
    scheduler.add_request(make_request("a", range(250)))
    counts = []
    for _ in range(4):
        output = scheduler.schedule()
        counts.append(output.num_scheduled_tokens["a"])
        made = scheduler.update_from_output(output, tokens_for(scheduler, output))
        assert len(made) == (1 if len(counts) >= 3 else 0)
    assert counts == [100, 100, 50, 1]


def test_running_requests_are_served_before_waiting_ones(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(budget=100)
    scheduler.add_request(make_request("a", range(100)))
    scheduler.add_request(make_request("b", range(200, 350)))
    assert step(scheduler).num_scheduled_tokens == {"a": 100}
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 99}


def test_a_shared_prefix_is_hit_in_whole_blocks_and_never_to_the_last_token(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(64)))
    step(scheduler)
    scheduler.add_request(make_request("b", range(64)))  # the same prompt: 4 full blocks
    scheduler.add_request(make_request("c", [*range(40), 7, 7]))  # 2 full blocks in common
    output = step(scheduler)
    assert {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs} == {
        "b": 48,
        "c": 32,
    }
    manager = scheduler.kv_cache_manager
    (a,), (b,), (c,) = (manager.get_block_ids(name) for name in "abc")
    assert b[:3] == a[:3]
    assert b[3] != a[3]
    assert c[:2] == a[:2]
    assert [manager.block_pool.blocks[i].ref_cnt for i in a[:4]] == [3, 3, 2, 1]
    assert (scheduler.prefix_cache_stats.queries, scheduler.prefix_cache_stats.hits) == (170, 80)


def test_a_finished_request_can_be_hit_until_evicted(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(blocks=64, budget=1024)
    scheduler.add_request(make_request("a", range(64), stop_after=1))
    step(scheduler)
    assert "a" not in scheduler.requests
    again = make_request("b", range(64), stop_after=1)
    scheduler.add_request(again)
    step(scheduler)
    assert again.num_cached_tokens == 48
    scheduler.add_request(make_request("big", range(1000, 2000), stop_after=1))
    step(scheduler)
    late = make_request("c", range(64))
    scheduler.add_request(late)
    step(scheduler)
    assert late.num_cached_tokens == 0


def test_preemption_takes_the_last_one_frees_all_its_blocks_and_admits_nobody(
    make_scheduler: MakeScheduler, make_request: MakeRequest, scheduler_check: Check
) -> None:
    scheduler = make_scheduler(blocks=64, budget=2048)
    for name, start in (("a", 0), ("b", 2000), ("c", 4000)):
        scheduler.add_request(
            make_request(name, range(start, start + 320), max_tokens=600, stop_after=600)
        )
    step(scheduler)
    scheduler.add_request(make_request("late", range(9000, 9010)))
    output = None
    for _ in range(100):
        output = step(scheduler)
        scheduler_check(scheduler)
        if output.preempted_req_ids:
            break
    assert output is not None
    assert output.preempted_req_ids[-1] != "a"
    assert not output.scheduled_new_reqs
    victim = scheduler.requests[output.preempted_req_ids[0]]
    made = victim.num_output_tokens
    assert victim.status == RequestStatus.PREEMPTED
    assert victim.num_computed_tokens == 0
    assert victim.num_preemptions == 1
    assert scheduler.kv_cache_manager.get_block_ids(victim.request_id) == ([],)
    assert scheduler.waiting.peek_request().request_id == output.preempted_req_ids[-1]
    # What it had generated is kept and computed again.
    while victim.request_id in scheduler.requests and victim.status != RequestStatus.RUNNING:
        step(scheduler)
    assert victim.num_output_tokens >= made > 0


def test_a_resumed_request_is_announced_as_resumed(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    request = make_request("a", range(40))
    scheduler.add_request(request)
    step(scheduler)
    scheduler.running.remove(request)
    scheduler._preempt_request(request)
    output = step(scheduler)
    assert output.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert output.scheduled_cached_reqs.num_computed_tokens == [32]  # its own blocks, hit again
    assert not output.scheduled_new_reqs


def test_a_prompt_is_admitted_only_when_all_of_it_fits(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(blocks=64, budget=128)  # 63 x 16 = 1008 tokens
    scheduler.add_request(make_request("a", range(600)))
    for _ in range(5):
        step(scheduler)
    scheduler.add_request(make_request("b", range(5000, 5500)))
    assert "b" not in step(scheduler).num_scheduled_tokens
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler).num_scheduled_tokens == {"b": 128}


def test_max_num_seqs_is_kept(make_scheduler: MakeScheduler, make_request: MakeRequest) -> None:
    scheduler = make_scheduler(seqs=3)
    for number in range(5):
        scheduler.add_request(make_request(f"r{number}", [number] * 4))
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["r0", "r1", "r2"]
    assert scheduler.get_request_counts() == (3, 2)


def test_parked_sessions_keep_their_places_and_wedge_admission(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler(seqs=2)
    for name in "ab":
        scheduler.add_request(make_request(name, range(20), stop_after=2, resumable=True))
    for _ in range(3):
        step(scheduler)
    assert not scheduler.running
    assert [r.status for r in scheduler.kv_holding_waiting] == [
        RequestStatus.WAITING_FOR_STREAMING_REQ
    ] * 2
    assert not scheduler.has_unfinished_requests()
    scheduler.add_request(make_request("c", range(10)))
    assert step(scheduler).total_num_scheduled_tokens == 0
    assert scheduler.has_unfinished_requests()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert step(scheduler).num_scheduled_tokens == {"c": 10}


def test_blocks_of_an_abort_during_a_step_wait_for_its_end(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(40)))
    output = scheduler.schedule()
    sampled = tokens_for(scheduler, output)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    ((fence, blocks),) = scheduler.deferred_frees
    assert (fence, len(blocks)) == (1, 3)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 60
    assert scheduler.update_from_output(output, sampled) == []
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 63


def test_paused_engines_schedule_nothing(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(10)))
    scheduler._pause_state = PauseState.PAUSED_ALL
    assert step(scheduler).total_num_scheduled_tokens == 0
    scheduler._pause_state = PauseState.PAUSED_NEW
    assert step(scheduler).total_num_scheduled_tokens == 0
    scheduler._pause_state = PauseState.UNPAUSED
    assert step(scheduler).total_num_scheduled_tokens == 10


def test_an_id_cannot_be_taken_twice(
    make_scheduler: MakeScheduler, make_request: MakeRequest
) -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(10)))
    with pytest.raises(ValueError, match="is taken"):
        scheduler.add_request(make_request("a", range(10)))


def test_equal_beginnings_have_equal_hashes_and_only_those(make_request: MakeRequest) -> None:
    one = make_request("a", range(48))
    two = make_request("b", [*range(32), *[9] * 16])
    shifted = make_request("c", [1, *range(1, 48)])
    assert one.block_hashes[:2] == two.block_hashes[:2]
    assert one.block_hashes[2] != two.block_hashes[2]
    assert not set(one.block_hashes) & set(shifted.block_hashes)
    for token in range(16):
        one.append_output_token_ids(token)
    assert len(one.block_hashes) == 4
