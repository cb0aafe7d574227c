"""A snapshot as plain text: `kvtop once`. No styles, no cursor, one fact a column."""

from __future__ import annotations

from collections.abc import Iterable

from kvtop.draw.numbers import count, duration, gib, percent, rate, size
from kvtop.draw.text import DASH, cell_width, clip_middle, visible
from kvtop.model.snapshot import Engine, Finding, Gpu, Request, Snapshot, SourceState

MAX_ID_CELLS = 80
"""Longer request ids are cut in the middle; the JSON has them whole."""

_STATES = ("used", "shared", "cached", "held", "ghost", "free", "null")

_COLUMNS: tuple[tuple[str, str], ...] = (
    ("ID", "id"),
    ("PHASE", "phase"),
    ("STATUS", "status"),
    ("REASON", "reason"),
    ("AGE", "age_s"),
    ("PROMPT", "prompt_tokens"),
    ("GEN", "output_tokens"),
    ("MAX", "max_tokens"),
    ("COMPUTED", "computed_tokens"),
    ("HIT", "cached_tokens"),
    ("BLOCKS", "blocks"),
    ("SHARED", "shared_blocks"),
    ("MEM", "kv_bytes"),
    ("SLACK", "slack_tokens"),
    ("PREEMPT", "preemptions"),
    ("OWED", "owed_blocks"),
    ("CLIENT", "client"),
)


def plain(snapshot: Snapshot, findings: Iterable[Finding] = ()) -> list[str]:
    """Lines without control characters, whatever the snapshot holds.

    Args:
        snapshot: What is printed.
        findings: What holds in it, in the order of the judge.
    """
    demo = "  DEMO" if snapshot.demo else ""
    lines = [f"kvtop {snapshot.version}  {visible(snapshot.host)}{demo}"]
    for source in snapshot.sources:
        if source.state not in (SourceState.OK, SourceState.OFF) or source.reason:
            remedy = f"; {source.remedy}" if source.remedy else ""
            text = source.reason + remedy
            if source.state is SourceState.STARTING and not text:
                text = "it has not answered yet; this machine may be very busy"
            lines.append(f"{visible(source.name)}: {source.state.value}: {visible(text)}")
    lines += [_gpu(gpu) for gpu in snapshot.gpus]
    for engine in snapshot.engines:
        lines += ["", *_engine(engine, snapshot.time_s)]
    found = [line for finding in findings for line in _finding(finding)]
    return [*lines, "", *found] if found else lines


def _finding(finding: Finding) -> list[str]:
    where = "machine" if finding.engine_pid is None else f"pid {finding.engine_pid}"
    lines = [
        f"{visible(finding.severity)} {visible(finding.rule)} ({where}): {visible(finding.summary)}"
    ]
    if finding.next_step:
        lines.append(f"  do: {visible(finding.next_step)}")
    return lines


def _gpu(gpu: Gpu) -> str:
    name = f"GPU {gpu.index} {visible(gpu.name or DASH)}{' (simulated)' if gpu.simulated else ''}"
    if gpu.error:
        return f"{name}: {visible(gpu.error)}"
    system = " (system memory)" if gpu.mem_is_system else ""
    return (
        f"{name}: memory {gib(gpu.mem_used_bytes)}/{gib(gpu.mem_total_bytes)} GiB{system}, "
        f"busy {percent(gpu.util_percent)}, {count(gpu.temperature_c)} C, "
        f"{count(gpu.power_w)}/{count(gpu.power_limit_w)} W"
    )


def _state(engine: Engine) -> str:
    if not engine.alive:
        return "GONE"
    if engine.process_state in ("T", "t"):
        return "STOPPED"
    return visible(engine.state or DASH)


def _engine(engine: Engine, now_s: float) -> list[str]:
    lines = [
        f"engine {count(engine.engine)}  {visible(engine.server)}  pid {_plain(engine.pid)}  "
        f"{visible(engine.model or DASH)}  vLLM {visible(engine.vllm_version or DASH)}  "
        f"{_state(engine)}"
    ]
    for pool in engine.pools:
        counts = pool.counts
        parts = [f"{state} {count(getattr(counts, state))}" for state in _STATES]
        lines.append(
            f"blocks ({visible(pool.label)}): total {count(counts.total)} x "
            f"{count(engine.block_size)} tok  " + "  ".join(parts)
        )
        if pool.free_queue is not None and pool.free_queue != counts.free + counts.cached:
            lines.append(
                f"BROKEN: free + cached = {count(counts.free + counts.cached)}, "
                f"vLLM's free queue = {count(pool.free_queue)}"
            )
    metrics = engine.metrics
    if metrics is not None:
        lines.append(
            f"metrics: KV {percent(metrics.kv_used_percent)}  running {count(metrics.running)}  "
            f"waiting {count(metrics.waiting)}  hit {percent(metrics.prefix_hit_percent)} now, "
            f"{percent(metrics.prefix_hit_total_percent)} since start  "
            f"preemptions {count(metrics.preemptions_total)} ({rate(metrics.preemptions_s)})"
        )
    if engine.probe_reason:
        what = "no block state"
        if engine.probe is not None:
            what = f"blocks and requests are {duration(now_s - engine.probe.cut_time_s)} old"
        lines.append(f"{what}: {visible(engine.probe_reason)}")
    if engine.requests:
        lines += _table(engine.requests)
    elif engine.requests is not None:
        lines.append("no requests")
    return lines


def _plain(number: int | None) -> str:
    return DASH if number is None else str(number)


def _cell(request: Request, name: str) -> str:
    value = getattr(request, name)
    if value is None:
        return DASH
    if name == "age_s":
        return duration(value)
    if name == "kv_bytes":
        return size(value)
    if name == "phase":
        return str(value.value)
    return visible(value) if isinstance(value, str) else count(value)


def _table(requests: tuple[Request, ...]) -> list[str]:
    rows = [[title for title, _ in _COLUMNS]]
    rows += [[_cell(request, name) for _, name in _COLUMNS] for request in requests]
    for row in rows[1:]:
        row[0] = clip_middle(row[0], MAX_ID_CELLS)
    widths = [max(cell_width(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - cell_width(cell))
            cells.append(cell + space if i < 4 else space + cell)
        lines.append("  ".join(cells).rstrip())
    return lines
