"""Stacks merged into one tree, kept in flat arrays: opens fast, zooms at once.

Nodes are numbered in depth-first order, so the nodes below node `n` are exactly
`n + 1 ... end[n] - 1`; node 0 is the root. Building sorts the stacks once and compares
each with the one before it: no table of children is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kvtop.flame.folded import Folded, code_of, no_collector, thread_of
from kvtop.model.frames import CATEGORIES, OTHER, label_category

ROOT = "all"
"""Label of the root."""

_OTHER = CATEGORIES.index(OTHER)
_NONE = 255
_CODE = {name: at for at, name in enumerate(CATEGORIES)}


@dataclass(frozen=True)
class Tree:
    """Stacks merged from the outside in (or inverted: from the inside out)."""

    labels: list[str]
    """Different frames, by number."""
    label: array[int]
    """Number of each node's frame."""
    parent: array[int]
    """Each node's parent; -1 for the root."""
    end: array[int]
    """One past the last node below each node."""
    own: array[int]
    """Counts that end at each node."""
    total: array[int]
    """Counts of each node and all below it."""
    unit: str = "samples"
    """What the counts count."""
    inverted: bool = False
    """True: the innermost frames stand at the root, callers below."""

    def __len__(self) -> int:
        return len(self.label)

    def name(self, node: int) -> str:
        """The frame of a node."""
        return self.labels[self.label[node]]

    def children(self, node: int) -> Iterator[int]:
        """Direct children, in order of their names."""
        child, end = node + 1, self.end[node]
        while child < end:
            yield child
            child = self.end[child]

    def path(self, node: int) -> list[int]:
        """The node and those above it, the root first."""
        out = []
        while node >= 0:
            out.append(node)
            node = self.parent[node]
        return out[::-1]

    @cached_property
    def _categories(self) -> bytearray:
        own = bytes(_CODE.get(label_category(label) or "", _NONE) for label in self.labels)
        codes = map(own.__getitem__, self.label)
        if self.inverted:
            # Upside down the caller says nothing about a frame.
            return bytearray(_OTHER if code == _NONE else code for code in codes)
        out = bytearray()
        add = out.append
        for code, above in zip(codes, self.parent, strict=True):
            add(code if code != _NONE else out[above] if above >= 0 else _OTHER)
        return out

    def category(self, node: int) -> str:
        """Category of a node: its own, else that of its caller."""
        return CATEGORIES[self._categories[node]]

    def split(self) -> dict[str, int]:
        """Counts by category of the innermost frame; of a tree that is not inverted."""
        return self._split

    @cached_property
    def _split(self) -> dict[str, int]:
        sums = [0] * len(CATEGORIES)
        for code, count in zip(self._categories, self.own, strict=True):
            if count:
                sums[code] += count
        return {name: sums[at] for at, name in enumerate(CATEGORIES) if sums[at]}

    def found(self, text: str) -> frozenset[int]:
        """Numbers of the frames whose label contains a text, case ignored; empty text: none."""
        wanted = text.casefold()
        if not wanted:
            return frozenset()
        return frozenset(
            number for number, label in enumerate(self.labels) if wanted in label.casefold()
        )

    def hits(self, numbers: frozenset[int]) -> int:
        """Counts of all stacks that hold one of these frames."""
        total = 0
        node = 0
        while node < len(self.label):
            if self.label[node] in numbers:
                total += self.total[node]
                node = self.end[node]
            else:
                node += 1
        return total

    def next_hit(self, numbers: frozenset[int], after: int, below: int = 0) -> int | None:
        """The next node below `below` that holds one of these frames, wrapping round."""
        first, end = below, self.end[below]
        label = self.label
        for span in (range(max(after + 1, first), end), range(first, min(after + 1, end))):
            for node in span:
                if label[node] in numbers:
                    return node
        return None


def build(folded: Folded, *, inverted: bool = False) -> Tree:
    """The tree of some stacks.

    Args:
        folded: The stacks; may be empty.
        inverted: Callees at the root, without the marks of processes and threads.
    """
    with no_collector():
        return _build(folded, inverted)


class _Numbers(dict[str, int]):
    """Numbers frames in the order in which they are first asked for."""

    def __missing__(self, key: str) -> int:
        self[key] = number = len(self)
        return number


def _build(folded: Folded, inverted: bool) -> Tree:
    rows: Iterable[tuple[tuple[str, ...], int]] = folded.stacks
    if inverted:
        rows = sorted((code_of(frames)[::-1], count) for frames, count in rows)
    elif not folded.ordered:
        rows = sorted(rows)
    numbers = _Numbers({ROOT: 0})
    number_of = numbers.__getitem__
    label, parent, own = [0], [-1], [0]
    before: tuple[str, ...] = ()
    # Nodes of the stack before, from the root on.
    nodes = [0]
    size = 1
    for frames, count in rows:
        same = 0
        for old, new in zip(before, frames, strict=False):
            if old != new:
                break
            same += 1
        del nodes[same + 1 :]
        more = len(frames) - same
        if more:
            label.extend(map(number_of, frames[same:]))
            parent.append(nodes[-1])
            parent.extend(range(size, size + more - 1))
            nodes.extend(range(size, size + more))
            own.extend([0] * more)
            size += more
        own[nodes[-1]] += count
        before = frames
    total = own.copy()
    end = list(range(1, size + 1))
    # Children come after their parents: from the back every node is whole when it is added.
    for node in range(size - 1, 0, -1):
        above = parent[node]
        total[above] += total[node]
        if end[node] > end[above]:  # noqa: PLR1730 - max() takes twice as long
            end[above] = end[node]
    return Tree(
        list(numbers),
        array("i", label),
        array("i", parent),
        array("i", end),
        array("q", own),
        array("q", total),
        folded.unit,
        inverted,
    )


def threads(folded: Folded) -> list[str]:
    """Processes and threads of the stacks, the one with most counts first."""
    sums: dict[str, int] = {}
    for frames, count in folded.stacks:
        name = thread_of(frames)
        if name:
            sums[name] = sums.get(name, 0) + count
    return sorted(sums, key=lambda name: (-sums[name], name))


def category_of(frames: Iterable[str]) -> str:
    """Category of a stack given from the outside in."""
    found = OTHER
    for frame in frames:
        found = label_category(frame) or found
    return found


def keep(folded: Folded, thread: str = "", category: str = "", *, any_pid: bool = False) -> Folded:
    """Only the stacks of a thread and of a category.

    Args:
        folded: The stacks.
        thread: As `threads` names it. Empty: all.
        category: From `CATEGORIES`. Empty: all.
        any_pid: The thread of that name in any process.
    """
    tests: list[Callable[[tuple[str, ...]], bool]] = []
    if thread and any_pid:
        name = thread.partition(" ")[2]
        tests.append(lambda frames: thread_of(frames).partition(" ")[2] == name)
    elif thread:
        tests.append(lambda frames: thread_of(frames) == thread)
    if category:
        tests.append(lambda frames: category_of(frames) == category)
    if not tests:
        return folded
    rows = [row for row in folded.stacks if all(test(row[0]) for test in tests)]
    return Folded(rows, folded.unit, folded.skipped, folded.title, folded.ordered)
