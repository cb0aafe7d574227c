from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtop.draw.requests import (
    COLUMNS,
    column_at,
    columns_for,
    first_row,
    hit_percent,
    requests_panel,
    row_at,
    visible_requests,
)
from kvtop.draw.view import View
from kvtop.model.snapshot import Request
from tests.draw import samples
from tests.draw.golden import exact, styles_of, text_of

MANY = samples.with_engine(
    requests=tuple(
        replace(samples.REQUESTS[0], id=f"r{number:03d}", blocks=number) for number in range(100)
    )
)


def ids(rows: list[Request]) -> list[str]:
    return [row.id for row in rows]


def test_sorted_with_unknown_last_both_ways() -> None:
    up = visible_requests(samples.HEALTHY, View(sort="MEM", reverse=False))
    down = visible_requests(samples.HEALTHY, View(sort="MEM", reverse=True))
    assert ids(up) == ["cmpl-bbbb", "cmpl-cccc", "cmpl-aaaa", "cmpl-eeee", "cmpl-dddd"]
    assert ids(down) == ["cmpl-eeee", "cmpl-aaaa", "cmpl-cccc", "cmpl-bbbb", "cmpl-dddd"]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_sorts(column: str) -> None:
    rows = visible_requests(samples.HEALTHY, View(sort=column))
    assert sorted(ids(rows)) == sorted(request.id for request in samples.REQUESTS)


def test_search_in_id_status_and_phase_without_case() -> None:
    found = {
        text: ids(visible_requests(samples.HEALTHY, View(search=text)))
        for text in ("BBBB", "remote", "decode", "[", "")
    }
    assert found["BBBB"] == ["cmpl-bbbb"]
    assert found["remote"] == ["cmpl-cccc"]
    assert found["decode"] == ["cmpl-aaaa"]
    assert found["["] == []
    assert len(found[""]) == 5


def test_the_cursor_is_always_on_screen_and_row_at_finds_what_is_drawn() -> None:
    rng = random.Random(7)
    for _ in range(200):
        height = rng.randint(2, 30)
        view = View(
            sort="ID",
            reverse=False,
            cursor_id=f"r{rng.randrange(100):03d}",
            scroll={"requests": rng.randint(-5, 120)},
        )
        lines = exact(requests_panel(MANY, view, 100, height), 100, height)
        drawn = [text_of(line).split()[0] for line in lines[1:]]
        assert view.cursor_id in drawn
        marked = [line for line in lines if styles_of(line) & {"cursor", "cursor.idle"}]
        assert [text_of(line).split()[0] for line in marked] == [view.cursor_id]
        first = first_row(MANY, view, height)
        assert drawn == [f"r{number:03d}" for number in range(first, first + height - 1)]
        for y in range(height):
            found = row_at(MANY, view, height, y)
            assert (found.id if found else None) == (drawn[y - 1] if y else None)


def test_a_cursor_whose_request_is_gone_is_on_the_first_row() -> None:
    view = View(sort="ID", reverse=False, cursor_id="gone", scroll={"requests": 50})
    lines = requests_panel(MANY, view, 80, 5)
    assert text_of(lines[1]).startswith("r000")
    assert styles_of(lines[1]) == {"cursor"}
    assert row_at(MANY, view, 5, 9) is None


def test_the_sorted_column_stays_when_others_go() -> None:
    view = View(sort="SLACK")
    titles = [column.title for column, _ in columns_for(30, view, samples.ENGINE)]
    assert titles[0] == "ID"
    assert "SLACK" in titles
    assert [column.title for column, _ in columns_for(5, view, samples.ENGINE)] == ["ID"]


@pytest.mark.parametrize("width", range(1, 200))
def test_columns_never_take_more_than_there_is(width: int) -> None:
    columns = columns_for(width, View(), samples.ENGINE)
    assert sum(cells for _, cells in columns) + len(columns) - 1 <= width


def test_a_click_on_a_head_names_the_column() -> None:
    view = View(sort="ID", reverse=False)
    heads = text_of(requests_panel(samples.HEALTHY, view, 120, 3)[0])
    for title in ("PHASE", "AGE", "BLOCKS", "REASON"):
        assert column_at(samples.HEALTHY, view, 120, heads.index(title)) == title
    assert column_at(samples.HEALTHY, view, 120, 500) is None


def test_reasons() -> None:
    gone = replace(samples.REQUESTS[0], client="gone", client_gone_s=12.0, reason="capacity")
    odd = replace(samples.REQUESTS[0], status="WAITING_FOR_FSM")
    texts = []
    for request in (gone, odd, samples.REQUESTS[3], samples.REQUESTS[0]):
        lines = requests_panel(samples.with_engine(requests=(request,)), View(), 158, 2)
        texts.append(text_of(lines[1])[-30:].strip())
    assert texts == ["client gone 12s, capacity", "WAITING_FOR_FSM", "connector 33s", ""]


def test_a_hit_after_a_preemption_is_not_a_share_of_the_prompt() -> None:
    fresh = replace(samples.REQUESTS[0], prompt_tokens=100, cached_tokens=64, preemptions=0)
    assert hit_percent(fresh) == 64.0
    assert hit_percent(replace(fresh, cached_tokens=213, preemptions=1)) is None
    # An older probe, or one that came later, may not know of the preemption.
    assert hit_percent(replace(fresh, cached_tokens=213, preemptions=None)) is None
