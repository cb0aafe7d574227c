from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvtop.draw.text import (
    cell_width,
    choose,
    clip,
    clip_middle,
    cut,
    fields,
    fit,
    line_width,
    safe,
    visible,
    wrap,
)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("cmpl-42", "cmpl-42"),
        ("a[/x]b", "a[/x]b"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\nb\tc\x00", "a\\x0ab\\x09c\\x00"),
        ("\x9b1m", "\\x9b1m"),
        ("\u202eabc", "\\u202eabc"),
        ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),
        ("\ud800", "\\ud800"),
        ("\u2028", "\\u2028"),
        ("\xa0", "\\xa0"),
        ("\U000e0041", "\\U000e0041"),
        ("\ue000", "\\ue000"),
        ("\u3164", "\\u3164"),
        ("é宽Ж", "é宽Ж"),
        ("e\u0301", "e\u0301"),
        ("\u0301e", "\\u0301e"),
        ("e\u0301\u0301\u0301", "e\u0301\u0301\\u0301"),
        ("☺\ufe0f", "☺\\ufe0f"),
    ],
)
def test_what_has_no_certain_place_is_escaped(raw: str, shown: str) -> None:
    assert visible(raw) == shown


def test_a_backslash_cannot_pass_for_an_escape() -> None:
    assert visible("\\x1b") == "\\\\x1b"
    assert visible("\\x1b") != visible("\x1b")


@given(st.text(alphabet=st.characters(codec=None, min_codepoint=0, max_codepoint=0x10FFFF)))
def test_visible_text_is_printable_and_encodable(raw: str) -> None:
    shown = visible(raw)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert safe(raw, ascii=True).isascii()


def test_widths_agree_with_textual_for_every_character_that_is_drawn() -> None:
    off = []
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        # Of a code point that this Python does not know, every one is escaped.
        if unicodedata.category(char)[0] == "C":
            continue
        shown = visible.__wrapped__("a" + char)
        if cell_width(shown) != cell_len(shown):
            off.append(hex(code))
    assert off == []


def test_cut_never_splits_a_wide_character() -> None:
    assert cut("宽宽", 3) == "宽"
    assert clip("宽宽宽", 4) == "宽…"
    assert clip("abcdef", 4, ascii=True) == "abc~"
    assert clip("abc", 3) == "abc"
    assert clip("abc", 0) == ""


def test_ids_keep_both_ends() -> None:
    assert clip_middle("chatcmpl-4274a3eb-ec3b9605", 8) == "ch…b9605"
    assert clip_middle("chatcmpl-4274a3eb-ec3b9605", 8, ascii=True) == "ch~b9605"
    assert clip_middle("short", 8) == "short"
    assert clip_middle("宽" * 9, 8) == "宽…宽宽"
    assert clip_middle("abcdefe\u0301", 6) == "a…defe\u0301"


@given(st.text(max_size=40), st.integers(0, 20))
def test_a_cut_text_never_takes_more_than_its_room(raw: str, width: int) -> None:
    for cutter in (clip, clip_middle):
        assert cell_width(cutter(visible(raw), width)) <= width


def test_fit_fills_the_cell_of_a_cut_wide_character() -> None:
    assert fit((("宽宽", "x"),), 3) == (("宽 ", "x"),)
    assert fit((("a", "x"), ("b", "x"), ("", "y")), 4) == (("ab", "x"), ("  ", ""))
    assert fit((), 0) == ()


def test_fields_go_whole_and_by_importance() -> None:
    parts = [(0, (("keep", ""),)), (2, (("12345", ""),)), (1, (("99", ""),))]
    assert fields(parts, 15) == (("keep", ""), ("  ", ""), ("12345", ""), ("  ", ""), ("99", ""))
    assert fields(parts, 14) == (("keep", ""), ("  ", ""), ("99", ""))
    assert fields(parts, 7) == (("keep", ""),)
    assert fields(parts, 3) == ()
    assert choose(parts, 8) == [parts[0], parts[2]]


@given(st.text(max_size=60), st.integers(1, 30))
def test_wrapped_lines_fit_and_lose_no_word(raw: str, width: int) -> None:
    text = visible(raw)
    lines = wrap(text, width)
    assert all(line_width(((line, ""),)) <= width for line in lines)
    if width >= 2:
        assert "".join(lines).replace(" ", "") == text.replace(" ", "")
