"""The GPU panel: whose memory is it, and how busy is the card.

The split of the used memory answers the question behind most "leaks": the KV pool
is reserved once at start and its blocks come and go inside it. Its parts are counts
times the bytes of a block, not measured by NVML, and are marked with `~`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.draw.chart import Curve, chart
from kvtop.draw.numbers import Number, duration, gib, percent, short, size_short
from kvtop.draw.pick import engine_of, gpu_of, greyed, is_old, old_line, source_of, why
from kvtop.draw.text import DASH, Field, block, clip, fields, fit, line_width, safe, wrap
from kvtop.draw.view import Line, Run, View
from kvtop.model.blocks import LETTERS, BlockState
from kvtop.model.snapshot import Engine, Gpu, GpuProcess, Snapshot, SourceStatus

_CHART_MIN = 5


def title(snap: Snapshot, view: View, width: int) -> str:
    """`GPU 0 H100 80GB`, or `GPU` when there is none."""
    gpu = gpu_of(snap, view)
    if gpu is None:
        return clip("GPU", width, view.ascii)
    parts: list[Field] = [(0, ((f"GPU {gpu.index}", ""),))]
    if len(snap.gpus) > 1:
        parts.append((3, ((f"of {len(snap.gpus)}", ""),)))
    if gpu.simulated:
        parts.append((1, (("SIMULATED", ""),)))
    if gpu.name:
        parts.append((2, ((safe(gpu.name, view.ascii), ""),)))
    return "".join(text for text, _ in fields(parts, width, " "))


def gpu_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """Memory with its split, load, clocks, processes, other GPUs, and a chart if there is room."""
    gpu = gpu_of(snap, view)
    source = source_of(snap, "nvml")
    if gpu is None:
        return block(_no_gpu(source, view, width), width, height)
    lines = [] if gpu.error else _figures(snap, view, gpu, width)
    old = is_old(source)
    if old:
        lines = greyed(lines)
    top: list[Line] = []
    if gpu.error:
        text = f"GPU {gpu.index} cannot be read: {safe(gpu.error, view.ascii)}"
        top = [((line, "crit"),) for line in wrap(text, width)]
    if old and height > 1:
        top.append(((clip(old_line(source, snap, view), width, view.ascii), "warn"),))
    lines = top + lines
    others = [_brief(other, width, view.ascii) for other in snap.gpus if other is not gpu]
    if len(lines) + len(others) <= height:
        lines += others
    elif others and len(lines) < height:
        room = height - len(lines) - 1
        more = f"{len(others) - room} more GPUs"
        lines += [*others[:room], fields([(0, ((more, "dim"),))], width)]
    room = height - len(lines)
    if room >= _CHART_MIN and view.history is not None and not gpu.error:
        lines += _history(view, gpu, width, room)
    return block(lines, width, height)


def _no_gpu(source: SourceStatus | None, view: View, width: int) -> list[Line]:
    reason = why(source, view.ascii)
    nothing = " yet" if source is not None else ": not asked for"
    text = "No GPU figures" + (f": {reason}" if reason else nothing)
    return [((line, "warn" if reason else "dim"),) for line in wrap(text, width)]


def _figures(snap: Snapshot, view: View, gpu: Gpu, width: int) -> list[Line]:
    lines = [_memory(snap, view, gpu, width)]
    lines.append(_split(snap, view, gpu, width))
    load: list[Field] = [
        (0, _pair("util", percent(gpu.util_percent))),
        (1, _pair("", _unit(gpu.temperature_c, "C"))),
        (2, _pair("", f"{short(gpu.power_w)}/{short(gpu.power_limit_w)}W")),
        (4, _pair("memctl", percent(gpu.mem_util_percent))),
        (3, _pair("", f"{short(gpu.sm_clock_mhz)}/{short(gpu.mem_clock_mhz)}MHz")),
    ]
    lines.append(fields(load, width))
    links: list[Field] = []
    if gpu.pcie_rx_bytes_s is not None or gpu.pcie_tx_bytes_s is not None:
        links.append((0, _pair("PCIe in/out", _flow(gpu.pcie_rx_bytes_s, gpu.pcie_tx_bytes_s))))
    if gpu.nvlink_rx_bytes_s is not None or gpu.nvlink_tx_bytes_s is not None:
        links.append((1, _pair("NVLink", _flow(gpu.nvlink_rx_bytes_s, gpu.nvlink_tx_bytes_s))))
    if links:
        lines.append(fields(links, width))
    lines.extend(_processes(view, gpu, width))
    return lines


def _pair(label: str, value: str) -> Line:
    return ((label + " ", "label"), (value, "value")) if label else ((value, "value"),)


def _unit(value: Number, unit: str) -> str:
    return short(value) + unit


def _flow(into: Number, out: Number) -> str:
    return f"{size_short(into)}/{size_short(out)}/s"


def _memory(snap: Snapshot, view: View, gpu: Gpu, width: int) -> Line:
    used, total = gpu.mem_used_bytes, gpu.mem_total_bytes
    figures = f"{gib(used)}/{gib(total)}G"
    if gpu.mem_is_system:
        figures += " system"
    head = "mem "
    room = width - len(head) - len(figures) - 1
    if room < 4 or used is None or not total or total < 0:
        return fields([(1, (("mem", "label"),)), (0, ((figures, "value"),))], width, " ")
    kv = kv_on_gpu(snap, view, gpu)
    parts: list[tuple[int, str, str]] = [(used, "bar.mem", "|")]
    if kv is not None:
        parts = [
            (used - kv.total, "bar.weights", "w"),
            (kv.used, "state.used", LETTERS[BlockState.USED]),
            (kv.cached, "state.cached", LETTERS[BlockState.CACHED]),
            (kv.free, "state.free", LETTERS[BlockState.FREE]),
        ]
    letters = view.ascii or view.mono
    runs: list[Run] = [(head, "label")]
    seen = cells = 0
    for amount, style, letter in parts:
        seen += amount
        until = min(room, room * seen // total)
        runs.append(((letter if letters else "|") * (until - cells), style))
        cells = max(cells, until)
    runs.append((" " * (room - cells), ""))
    runs.append((" " + figures, "value"))
    return fit(runs, width)


@dataclass(frozen=True, slots=True)
class KvShare:
    """Bytes of the KV pools on one GPU, by what their blocks are doing."""

    total: int
    """All blocks, the null block included."""
    used: int
    """Used, shared, held and ghost ones."""
    cached: int
    """Evictable ones."""
    free: int
    """Free ones."""


def kv_on_gpu(snap: Snapshot, view: View, gpu: Gpu) -> KvShare | None:
    """The share of the KV pools on a GPU, derived: counts x bytes a block.

    An engine's pool is divided evenly by the GPUs that its processes are on. None: not
    known whose GPU this is, or how large a block is, or the pool is larger than what is used.
    """
    engines = _engines_on(snap, view, gpu)
    if not engines:
        return None
    total = used = cached = free = 0
    for engine, gpus in engines:
        counts, each = engine.blocks, engine.block_bytes
        if counts is None or each is None or each <= 0:
            return None
        total += counts.total * each // gpus
        used += (counts.used + counts.shared + counts.held + counts.ghost) * each // gpus
        cached += counts.cached * each // gpus
        free += counts.free * each // gpus
    if gpu.mem_used_bytes is not None and total > gpu.mem_used_bytes:
        # The pool cannot be here (a CPU engine beside a GPU), or its size is wrong.
        return None
    return KvShare(total, used, cached, free)


def _engines_on(snap: Snapshot, view: View, gpu: Gpu) -> list[tuple[Engine, int]]:
    """Engines with a process on this GPU, each with the number of GPUs it is on."""
    found = []
    for engine in snap.engines:
        on = [
            other.index
            for other in snap.gpus
            if any(_is_of(process, engine) for process in other.processes or ())
        ]
        if gpu.index in on:
            found.append((engine, len(on)))
    chosen = engine_of(snap, view)
    # Where NVML names nobody that can be seen here (containers, WSL), one engine and one
    # GPU belong together; all else would be a guess.
    named = any(process.command is not None for process in gpu.processes or ())
    if not found and not named and chosen is not None and len(snap.engines) == len(snap.gpus) == 1:
        return [(chosen, 1)]
    return found


def _is_of(process: GpuProcess, engine: Engine) -> bool:
    return engine.pid is not None and process.engine_pid == engine.pid


def _split(snap: Snapshot, view: View, gpu: Gpu, width: int) -> Line:
    kv = kv_on_gpu(snap, view, gpu)
    used = gpu.mem_used_bytes
    if kv is None or used is None:
        return fields(
            [(1, (("split", "label"),)), (0, ((f"{DASH} ({_no_split(snap, view, gpu)})", "dim"),))],
            width,
        )
    rest = f"~{gib(used - kv.total)}"
    bar = (" | ", "label")
    long = (
        ("weights+other ", "label"),
        (rest, "bar.weights"),
        bar,
        ("KV used ", "label"),
        (f"~{gib(kv.used)}", "state.used"),
        (" cached ", "label"),
        (f"~{gib(kv.cached)}", "state.cached"),
        (" free ", "label"),
        (f"~{gib(kv.free)}", "value"),
        ("G", "label"),
    )
    middle = (
        ("other ", "label"),
        (rest, "bar.weights"),
        (" KV u/c/f ", "label"),
        (f"~{gib(kv.used)}", "state.used"),
        ("/", "label"),
        (gib(kv.cached), "state.cached"),
        ("/", "label"),
        (gib(kv.free), "value"),
        ("G", "label"),
    )
    for line in (long, middle):
        if line_width(line) <= width:
            return line
    return fields([(1, (("KV", "label"),)), (0, ((f"~{gib(kv.total)}G", "value"),))], width, " ")


def _no_split(snap: Snapshot, view: View, gpu: Gpu) -> str:
    engines = _engines_on(snap, view, gpu)
    if not engines:
        return "no engine known here"
    if any(engine.blocks is None for engine, _ in engines):
        return "no probe"
    return "KV bytes not known"


def _processes(view: View, gpu: Gpu, width: int) -> list[Line]:
    if gpu.processes is None:
        text = "processes: - (NVML does not tell)"
        return [fields([(0, ((text, "dim"),))], width)]
    lines: list[Line] = []
    others = [process for process in gpu.processes if process.engine_pid is None]
    for process in gpu.processes:
        if process.engine_pid is None:
            continue
        parts: list[Field] = [
            (1, ((f"pid {process.pid}", "label"),)),
            (0, ((f"{gib(process.mem_bytes)}G", "value"),)),
        ]
        used = line_width(fields(parts, width))
        name = safe(process.command or DASH, view.ascii)
        if width - used - 2 >= 4:
            parts.append((2, ((clip(name, width - used - 2, view.ascii), ""),)))
        lines.append(fields(parts, width))
    if others:
        held = [process.mem_bytes for process in others]
        known_bytes = sum(amount for amount in held if amount is not None)
        text = gib(known_bytes) if None not in held else DASH
        label = "process" if len(others) == 1 else "processes"
        parts = [
            (1, ((f"{len(others)} other {label}", "label"),)),
            (0, ((f"{text}G" if text != DASH else DASH, "value"),)),
        ]
        lines.append(fields(parts, width))
    return lines


def _brief(gpu: Gpu, width: int, ascii: bool) -> Line:  # noqa: A002 - the name of the option
    head = (f"GPU {gpu.index}", "label")
    if gpu.error:
        room = width - len(head[0]) - 2
        return fields(
            [(0, (head,)), (1, ((clip(safe(gpu.error, ascii), room, ascii), "crit"),))], width
        )
    parts: list[Field] = [
        (0, (head,)),
        (1, ((f"{gib(gpu.mem_used_bytes)}/{gib(gpu.mem_total_bytes)}G", "value"),)),
        (2, ((percent(gpu.util_percent), "value"),)),
        (3, ((_unit(gpu.temperature_c, "C"), "value"),)),
    ]
    return fields(parts, width)


def _history(view: View, gpu: Gpu, width: int, room: int) -> list[Line]:
    if view.history is None:
        return []
    times, util = view.history.gpu_series(gpu.index, "util_percent")
    _, mem = view.history.gpu_series(gpu.index, "mem_used_bytes")
    total = gpu.mem_total_bytes
    share: list[float | None] = [
        100.0 * value / total if value is not None and total else None for value in mem
    ]
    legend = fields(
        [
            (0, (("u", "chart.util"), (" util %", "label"))),
            (1, (("m", "chart.mem"), (" memory %", "label"))),
            (2, ((f"last {duration(times[-1] - times[0])}" if len(times) > 1 else "", "label"),)),
        ],
        width,
    )
    curves = (
        Curve("memory", "m", "chart.mem", share),
        Curve("util", "u", "chart.util", util),
    )
    drawn = chart(times, curves, width, room - 1, ascii=view.ascii or view.mono, upper=100.0)
    return [legend, *drawn]
