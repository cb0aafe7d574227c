"""The probe on the installed vLLM when things are held, paused, or not there at all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.versions.conftest import INSTALLED

pytestmark = pytest.mark.vllm

NAMED = {
    "scheduler.waiting": "waiting queues",
    "scheduler.deferred_frees": "deferred frees",
    "scheduler.deferred_waiting": "deferred requests",
    "scheduler._pause_state": "pause state",
    "manager.coordinator": "block tables",
    "coordinator.single_type_managers": "block tables",
    "group.req_to_blocks": "block tables",
    "pool.free_block_queue": "free queue",
    "queue.num_free_blocks": "free queue",
}
"""What is missing by name when one of these is not there."""
REFUSED = {"scheduler.requests", "pool.blocks"}
"""Without one of these there is no engine to look into."""
NEEDED = {
    "pool.null_block",
    "block.ref_cnt",
    "block._block_hash",
    "block.is_null",
    "block.next_free_block",
    "request.request_id",
    "request.status",
}
"""Without one of these no cut can be taken."""


@pytest.fixture
def result(driven) -> Any:
    return driven(INSTALLED, "faults.py")


def test_every_scenario_ran_and_every_cut_was_true(result):
    assert {name: part.get("failures", []) for name, part in result.items()} == {
        name: []
        for name in ("connector", "fences", "paused", "host_pool", "stops_itself", "removals")
    }


@pytest.mark.parametrize(
    ("when", "status", "reason"),
    [
        ("remote", "WAITING_FOR_REMOTE_KVS", "remote KV"),
        ("sending", "FINISHED_LENGTH_CAPPED", "connector"),
        ("aborted", "FINISHED_ABORTED", "connector"),
    ],
)
def test_a_connectors_blocks_are_held_with_reason_and_age(result, when, status, reason):
    held = result["connector"][when]
    assert (held["status"], held["phase"], held["reason"]) == (status, "held", reason)
    assert held["blocks"] == held["held_blocks"] > 3
    assert held["ghost_blocks"] == 0
    assert 0.25 <= held["grew_s"] <= held["held_s"] < 30


def test_what_a_connector_has_done_with_is_held_no_longer(result):
    part = result["connector"]
    assert part["arrived"] == "decode"
    assert part["sent"] == {}
    assert (part["after"]["held"], part["after"]["used"], part["after"]["ghost"]) == (0, 0, 0)


def test_blocks_behind_a_step_fence_are_held_until_the_step_is_done(result):
    part = result["fences"]
    assert part["row"] == {}
    assert (part["during"]["held"], part["during"]["ghost"]) == (4, 0)
    assert part["during"]["used"] == part["after"]["held"] == 0


def test_paused_and_sleeping_engines_say_so(result):
    part = result["paused"]
    for state in ("PAUSED_NEW", "PAUSED_ALL"):
        assert part[state]["engine"] == "paused"
        assert part[state]["waiting"] == ["waiting", "paused"]
        assert part[state]["running"] == "decode"
    assert part["UNPAUSED"]["engine"] == "running"
    assert part["UNPAUSED"]["waiting"][0] != "waiting"
    assert part["sleeping"] == "sleeping"


def test_a_host_pool_is_counted_beside_the_gpus(result):
    part = result["host_pool"]
    assert part["labels"] == ["gpu", "cpu"]
    assert part["looks"] > 20
    assert part["wrong"] == []
    assert part["busy"]["gpu"] > 5
    assert part["busy"]["cpu"] > 5


def test_after_ten_errors_the_probe_stops_itself_and_says_so(result):
    part = result["stops_itself"]
    assert part["hello"]["state"] == "stopped"
    assert part["hello"]["reason"].startswith("10 errors of the probe's own, the last: ")
    assert "block_id" in part["hello"]["reason"]
    assert part["left_behind"] == []


def test_the_engine_does_the_same_with_and_without_the_probe(result):
    runs = result["removals"]["runs"]
    assert len(runs) > 100
    assert [run["removed"] for run in runs if not run["same"]] == []


def test_the_probe_survives_every_loss_and_leaves_nothing_behind(result):
    for run in result["removals"]["runs"]:
        if "refused" in run:
            assert set(run["removed"]) & REFUSED
            continue
        assert run["gone"], run
        assert run["left_behind"] == [], run
        assert run["wrong"] == [], run
        if run["state"] == "stopped":
            assert run["errors"] == 10, run
            assert run["reason"].startswith("10 errors of the probe's own"), run
        else:
            assert run["state"] == "ok", run
            assert run["errors"] < 10, run


def test_what_is_not_there_from_the_start_is_named(result):
    alone = {
        run["removed"][0]: run
        for run in result["removals"]["runs"]
        if run["when"] < 0 and len(run["removed"]) == 1
    }
    for removed, name in NAMED.items():
        assert name in alone[removed]["missing"], removed
        assert alone[removed]["statuses"] == [200], removed
    for removed in REFUSED:
        assert alone[removed]["refused"].startswith("no "), removed
    for removed in NEEDED:
        assert alone[removed]["statuses"] == [503], removed
        said = [alone[removed]["reason"], *alone[removed]["texts"]]
        assert any(removed.split(".")[1] in text for text in said), removed
