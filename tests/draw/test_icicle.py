from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.draw.icicle import STYLED, IcicleView, icicle, levels, node_at
from kvtop.draw.style import STYLES
from kvtop.flame.difference import diff
from kvtop.flame.folded import Folded, parse
from kvtop.flame.tree import Tree, build
from tests.draw.golden import Golden, exact, styles_of, text_of

CORE = "vllm/v1/core"
MARKS = 'process 4740:"VLLM::EngineCore";thread (4740): MainThread;'
ENGINE = MARKS + "EngineCore.step (vllm/v1/engine/core.py:400);"
SCHEDULE = f"{ENGINE}Scheduler.schedule ({CORE}/sched/scheduler.py:300)"
SLOTS = f"{SCHEDULE};KVCacheManager.allocate_slots ({CORE}/kv_cache_manager.py:225)"
UPDATE = f"{ENGINE}Scheduler.update_from_output ({CORE}/sched/scheduler.py:900)"
EXECUTE = f"{ENGINE}MultiprocExecutor.execute_model (vllm/v1/executor/multiproc_executor.py:170)"
STACKS = f"""\
{SCHEDULE} 40
{SLOTS};BlockPool.get_new_blocks ({CORE}/block_pool.py:300) 120
{UPDATE};BlockPool.free_blocks ({CORE}/block_pool.py:380) 15
{EXECUTE};sched_yield (vllm/distributed/utils.py:50) 800
{ENGINE}日本語 [red]\x1b[31m (x.py:1) 24
{MARKS}main (tool.py:9) 1
"""
LATER = STACKS.replace("(vllm/distributed/utils.py:50) 800", "(vllm/distributed/utils.py:50) 300")


@pytest.fixture(scope="module")
def tree() -> Tree:
    return build(parse(STACKS))


def find(tree: Tree, text: str) -> int:
    return next(node for node in range(len(tree)) if text in tree.name(node))


def test_golden(tree: Tree) -> None:
    golden = Golden("icicle")
    plain = IcicleView(title="box pid 4740 2025-11-30 00:00:00")
    pool = find(tree, "get_new_blocks")
    hits = tree.found("blocks")
    change = diff(parse(STACKS), parse(LATER))
    inverted = build(parse(STACKS), inverted=True)
    cases: dict[str, tuple[Tree, IcicleView]] = {
        "whole": (tree, plain),
        "zoomed": (tree, replace(plain, zoom=find(tree, "schedule ("), cursor=pool)),
        "found": (
            tree,
            replace(plain, cursor=pool, search="blocks", hits=hits, hit_total=tree.hits(hits)),
        ),
        "typing, ascii": (tree, replace(plain, typing=True, search="fre", ascii=True)),
        "callers": (inverted, plain),
        "difference": (change.tree, replace(plain, change=change.change, cursor=4)),
        "filtered to nothing": (build(Folded(())), replace(plain, category="abort")),
    }
    for width, height in ((120, 12), (70, 11), (34, 10), (12, 4)):
        for name, (drawn, view) in cases.items():
            golden.add(
                f"{name} {width}x{height}", exact(icicle(drawn, view, width, height), width, height)
            )
    golden.check()


def test_colours_follow_the_category_and_the_change(tree: Tree) -> None:
    lines = icicle(tree, IcicleView(), 120, 12)
    used = set().union(*map(styles_of, lines))
    assert {"flame.allocate", "flame.schedule", "flame.wait", "flame.cursor"} <= used
    change = diff(parse(STACKS), parse(LATER))
    lines = icicle(change.tree, IcicleView(change=change.change), 120, 12)
    used = set().union(*map(styles_of, lines))
    assert {"flame.grown", "flame.shrunk", "flame.same"} <= used
    waiting = next(line for line in lines if "sched_yield" in text_of(line))
    assert "flame.shrunk" in styles_of(waiting)
    assert "-20.0 sched_yield" in text_of(waiting)


def test_every_style_exists() -> None:
    assert all(f"flame.{name}" in STYLES for name in STYLED)


def test_a_click_finds_what_is_drawn_there(tree: Tree) -> None:
    view = IcicleView()
    size = (120, 14)
    lines = icicle(tree, view, *size)
    row = next(at for at, line in enumerate(lines) if "sched_yield" in text_of(line))
    column = text_of(lines[row]).index("sched_yield")
    node = node_at(tree, view, size, (column, row))
    assert node is not None
    assert "sched_yield" in tree.name(node)
    assert node_at(tree, view, size, (0, 0)) is None
    assert node_at(tree, view, size, (5, 13)) is None


frames = st.lists(
    st.sampled_from(["a", "b", "c (x.py:1)", "wait (threading.py:3)", "界"]), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(frames.map(tuple), st.integers(1, 10**12)), min_size=1, max_size=25),
    width=st.integers(1, 90),
    height=st.integers(1, 16),
    data=st.data(),
)
def test_any_tree_at_any_size(
    rows: list[tuple[tuple[str, ...], int]], width: int, height: int, data: st.DataObject
) -> None:
    tree = build(Folded(rows))
    zoom = data.draw(st.integers(0, len(tree) - 1))
    view = IcicleView(zoom=zoom, cursor=zoom, top=data.draw(st.integers(0, 8)))
    exact(icicle(tree, view, width, height), width, height)
    for boxes in levels(tree, view, width, 20):
        edges = [edge for box in boxes for edge in (box.start, box.end)]
        assert edges == sorted(edges)
        assert edges[-1] <= width
