"""What each key of the flame-graph viewer does: pure, so it is tested without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvtop.draw.icicle import Box, IcicleView, graph_rows, levels, node_at
from kvtop.draw.pick import engine_of
from kvtop.draw.stacks import ROLES, roles_of
from kvtop.draw.view import View
from kvtop.flame.tree import Tree
from kvtop.model.frames import CATEGORIES
from kvtop.ui.effects import Flame, Result
from kvtop.ui.moves import Here, at

MAX_SEARCH = 200
"""Characters of a search text; more are not taken."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What has to be built anew when it changes; all else is only looked at differently."""

    inverted: bool = False
    """Callees at the root."""
    thread: str = ""
    """Only this thread. Empty: all."""
    category: str = ""
    """Only this category. Empty: all."""
    difference: bool = False
    """Two captures compared."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """The viewer between two keys."""

    tree: Tree
    """What is drawn."""
    view: IcicleView
    """Zoom, cursor, search."""
    shape: Shape = field(default_factory=Shape)
    """What the tree was built with."""


def _flame(view: View, _here: Here) -> Result:
    if view.player is not None:
        return replace(view, message="a recording has no process to look into"), None
    return view, Flame("capture")


def _flame_view(view: View, _here: Here) -> Result:
    return view, Flame("view")


def _process(view: View, here: Here) -> Result:
    """The next role of the engine's processes; after the last one, all."""
    engine = engine_of(here.snap, view) if here.snap is not None else None
    if view.player is None:
        roles = list(dict.fromkeys(roles_of(engine).values()))
    else:
        # Of a recording only those can be shown that were sampled.
        pids, stacks = roles_of(engine), here.snap.stacks if here.snap is not None else ()
        roles = list(dict.fromkeys(pids[one.pid] for one in stacks if one.pid in pids))
    if len(roles) < 2:
        return replace(view, message="there is no other process with frames"), None
    role = _after(view.stacks_role, ["", *roles])
    text = f"frames of the {ROLES[role]}" if role else "frames of all processes of this engine"
    scroll = at(view, "stacks", 0)
    return replace(view, stacks_role=role, message=text, scroll=scroll), None


ACTIONS: dict[str, Callable[[View, Here], Result]] = {
    "flame": _flame,
    "flame_view": _flame_view,
    "process": _process,
}
"""What each action of `ui.keys` does that is about stacks."""


def press(
    viewer: Viewer,
    key: str,
    size: tuple[int, int],
    character: str | None = None,
    threads: Sequence[str] = (),
) -> Viewer | None:
    """The viewer after a key. None: it is closed.

    A `shape` that differs from the one before asks for another tree.

    Args:
        viewer: As it is.
        key: Name of the key, see `ui.keys`.
        size: Columns and rows.
        character: What the key types. None: nothing.
        threads: Names to go through.
    """
    if viewer.view.typing:
        return _typing(viewer, key, character)
    view = replace(viewer.view, message="")
    viewer = replace(viewer, view=view)
    if key in ("q", "F"):
        return None
    if key == "escape":
        return _out(viewer)
    if key in ("enter", "z"):
        return replace(viewer, view=replace(view, zoom=view.cursor, top=0))
    if key == "/":
        return replace(viewer, view=replace(view, typing=True, search=""))
    if key in ("n", "N"):
        return _next(viewer, size)
    if key == "i":
        return _shaped(viewer, replace(viewer.shape, inverted=not viewer.shape.inverted))
    if key == "t":
        after = _after(viewer.shape.thread, ["", *threads])
        return _shaped(viewer, replace(viewer.shape, thread=after))
    if key == "c":
        after = _after(viewer.shape.category, ["", *CATEGORIES])
        return _shaped(viewer, replace(viewer.shape, category=after))
    if key == "d":
        return _shaped(viewer, replace(viewer.shape, difference=not viewer.shape.difference))
    return _move(viewer, key, size)


def click(viewer: Viewer, cell: tuple[int, int], size: tuple[int, int]) -> Viewer:
    """A click selects a frame; one on the selected frame zooms into it, or out of a caller."""
    node = node_at(viewer.tree, viewer.view, size, cell)
    if node is None:
        return viewer
    view = replace(viewer.view, message="", cursor=node)
    if node == viewer.view.cursor or not _below(viewer.tree, node, view.zoom):
        view = replace(view, zoom=node, top=0)
    return replace(viewer, view=view)


def wheel(viewer: Viewer, rows: int, size: tuple[int, int]) -> Viewer:
    """The wheel scrolls the rows."""
    first = max(viewer.view.top + rows, 0)
    if rows > 0 and len(_graph(viewer, size)) < graph_rows(size[1]):
        return viewer
    return replace(viewer, view=replace(viewer.view, top=first))


