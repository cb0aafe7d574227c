"""The detection table of the README: every fault found, with its ids, and nothing else told."""

from __future__ import annotations

from tests.benchmarks.detect_bench import FAULTS, table


def test_every_fault_is_found_with_its_ids_and_nothing_else_is() -> None:
    lines, scores = table(2)
    for fault in FAULTS:
        score = scores[fault.rule]
        assert (score.found, score.exact, score.wrong) == (score.runs, score.runs, 0), fault.name
    assert not any(score.wrong for score in scores.values())
    assert lines[-1].endswith("none.")
