"""Every case has its test: those about what kvtop reads and draws are beside that code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
HERE = Path(__file__).with_name("test_cases.py").read_text()

NUMBERS = (
    *(f"C{n}" for n in (1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 14, 15, 17, 18, 19)),
    *(f"C{n}" for n in (22, 23, 24, 25, 26, 31, 32, 36, 38, 40)),
    *(f"P{n}" for n in range(1, 14)),
)
"""Cases from reports of users (C), and faults of other tools (P)."""
ELSEWHERE = {
    "C19": ("sources/test_metrics.py", "test_two_data_parallel_engines_have_their_own_blocks"),
    "C31": ("sources/test_stacks.py", "--nonblocking"),
    "C32": ("sources/test_stacks.py", "SYS_PTRACE"),
    "C36": ("sources/test_nvml.py", "test_unified_memory_shows_the_systems"),
    "C40": ("draw/test_requests.py", "test_columns_never_take_more_than_there_is"),
    "P1": ("draw/test_screen.py", "test_an_id_full_of_markup_and_escapes_is_shown"),
    "P3": ("draw/test_chart.py", "test_nothing_is_drawn_where_nothing_was_read"),
    "P6": ("sources/test_metrics_rates.py", "test_median_is_the_upper_bound_of_its_bucket"),
    "P8": ("sources/test_nvml.py", "test_a_lost_gpu_hides_no_other_and_comes_back"),
    "P9": ("draw/test_layout.py", "test_from_80x24_on_requests_and_blocks_are_there"),
    "P12": ("e2e/test_screen_in_terminal.py", "test_the_first_frame_is_not_cleared"),
    "P13": ("stream/test_merge.py", "test_no_probe_is_said_and_blocks_stay_unknown"),
}
"""Case to file and what stands there."""


@pytest.mark.parametrize("number", NUMBERS)
def test_a_case_has_its_test(number: str) -> None:
    if re.search(rf"^def test_{number.lower()}_", HERE, re.M):
        assert number not in ELSEWHERE
        return
    file, text = ELSEWHERE[number]
    assert text in (TESTS / file).read_text()