def _after(value: str, values: Sequence[str]) -> str:
    return values[(values.index(value) + 1) % len(values)] if value in values else values[0]


def _shaped(viewer: Viewer, shape: Shape) -> Viewer:
    return replace(viewer, shape=shape)


def _out(viewer: Viewer) -> Viewer | None:
    """One step out: the zoom, then the search, then a filter, then the viewer itself."""
    view, shape = viewer.view, viewer.shape
    if view.zoom:
        above = viewer.tree.parent[view.zoom]
        return replace(viewer, view=replace(view, zoom=above, top=0))
    if view.search:
        return replace(viewer, view=replace(view, search="", hits=frozenset(), hit_total=0))
    if shape != Shape():
        return _shaped(viewer, Shape())
    return None


def _typing(viewer: Viewer, key: str, character: str | None) -> Viewer:
    view = viewer.view
    if key == "escape":
        return replace(viewer, view=replace(view, typing=False, search="", hits=frozenset()))
    if key == "enter":
        hits = viewer.tree.found(view.search)
        view = replace(view, typing=False, hits=hits, hit_total=viewer.tree.hits(hits))
        first = viewer.tree.next_hit(hits, -1) if hits else None
        if first is not None:
            view = replace(view, cursor=first, zoom=_sight(viewer.tree, view.zoom, first), top=0)
        return replace(viewer, view=view)
    if key == "backspace":
        return replace(viewer, view=replace(view, search=view.search[:-1]))
    char = " " if key == "space" else character or (key if len(key) == 1 else "")
    if len(char) == 1 and char.isprintable():
        return replace(viewer, view=replace(view, search=(view.search + char)[:MAX_SEARCH]))
    return viewer


def _below(tree: Tree, node: int, above: int) -> bool:
    return above <= node < tree.end[above]


def _sight(tree: Tree, zoom: int, node: int) -> int:
    """The zoom that shows a node: as it is when the node is below it, else the root."""
    return zoom if _below(tree, node, zoom) else 0


def _next(viewer: Viewer, size: tuple[int, int]) -> Viewer:
    """To the next frame found, zoomed so far in that it can be seen."""
    view, tree = viewer.view, viewer.tree
    node = tree.next_hit(view.hits, view.cursor) if view.hits else None
    if node is None:
        return replace(viewer, view=replace(view, message="nothing was searched for or found"))
    zoom = _sight(tree, view.zoom, node)
    # Narrower than three cells it cannot be read: its nearest wide enough caller is zoomed.
    while tree.total[node] * size[0] < 3 * tree.total[zoom] and zoom != node:
        path = tree.path(node)
        zoom = path[path.index(zoom) + 1]
    return _seen(replace(viewer, view=replace(view, cursor=node, zoom=zoom, top=0)), size)


def _graph(viewer: Viewer, size: tuple[int, int]) -> list[list[Box]]:
    return levels(viewer.tree, viewer.view, size[0], graph_rows(size[1]))


def _seen(viewer: Viewer, size: tuple[int, int]) -> Viewer:
    """Scrolled as little as shows the selected frame."""
    view, tree = viewer.view, viewer.tree
    if not _below(tree, view.cursor, view.zoom):
        return viewer
    depth = len(tree.path(view.cursor)) - len(tree.path(view.zoom))
    rows = graph_rows(size[1])
    room = max(rows - min(len(tree.path(view.zoom)) - 1, rows // 4), 1)
    top = min(view.top, depth)
    return replace(viewer, view=replace(view, top=max(top, depth - room + 1)))


def _move(viewer: Viewer, key: str, size: tuple[int, int]) -> Viewer:
    tree, view = viewer.tree, viewer.view
    cursor = view.cursor
    if key in ("down", "j"):
        cursor = max(tree.children(cursor), key=lambda node: tree.total[node], default=cursor)
    elif key in ("up", "k"):
        cursor = max(tree.parent[cursor], 0)
    elif key in ("left", "right"):
        cursor = _beside(_graph(viewer, size), cursor, -1 if key == "left" else 1)
    elif key == "home":
        cursor = view.zoom
    elif key in ("pagedown", "pageup"):
        return wheel(
            viewer, (1 if key == "pagedown" else -1) * max(graph_rows(size[1]) // 2, 1), size
        )
    else:
        return viewer
    zoom = view.zoom if _below(tree, cursor, view.zoom) else cursor
    return _seen(replace(viewer, view=replace(view, cursor=cursor, zoom=zoom)), size)


def _beside(rows: list[list[Box]], cursor: int, step: int) -> int:
    for boxes in rows:
        nodes = [box.node for box in boxes]
        if cursor in nodes:
            return nodes[min(max(nodes.index(cursor) + step, 0), len(nodes) - 1)]
    return cursor
