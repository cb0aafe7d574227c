"""The KV panel: where every block is, and whether the sums are right.

The lines have a fixed order and an importance. When the panel is low, the least
important goes first: what is broken is always said, then the states, the debts and
hits, the use, the other pools; the map takes what is left.
"""

from __future__ import annotations

from kvtop.draw.baseline import baseline_line
from kvtop.draw.blockmap import block_map, blocks_a_cell, state_bar
from kvtop.draw.findings import found_blocks
from kvtop.draw.numbers import count, duration, percent, rate, short, size
from kvtop.draw.pick import engine_of, greyed, is_old, old_line, source_of, why
from kvtop.draw.style import state_style
from kvtop.draw.text import Field, block, clip, fields, line_width, safe, wrap
from kvtop.draw.view import Line, Run, View
from kvtop.model.blocks import LETTERS, BlockCounts, BlockState
from kvtop.model.snapshot import Engine, Phase, Pool, Snapshot
from kvtop.model.tokens import token_use_percent

_GONE = ("process gone: these are its last values", "process gone")
_STATES = (
    (BlockState.USED, "used", 2),
    (BlockState.SHARED, "shared", 4),
    (BlockState.CACHED, "cached", 3),
    (BlockState.HELD, "held", 1),
    (BlockState.GHOST, "ghost", 0),
    (BlockState.FREE, "free", 1),
)


def title(snap: Snapshot, view: View, width: int) -> str:
    """`KV blocks 20,480 x 16 tok  2.5 GiB`."""
    engine = engine_of(snap, view)
    if engine is None:
        return clip("KV blocks", width, view.ascii)
    counts, metrics = engine.blocks, engine.metrics
    total = counts.total if counts else metrics.num_blocks if metrics else None
    tokens = engine.block_size or (metrics.block_size_tokens if metrics else None)
    held = None if engine.block_bytes is None or total is None else engine.block_bytes * total
    parts: list[Field] = [
        (1, (("KV blocks", ""),)),
        (0, ((f"{count(total)} x {count(tokens)} tok", ""),)),
        (2, ((size(held) if held is not None else "", ""),)),
    ]
    shown = fields(parts[:2], width, " ")
    size_part = fields([(0, shown), parts[2]], width)
    return "".join(text for text, _ in size_part)


def kv_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """States, block map, debts, hits and use of the engine on screen."""
    engine = engine_of(snap, view)
    if engine is None:
        return block([(("no engine yet", "dim"),)], width, height)
    if not engine.pools:
        return block(_from_metrics(snap, view, engine, width), width, height)
    pool = engine.pools[0]
    alarms = alarm_lines(engine, width, view.ascii)
    source = source_of(snap, "engine", engine)
    old = is_old(source)
    if old:
        alarms.append(((clip(old_line(source, snap, view), width, view.ascii), "warn"),))
    if not engine.alive:
        alarms[:0] = _alarm(_GONE, width)
    states = state_line(pool.counts, width, view.ascii)
    debts = _debts(engine, width)
    since = baseline_line(snap, engine, view, width)
    use = _use(engine, pool, width)
    more = [_pool_line(other, width, view.ascii) for other in engine.pools[1:]]
    # The alarms keep their place even where that leaves no room for the states.
    room = height - len(alarms)
    top = [*alarms, *([states] if room >= 1 else [])]
    if since and room >= 2:
        top.append(since)
        room -= 1
    bottom: list[Line] = []
    if room >= 2:
        bottom = [debts]
    if room >= 4:
        bottom = [use, debts]
    if room >= 5:
        keep = min(len(more), room - 4)
        bottom = [*more[:keep], use, debts]
    map_height = height - len(top) - len(bottom)
    middle: list[Line] = []
    if map_height > 0:
        middle = _map(pool, view, found_blocks(engine, view.findings), width, map_height)
    lines = [*top, *middle, *bottom]
    return block(_greyed_but_alarms(lines, len(alarms)) if old else lines, width, height)


def _greyed_but_alarms(lines: list[Line], alarms: int) -> list[Line]:
    """All lines grey but the first `alarms` ones."""
    return [*lines[:alarms], *greyed(lines[alarms:])]


def _map(pool: Pool, view: View, found: frozenset[int], width: int, height: int) -> list[Line]:
    if pool.states is None:
        note = "no block column in this snapshot; the bar shows shares, not places"
        bar = state_bar(pool.counts, width, view.ascii)
        return block([bar, *[((line, "dim"),) for line in wrap(note, width)]], width, height)
    each = blocks_a_cell(len(pool.states), width, height, view.ascii)
    if each == 1 or height < 4:
        return block_map(pool.states, width, height, view.lit_blocks, view.ascii, found=found)
    map_height = height - 1
    each = blocks_a_cell(len(pool.states), width, map_height, view.ascii)
    half = "letter" if view.ascii else "half cell"
    note = _first_fit(
        (
            f"one {half} = {each} blocks, the most frequent state; ghost and held always show",
            f"one {half} = {each} blocks",
            f"{each} blocks each",
        ),
        width,
    )
    drawn = block_map(pool.states, width, map_height, view.lit_blocks, view.ascii, found=found)
    return [*drawn, ((note, "dim"),)]


