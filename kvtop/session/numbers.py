"""Which numbers of a snapshot are typed SQL columns, and the way there and back.

A number that changes every second is a column of `gpu_sample` or `engine_sample`, so that
anyone can plot it with SQL. The rest of the snapshot is a JSON tree (`session.frames`); the
numbers are taken out of it on the way in and put back on the way out, so nothing is
stored twice. The columns follow the model's fields by their type hints.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from kvtop.model.blocks import BlockCounts
from kvtop.model.snapshot import Counters, Engine, EngineMetrics, Gpu, ProbeInfo

Row = tuple[Any, ...]
Tree = dict[str, Any]

_GPU_STATIC = {"index", "mem_total_bytes", "power_limit_w"}
_METRIC_STATIC = {"num_blocks", "block_size_tokens", "kv_size_tokens"}
_INT64 = 2**63
_COUNT_UNITS = {
    "allocated": "blocks_allocated_total",
    "freed": "block_refs_freed_total",
    "touched": "block_refs_touched_total",
    "evicted": "blocks_evicted_total",
    "alloc_failures": "alloc_failures_total",
    "preemptions": "probe_preemptions_total",
    "preempted_blocks": "blocks_preempted_total",
    "preempted_tokens": "tokens_preempted_total",
    "steps": "steps_total",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One number of one table."""

    name: str
    """SQL column."""
    group: str
    """Part of the engine it is in: empty, `counts` (of the first pool), `counters`,
    `metrics` or `probe`."""
    field: str
    """Field of that part."""
    real: bool
    """True: a REAL, else an INTEGER."""


def _number_kind(hint: Any) -> type | None:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        hint = rest[0] if len(rest) == 1 else None
    return hint if hint in (int, float) else None


def _columns(
    kind: type, group: str, prefix: str, without: set[str], names: dict[str, str]
) -> list[Column]:
    hints = typing.get_type_hints(kind)
    out = []
    for field in dataclasses.fields(kind):
        number = _number_kind(hints[field.name])
        if number is not None and field.name not in without:
            name = names.get(field.name, prefix + field.name)
            out.append(Column(name, group, field.name, number is float))
    return out


_ENGINE_STATIC = {field.name for field in dataclasses.fields(Engine) if field.name != "rss_bytes"}

GPU_COLUMNS = tuple(_columns(Gpu, "", "", _GPU_STATIC, {}))
"""Columns of `gpu_sample` after its keys."""

ENGINE_COLUMNS = (
    *_columns(Engine, "", "", _ENGINE_STATIC, {}),
    *_columns(BlockCounts, "counts", "blocks_", set(), {}),
    *_columns(Counters, "counters", "", set(), _COUNT_UNITS),
    *_columns(EngineMetrics, "metrics", "", _METRIC_STATIC, {}),
    *_columns(ProbeInfo, "probe", "probe_", set(), {}),
)
"""Columns of `engine_sample` after its keys."""


def ddl(columns: tuple[Column, ...]) -> str:
    """The columns as SQL."""
    return ", ".join(f"{c.name} {'REAL' if c.real else 'INTEGER'}" for c in columns)


def take_gpu(tree: Tree) -> Row:
    """Take the numbers out of an encoded `Gpu`."""
    return tuple(_take(tree, column) for column in GPU_COLUMNS)


def take_engine(tree: Tree) -> Row:
    """Take the numbers out of an encoded `Engine`."""
    parts = _parts(tree)
    return tuple(_take(parts[column.group], column) for column in ENGINE_COLUMNS)


def put_gpu(tree: Tree, row: Row) -> Tree:
    """A copy of `tree` with the numbers back in it."""
    out = dict(tree)
    for column, value in zip(GPU_COLUMNS, row, strict=True):
        out.setdefault(column.field, value)
    return out


def put_engine(tree: Tree, row: Row) -> Tree:
    """A copy of `tree` with the numbers back in it."""
    out = dict(tree)
    for name in ("counters", "metrics", "probe"):
        if isinstance(out.get(name), dict):
            out[name] = dict(out[name])
    pools = out.get("pools")
    if isinstance(pools, list) and pools and isinstance(pools[0], dict):
        first = {**pools[0], "counts": dict(pools[0].get("counts") or {})}
        out["pools"] = [first, *pools[1:]]
    parts = _parts(out)
    for column, value in zip(ENGINE_COLUMNS, row, strict=True):
        part = parts[column.group]
        if part is not None:
            part.setdefault(column.field, value)
    return out


def _parts(tree: Tree) -> dict[str, Tree | None]:
    pools = tree.get("pools")
    first = pools[0] if isinstance(pools, list) and pools else None
    found: dict[str, Any] = {
        "": tree,
        "counts": first.get("counts") if isinstance(first, dict) else None,
        "counters": tree.get("counters"),
        "metrics": tree.get("metrics"),
        "probe": tree.get("probe"),
    }
    return {name: part if isinstance(part, dict) else None for name, part in found.items()}


def _take(part: Tree | None, column: Column) -> Any:
    if part is None:
        return None
    value = part.get(column.field)
    # SQLite cannot hold it: it stays in the tree, and the column is empty.
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        return None
    part.pop(column.field, None)
    return value
