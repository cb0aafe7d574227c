from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.errors import BadDataError, NotFoundError, StorageError
from kvtop.flame import folded as module
from kvtop.flame.folded import (
    Folded,
    code_of,
    format_folded,
    merge,
    parse,
    read_text,
    thread_of,
    unnumbered,
)

MARKED = 'process 7:"serve a;b --x";thread (9): sleepy; one;main (a.py:1);run (b.py:2)'


def test_marks_with_semicolons_stay_whole() -> None:
    ((frames, count),) = parse(MARKED + " 5\n").stacks
    assert frames == (
        'process 7:"serve a;b --x"',
        "thread (9): sleepy; one",
        "main (a.py:1)",
        "run (b.py:2)",
    )
    assert count == 5
    assert thread_of(frames) == "7 sleepy; one"
    assert code_of(frames) == ("main (a.py:1)", "run (b.py:2)")
    assert unnumbered(frames)[:2] == ('process "serve a;b --x"', "thread sleepy; one")


def test_a_thread_without_a_name() -> None:
    ((frames, _),) = parse('process 7:"x";thread (9);run (b.py:2) 1').stacks
    assert thread_of(frames) == "7 thread 9"
    assert code_of(frames) == ("run (b.py:2)",)


def test_lines_that_are_none_are_counted_and_skipped() -> None:
    found = parse("# comment\n\na;b 3\nnonsense\na;b 4\nx -1\nx 1.5\ny ٣\nz 0\n")
    assert list(found.stacks) == [(("a", "b"), 7)]
    assert found.skipped == 4
    assert found.total == 7


@pytest.mark.parametrize("text", ["", "\n\n", "no stack here", "a;b", "a 0"])
def test_text_without_any_stack(text: str) -> None:
    with pytest.raises(BadDataError, match="no folded stacks"):
        parse(text)


def test_too_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINES", 10)
    with pytest.raises(BadDataError, match="too many"):
        parse("a 1\n" * 11)


def test_deep_stacks_are_cut() -> None:
    ((frames, _),) = parse(";".join(["f"] * 5000) + " 1").stacks
    assert len(frames) == module.MAX_DEPTH


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError):
        read_text(tmp_path / "none")
    with pytest.raises(StorageError):
        read_text(tmp_path)
    big = tmp_path / "big"
    big.write_bytes(b"a 1\n" * 10)
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    with pytest.raises(BadDataError, match="too large"):
        read_text(big)


names = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp", "Zs"), exclude_characters=";"),
    min_size=1,
    max_size=8,
).filter(lambda name: not name.startswith(("process", "thread", "#")))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.lists(names, min_size=1, max_size=5).map(tuple), st.integers(1, 10**9), min_size=1
    )
)
def test_round_trip(stacks: dict[tuple[str, ...], int]) -> None:
    assert dict(parse(format_folded(Folded(list(stacks.items())))).stacks) == stacks


@settings(deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_stacks_or_a_plain_error(text: str) -> None:
    try:
        found = parse(text)
    except BadDataError:
        return
    assert found.total > 0


def test_merge_adds_up() -> None:
    found = merge([(("a",), 1), (("b",), 2), (("a",), 3)])
    assert dict(found.stacks) == {("a",): 4, ("b",): 2}
