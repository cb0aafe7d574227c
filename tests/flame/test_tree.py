from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.flame.difference import diff
from kvtop.flame.folded import Folded, format_folded, parse
from kvtop.flame.tree import Tree, build, category_of, keep, threads
from kvtop.model.frames import (
    ALLOCATE,
    FREE,
    MODEL,
    OTHER,
    SCHEDULE,
    WAIT,
    own_category,
    split_frame,
)

A = "vllm/v1/core/kv_cache_manager.py:200"
SCHEDULER = "schedule (vllm/v1/core/sched/scheduler.py:9)"
FOLDED = parse(
    "\n".join(
        [
            f'process 1:"x";thread (1): Main;{SCHEDULER};allocate_slots ({A}) 6',
            'process 1:"x";thread (1): Main;free (vllm/v1/core/kv_cache_manager.py:9) 1',
            'process 1:"x";thread (2): Out;wait (threading.py:3) 3',
        ]
    )
)


def by_path(tree: Tree) -> dict[tuple[str, ...], tuple[int, int]]:
    return {
        tuple(tree.name(n) for n in tree.path(node)): (tree.own[node], tree.total[node])
        for node in range(len(tree))
    }


frames = st.lists(st.sampled_from(["a", "b", "a b", "a;", "ab"]), max_size=5).map(tuple)
stacks = st.dictionaries(frames, st.integers(1, 100), max_size=25)


@settings(deadline=None)
@given(stacks, st.booleans())
def test_a_tree_is_what_adding_up_by_hand_gives(
    rows: dict[tuple[str, ...], int], inverted: bool
) -> None:
    own: Counter[tuple[str, ...]] = Counter({("all",): 0})
    total: Counter[tuple[str, ...]] = Counter({("all",): 0})
    for stack, count in rows.items():
        path = ("all", *(stack[::-1] if inverted else stack))
        own[path] += count
        for depth in range(1, len(path) + 1):
            total[path[:depth]] += count
    tree = build(Folded(list(rows.items())), inverted=inverted)
    assert by_path(tree) == {path: (own[path], total[path]) for path in total}


@settings(deadline=None)
@given(
    st.dictionaries(
        st.lists(st.sampled_from(["a", "b", "a b", "ab", "a<"]), min_size=1, max_size=5).map(tuple),
        st.integers(1, 100),
        min_size=1,
    )
)
def test_text_that_is_in_order_needs_no_sorting(rows: dict[tuple[str, ...], int]) -> None:
    folded = Folded(list(rows.items()))
    read = parse(format_folded(folded))
    assert read.ordered
    assert by_path(build(read)) == by_path(build(folded))


def test_categories_and_their_split() -> None:
    tree = build(FOLDED)
    assert tree.split() == {ALLOCATE: 6, FREE: 1, WAIT: 3}
    assert tree.category(0) == OTHER
    schedule = next(n for n in range(len(tree)) if tree.name(n).startswith("schedule"))
    assert tree.category(schedule) == SCHEDULE
    assert category_of(["step (vllm/v1/engine/core.py:1)"]) == OTHER


@pytest.mark.parametrize(
    ("function", "file", "category"),
    [
        ("BlockPool.get_new_blocks", "vllm/v1/core/block_pool.py", ALLOCATE),
        ("get_new_blocks", "vllm/v1/core/block_pool.py", ALLOCATE),
        ("FullAttentionManager.free", "vllm/v1/core/single_type_kv_cache_manager.py", FREE),
        ("Scheduler.schedule", "vllm/v1/core/sched/scheduler.py", SCHEDULE),
        ("Condition.wait", "threading.py", WAIT),
        ("sched_yield", "vllm/distributed/utils.py", WAIT),
        ("LlamaModel.forward", "vllm/model_executor/models/llama.py", MODEL),
        ("free", "mine.py", None),
        ("dict.get", "mine.py", None),
        ("EngineCore.step", "vllm/v1/engine/core.py", None),
        ("", "", None),
    ],
)
def test_own_categories(function: str, file: str, category: str | None) -> None:
    assert own_category(function, file) == category


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("f (a.py:3)", ("f", "a.py", 3)),
        ("f (a.py)", ("f", "a.py", None)),
        ("f (a (b).py:3)", ("f (a", "b).py", 3)),
        ("<module> (<string>:1)", ("<module>", "<string>", 1)),
        ("f", ("f", "", None)),
        ("f()", ("f()", "", None)),
        ("f (x:0)", ("f", "x", None)),
        ("f (x:99999999999999)", ("f", "x:99999999999999", None)),
    ],
)
def test_labels_are_taken_apart(label: str, parts: tuple[str, str, int | None]) -> None:
    assert split_frame(label) == parts


def test_search_finds_and_counts_each_stack_once() -> None:
    tree = build(parse("a;x;a;b 2\na 1\nc 4"))
    hits = tree.found("A")
    # `all`, the root, holds an `a` too, and is every stack.
    assert tree.hits(hits) == 7
    assert tree.hits(tree.found("b")) == 2
    assert tree.found("") == frozenset()
    first = tree.next_hit(tree.found("b"), 0)
    assert first is not None
    assert tree.name(first) == "b"
    assert tree.next_hit(tree.found("b"), first) == first
    assert tree.next_hit(frozenset(), 0) is None


def test_filters() -> None:
    assert threads(FOLDED) == ["1 Main", "1 Out"]
    assert keep(FOLDED, "1 Out").total == 3
    assert keep(FOLDED, "9 Out", any_pid=True).total == 3
    assert keep(FOLDED, category=ALLOCATE).total == 6
    assert keep(FOLDED, "1 Out", ALLOCATE).total == 0
    assert len(build(keep(FOLDED, "1 Out", ALLOCATE))) == 1


def test_a_difference_compares_shares_and_not_counts() -> None:
    old = parse('process 1:"x";thread (1): M;a 10\nprocess 1:"x";thread (1): M;b 10')
    new = parse('process 9:"x";thread (8): M;a 400\nprocess 9:"x";thread (8): M;c 100')
    found = diff(old, new)
    change = {found.tree.name(n): round(found.change[n], 1) for n in range(len(found.tree))}
    assert change["a"] == 30.0
    assert change["b"] == -50.0
    assert change["c"] == 20.0
    assert change["all"] == 0.0
    # What is gone can still be seen.
    assert "b" in found.tree.labels


@settings(deadline=None)
@given(stacks.filter(bool), st.booleans())
def test_no_difference_to_itself(rows: dict[tuple[str, ...], int], inverted: bool) -> None:
    folded = Folded(list(rows.items()))
    assert max(map(abs, diff(folded, folded, inverted=inverted).change)) == 0.0
