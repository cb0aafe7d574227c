from __future__ import annotations

from itertools import combinations

from kvtop.draw.style import STATE_COLOURS, STYLES, StyleSpec, resolve, state_style, without_colour
from kvtop.model.blocks import LETTERS, BlockState
from kvtop.model.snapshot import Phase


def test_one_colour_a_state_on_the_map_and_in_text() -> None:
    for state, letter in LETTERS.items():
        assert resolve(state_style(state)).fg == STATE_COLOURS[state]
        assert resolve(f"map:{letter}-") == StyleSpec(fg=STATE_COLOURS[state])
        assert resolve(f"map:U{letter}").bg == STATE_COLOURS[state]


def test_states_differ_in_256_and_in_16_colours() -> None:
    for one, other in combinations(STATE_COLOURS.values(), 2):
        assert one.index != other.index
        assert one.basic != other.basic


def test_phases_have_styles_and_unknown_names_are_plain() -> None:
    for phase in Phase:
        assert f"phase.{phase.value}" in STYLES
    assert resolve("no such style") == StyleSpec()
    assert resolve("map:??") == StyleSpec()


def test_colours_are_real_and_can_be_left_out() -> None:
    for spec in STYLES.values():
        for colour in (spec.fg, spec.bg):
            assert colour is None or (0 <= colour.index < 256 and 0 <= colour.basic < 16)
        bare = without_colour(spec)
        assert (bare.fg, bare.bg) == (None, None)
        assert bare.reverse == spec.reverse
    assert BlockState.GHOST in STATE_COLOURS
