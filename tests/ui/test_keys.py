from __future__ import annotations

import pytest

from kvtop.draw.text import line_width
from kvtop.draw.view import Detail, Dialog, View
from kvtop.ui.controller import ACTIONS
from kvtop.ui.keys import KEYS, action_of, footer_keys, help_lines, markdown, name_of, shown

KEPT_FREE = "d"


def test_every_binding_has_an_action_and_every_action_a_binding() -> None:
    assert {binding.action for binding in KEYS} == set(ACTIONS)


def test_no_key_is_bound_twice() -> None:
    keys = [key for binding in KEYS for key in binding.keys]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("key", KEPT_FREE)
def test_keys_of_later_features_are_free(key: str) -> None:
    assert action_of(key) is None


def test_the_habits_of_nvtop_and_htop() -> None:
    habits = {"q": "quit", "f10": "quit", "f1": "help", "f6": "sort_next", "/": "search"}
    assert {key: action_of(key) for key in habits} == habits


@pytest.mark.parametrize(
    ("key", "character", "name"),
    [
        ("slash", "/", "/"),
        ("upper_i", "I", "I"),
        ("question_mark", "?", "?"),
        ("space", " ", "space"),
        ("tab", "\t", "tab"),
        ("enter", "\r", "enter"),
        ("f10", None, "f10"),
        ("ctrl+c", "\x03", "ctrl+c"),
    ],
)
def test_names_of_keys(key: str, character: str | None, name: str) -> None:
    assert name_of(key, character) == name


def test_help_and_readme_have_every_key() -> None:
    text = "\n".join("".join(part for part, _ in line) for line in help_lines())
    table = markdown()
    for binding in KEYS:
        assert binding.help in text
        assert binding.help in table
        for key in binding.keys:
            assert shown(key) in text
            assert f"`{shown(key)}`" in table


def test_help_fits_a_small_terminal() -> None:
    # 80 columns less the border and the space beside it.
    assert max(line_width(line) for line in help_lines()) <= 76


def test_the_footer_follows_what_is_open() -> None:
    labels = dict(footer_keys(View()))
    assert labels["q"] == "quit"
    assert labels["h"] == "help"
    assert dict(footer_keys(View(detail=Detail("x"))))["Esc"] == "back"
    assert footer_keys(View(dialog=Dialog("help", "Keys"))) == [("Esc", "close")]
    assert dict(footer_keys(View(focus="kv")))["Enter"] == "zoom"