def _first_fit(variants: tuple[str, ...], width: int) -> str:
    """The first text that fits; none at all rather than a cut one."""
    return next((text for text in variants if len(text) <= width), "")


def state_line(counts: BlockCounts, width: int, letters: bool = False) -> Line:
    """The states: shares of the usable blocks; held and ghost as counts.

    Args:
        counts: What is shown.
        width: Cells.
        letters: The map shows letters, so that each state must be said with its own.
    """
    numbers = {
        BlockState.USED: percent(counts.percent(counts.used)),
        BlockState.SHARED: percent(counts.percent(counts.shared)),
        BlockState.CACHED: percent(counts.percent(counts.cached)),
        BlockState.HELD: count(counts.held),
        BlockState.GHOST: count(counts.ghost),
        BlockState.FREE: percent(counts.percent(counts.free)),
    }
    raised = {
        BlockState.HELD: counts.held > 0,
        BlockState.GHOST: counts.ghost > 0,
    }
    line: Line = ()
    ways = [(True, True, "  "), (True, True, " "), (True, False, " ")]
    if not letters:
        # In their colours the names explain the map as well as the letters do.
        ways[1:2] = [(False, True, "  "), (False, True, " ")]
    for with_letter, with_name, gap in ways:
        parts: list[Field] = []
        for state, name, importance in _STATES:
            loud = raised.get(state, True)
            runs: list[Run] = []
            if with_letter:
                runs.append((LETTERS[state] + " ", state_style(state)))
            if with_name:
                quiet_name = with_letter and not raised.get(state)
                runs.append((name + " ", "label" if quiet_name else state_style(state)))
            runs.append((numbers[state], state_style(state) if loud else "dim"))
            quiet = state in raised and not raised[state]
            parts.append((5 if quiet else importance, tuple(runs)))
        line = fields(parts, width, gap)
        whole = sum(line_width(runs) for _, runs in parts) + len(gap) * (len(parts) - 1)
        if whole <= width:
            break
    return line


def _debts(engine: Engine, width: int) -> Line:
    requests, metrics = engine.requests, engine.metrics
    preempted = owed = None
    if requests is not None:
        preempted = sum(1 for request in requests if request.phase is Phase.PREEMPTED)
        told = all(
            request.owed_blocks is not None
            for request in requests
            if request.phase is Phase.PREEMPTED
        )
        owed = sum(request.owed_blocks or 0 for request in requests) if told else None
    per_second = metrics.preemptions_s if metrics else None
    total = engine.counters.preemptions if engine.counters else None
    loud = "phase.preempted" if preempted else "value"
    parts: list[Field] = [
        (
            0,
            (
                ("preempted ", "label"),
                (f"{count(preempted)} req", loud),
                (", owe ", "label"),
                (f"{count(owed)} blocks", loud),
            ),
        ),
        (2, (("preempt ", "label"), (rate(per_second), "value"))),
    ]
    if per_second is None and total is not None:
        parts[1] = (2, (("preemptions ", "label"), (count(total), "value")))
    parts.append((1, _hits(engine)))
    line = fields(parts, width, "   ")
    if line_width(line) == 0 or (preempted and not any("req" in text for text, _ in line)):
        brief = (
            ("pre ", "label"),
            (short(preempted), loud),
            (" owe ", "label"),
            (short(owed), loud),
        )
        return fields([(0, brief)], width)
    return line


def _hits(engine: Engine) -> Line:
    if engine.prefix_caching is False:
        return (("prefix cache ", "label"), ("off", "value"))
    metrics = engine.metrics
    window = metrics.prefix_hit_percent if metrics else None
    total = metrics.prefix_hit_total_percent if metrics else None
    return (("hit ", "label"), (f"{percent(window)}/{percent(total)}", "value"))


def _use(engine: Engine, pool: Pool, width: int) -> Line:
    counts = pool.counts
    blocks = counts.percent(counts.used + counts.shared + counts.held + counts.ghost)
    slots = token_use_percent(engine, pool)
    parts: list[Field] = [
        (0, (("in use ", "label"), (percent(blocks), "value"), (" of blocks", "label"))),
        (1, ((percent(slots), "value"), (" of token slots", "label"))),
    ]
    if engine.counters is not None and engine.counters.alloc_failures is not None:
        failures = engine.counters.alloc_failures
        parts.append((2, (("alloc failures ", "label"), (count(failures), "value"))))
    return fields(parts, width, "   ")


def _pool_line(pool: Pool, width: int, ascii: bool) -> Line:  # noqa: A002 - the option
    head = f"{clip(safe(pool.label, ascii), 12, ascii)} {count(pool.counts.total)}"
    room = width - len(head) - 2
    return fields(
        [(1, ((head, "label"),)), (0, state_line(pool.counts, max(room, 0), ascii))], width
    )


