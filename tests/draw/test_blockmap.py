from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvtop.draw.blockmap import block_map, blocks_a_cell, state_bar
from kvtop.draw.view import Line
from kvtop.model.blocks import LETTERS, BlockState, count_states
from tests.draw.golden import text_of
from tests.draw.samples import column

F, C, U, S, H, G, N = (
    bytes([state])
    for state in (
        BlockState.FREE,
        BlockState.CACHED,
        BlockState.USED,
        BlockState.SHARED,
        BlockState.HELD,
        BlockState.GHOST,
        BlockState.NULL,
    )
)


def halves(lines: list[Line]) -> tuple[str, str]:
    """The letters of all upper and all lower half cells, line after line."""
    upper = lower = ""
    for line in lines:
        for text, style in line:
            pair = style[4:] if style.startswith("map:") else "--"
            upper += pair[0] * len(text)
            lower += pair[1] * len(text)
    return upper, lower


def test_blocks_that_fit_are_one_half_cell_each() -> None:
    lines = block_map(N + U * 3 + C * 2 + F * 2, 4, 2)
    assert lines == [
        (("▀", "map:0c"), ("▀", "map:Uc"), ("▀▀", "map:U.")),
        (("    ", ""),),
    ]


def test_an_odd_row_has_empty_lower_halves() -> None:
    assert block_map(U * 3, 2, 1) == [(("▀", "map:UU"), ("▀", "map:U-"))]


def test_a_cell_shows_the_most_frequent_state() -> None:
    states = (U * 3 + F * 2) + (F * 3 + U * 2) + (N + C * 2 + U * 2)
    assert blocks_a_cell(len(states), 3, 1, ascii=True) == 5
    assert text_of(block_map(states, 3, 1, ascii=True)[0]) == "U.U"


def test_one_ghost_among_thousands_is_seen_and_wins_over_held() -> None:
    states = bytearray(U * 20_000)
    states[12_345] = BlockState.GHOST
    states[12_346] = states[7] = BlockState.HELD
    upper, lower = halves(block_map(bytes(states), 80, 5))
    assert (upper + lower).count("G") == 1
    assert (upper + lower).count("H") == 1


def test_lit_blocks_keep_their_letter_in_ascii() -> None:
    lines = block_map(U * 4 + C * 4, 8, 1, lit={1, 2, 6, 99, -1}, ascii=True)
    assert text_of(lines[0]) == "UUUUcccc"
    assert [run for run in lines[0] if run[1] == "map.lit"] == [("UU", "map.lit"), ("c", "map.lit")]
    upper, _ = halves(block_map(U * 4 + C * 4, 8, 1, lit={1, 2, 6}))
    assert upper == "ULLUccLc"


def test_blocks_of_findings_have_a_colour_of_their_own() -> None:
    states = column(used=3, held=1, ghost=1, free=2)
    upper, _ = halves(block_map(states, 8, 1, lit={1}, found={1, 2, 4, 5, 6, 900, -1}))
    # Lit, held and ghost blocks keep their colours.
    assert upper == "0L!UHG!."
    line = block_map(states, 8, 1, lit={1}, ascii=True, found={1, 2, 4, 5, 6})[0]
    assert text_of(line) == "0UUUHG.."
    marked = [text for text, style in line if style == "map.found"]
    assert marked == ["U", "."]


def test_one_block_of_a_finding_among_many_is_seen() -> None:
    upper, lower = halves(block_map(column(used=999), 5, 1, found={500}))
    assert (upper + lower).count("!") == 1


def test_unknown_state_bytes_are_shown_as_unknown() -> None:
    assert text_of(block_map(bytes([9, 200, 2]), 3, 1, ascii=True)[0]) == "??U"
    assert halves(block_map(bytes([9, 2]), 1, 1)) == ("?", "U")


def test_no_room_or_no_blocks() -> None:
    assert block_map(U, 0, 3) == [()] * 3
    assert block_map(U, 3, 0) == []
    assert block_map(b"", 2, 1) == [(("  ", ""),)]


@given(st.binary(max_size=400).map(lambda raw: bytes(byte % 7 for byte in raw)))
def test_every_block_has_its_place(states: bytes) -> None:
    upper, lower = halves(block_map(states, 20, 10))
    rows = [upper[at : at + 20] + lower[at : at + 20] for at in range(0, 200, 20)]
    letters = "".join(LETTERS[BlockState(byte)] for byte in states)
    assert "".join(rows) == letters + "-" * (400 - len(states))
    ascii_rows = [text_of(line) for line in block_map(states, 20, 20, ascii=True)]
    assert "".join(ascii_rows).rstrip() == letters


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90)), min_size=1, max_size=20),
    st.integers(1, 9),
)
def test_summed_cells_follow_the_rule(runs: list[tuple[int, int]], width: int) -> None:
    states = b"".join(bytes([state]) * number for state, number in runs)
    each = blocks_a_cell(len(states), width, 2, ascii=True)
    drawn = "".join(text_of(line) for line in block_map(states, width, 2, ascii=True)).rstrip()
    for at, letter in enumerate(drawn):
        chunk = states[at * each : (at + 1) * each]
        counted = {LETTERS[state]: chunk.count(state) for state in BlockState}
        if counted["G"] or counted["H"]:
            assert letter == ("G" if counted["G"] else "H")
        else:
            assert counted[letter] == max(counted.values())


def test_a_bar_of_counts_shows_every_state_that_has_blocks() -> None:
    counts = replace(count_states(column(used=10_000, free=10_000)), ghost=1, held=1)
    line = state_bar(counts, 20, ascii=True)
    text = text_of(line)
    assert text[:2] == "GH"
    assert abs(text.count("U") - text.count(".")) <= 2
    assert text_of(state_bar(count_states(b""), 5)) == "     "
