"""What has changed between two captures, node by node.

Captures seldom have equally many samples, so shares are compared, not counts.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvtop.flame.folded import Folded, merge, unnumbered
from kvtop.flame.tree import Tree, build


@dataclass(frozen=True)
class Difference:
    """The newer capture's tree, with frames of the older one that are gone."""

    tree: Tree
    """Both captures merged; the older one is scaled to the size of the newer one."""
    change: array[float]
    """Share of the newer capture minus share of the older one, by node, in percent points."""


def diff(old: Folded, new: Folded, *, inverted: bool = False) -> Difference:
    """Compare two captures.

    Lines move when a file is edited, so frames are the same by function and file alone
    only if their labels say so; captures of the same code are compared line by line.

    Args:
        old: The earlier capture.
        new: The later one.
        inverted: Callees at the root.
    """
    old_total, new_total = max(old.total, 1), max(new.total, 1)
    scale = 1_000_000
    # Both trees are made over the union of the stacks, so their nodes have the same numbers.
    olds, news = _by_name(old), _by_name(new)
    union = [*news, *(frames for frames in olds if frames not in news)]
    before = _weighed(union, olds, scale / old_total, new.unit, inverted)
    after = _weighed(union, news, scale / new_total, new.unit, inverted)
    change = array("d", (100.0 * (a - b) / scale for a, b in zip(after, before, strict=True)))
    # A frame is as wide as it was at its widest: one that is gone can still be seen.
    shown = merge(
        (
            (
                frames,
                max(
                    1,
                    round(news.get(frames, 0) * scale / new_total),
                    round(olds.get(frames, 0) * scale / old_total),
                ),
            )
            for frames in union
        ),
        Folded((), "millionths"),
    )
    return Difference(build(shown, inverted=inverted), change)


def _by_name(folded: Folded) -> dict[tuple[str, ...], int]:
    """Stacks and counts without process and thread numbers: those change with each start."""
    return dict(merge((unnumbered(frames), count) for frames, count in folded.stacks).stacks)


def _weighed(
    union: list[tuple[str, ...]],
    counts: dict[tuple[str, ...], int],
    factor: float,
    unit: str,
    inverted: bool,
) -> list[int]:
    """Totals of every node of the union's tree, by one capture's counts."""
    rows = tuple((frames, round(counts.get(frames, 0) * factor)) for frames in union)
    return build(Folded(rows, unit), inverted=inverted).total.tolist()