# vLLM does not count references to its placeholder block.
_COMPARED = bytes(
    0 if state in (BlockState.NULL, BlockState.GHOST) else 255 for state in range(256)
)


def refs_off(pool: Pool) -> int | None:
    """Blocks whose ref count differs from the number of their holders; None: not fetched.

    Ghosts are not among them: they have a state of their own and are counted there.
    """
    refs, tables = pool.refs, pool.tables
    if refs is None or tables is None or len(refs) != len(tables):
        return None
    if refs == tables:
        return 0
    differ = int.from_bytes(refs, "big") ^ int.from_bytes(tables, "big")
    if pool.states is not None and len(pool.states) == len(refs):
        differ &= int.from_bytes(pool.states.translate(_COMPARED), "big")
    return len(refs) - differ.to_bytes(len(refs), "big").count(0)


def alarm_lines(engine: Engine, width: int, ascii: bool = False) -> list[Line]:  # noqa: A002
    """What is broken in the sums of an engine's pools: both sides of each identity."""
    out: list[Line] = []
    for pool in engine.pools:
        counts = pool.counts
        name = "" if len(engine.pools) == 1 else f" ({safe(pool.label, ascii)})"
        parts = (
            counts.null
            + counts.free
            + counts.cached
            + counts.used
            + counts.shared
            + counts.held
            + counts.ghost
        )
        if parts != counts.total:
            out += _alarm(
                (
                    f"BROKEN{name}: the states add up to {count(parts)}, the pool has"
                    f" {count(counts.total)} blocks",
                    f"BROKEN{name}: sum {count(parts)} != total {count(counts.total)}",
                ),
                width,
            )
        queue = counts.free + counts.cached
        if pool.free_queue is not None and queue != pool.free_queue:
            out += _alarm(
                (
                    f"BROKEN{name}: free + cached = {count(queue)}, vLLM's free queue holds"
                    f" {count(pool.free_queue)}",
                    f"BROKEN{name}: free+cached {count(queue)} != queue {count(pool.free_queue)}",
                ),
                width,
            )
        off = refs_off(pool)
        if off:
            out += _alarm(
                (
                    f"BROKEN{name}: {count(off)} blocks have a ref count that is not their"
                    " number of holders",
                    f"BROKEN{name}: {count(off)} blocks refs != holders",
                ),
                width,
            )
    return out


def _alarm(variants: tuple[str, ...], width: int) -> list[Line]:
    text = _first_fit(variants, width)
    return [((line, "crit"),) for line in ([text] if text else wrap(variants[-1], width))]


def _from_metrics(snap: Snapshot, view: View, engine: Engine, width: int) -> list[Line]:
    """What is known without a probe, and how to get the rest."""
    lines: list[Line] = []
    metrics = engine.metrics
    source = source_of(snap, "metrics", engine)
    if not engine.alive:
        lines += _alarm(_GONE, width)
    if metrics is None:
        reason = why(source, view.ascii)
        text = f"/metrics: {reason}" if reason else "/metrics: not read yet"
        lines += [((line, "warn"),) for line in wrap(text, width)]
    else:
        figures: list[Line] = [
            fields(
                [
                    (0, (("used ", "label"), (percent(metrics.kv_used_percent), "state.used"))),
                    (1, (("of blocks (from /metrics)", "label"),)),
                ],
                width,
                " ",
            ),
            fields(
                [
                    (0, (("running ", "label"), (count(metrics.running), "value"))),
                    (0, (("waiting ", "label"), (count(metrics.waiting), "value"))),
                    (2, (("capacity ", "label"), (count(metrics.waiting_capacity), "value"))),
                    (3, (("deferred ", "label"), (count(metrics.waiting_deferred), "value"))),
                ],
                width,
            ),
            fields(
                [
                    (1, (("preempt ", "label"), (rate(metrics.preemptions_s), "value"))),
                    (0, _hits(engine)),
                ],
                width,
                "   ",
            ),
        ]
        if metrics.kv_used_percent is None and metrics.running is None:
            text = "no data yet: /metrics has no series of this engine"
            figures = [((line, "dim"),) for line in wrap(text, width)]
        if is_old(source):
            figures = greyed(figures)
            lines.append(((clip(old_line(source, snap, view), width, view.ascii), "warn"),))
        if metrics.gauges_frozen_s is not None:
            text = (
                f"STALE for {duration(metrics.gauges_frozen_s)}: the gauges claim work and no"
                " counter moves; do not trust them"
            )
            lines += [((line, "warn"),) for line in wrap(text, width)]
        lines += figures
    lines.append(())
    reason = safe(engine.probe_reason, view.ascii) or "not connected yet"
    lines += [((line, "warn"),) for line in wrap(f"No block map: {reason}", width)]
    return lines
