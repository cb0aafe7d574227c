"""Values of the model as SQLite can hold them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtop.model.snapshot import Engine, Gpu
from kvtop.session.numbers import Row
from kvtop.session.rows import micros


def gpu_row(gpu: Gpu) -> Row:
    """A row of `gpu_change` after its keys."""
    values = (
        gpu.index,
        gpu.uuid,
        gpu.name,
        gpu.mem_total_bytes,
        gpu.power_limit_w,
        gpu.simulated,
        gpu.error,
    )
    return tuple(sql(value) for value in values)


def engine_row(engine: Engine) -> Row:
    """A row of `engine_change` after its keys."""
    values = (
        engine.engine,
        engine.pid,
        engine.server,
        engine.alive,
        engine.state,
        engine.model,
        engine.vllm_version,
        engine.block_size,
        engine.block_bytes,
        engine.max_model_len,
        engine.max_num_seqs,
        engine.prefix_caching,
        engine.simulated,
    )
    return tuple(sql(value) for value in values)


def clean(rows: Iterable[Row]) -> list[Row]:
    """Rows with every value as SQLite can hold it."""
    return [tuple(sql(value) for value in row) for row in rows]


def sql(value: Any) -> Any:
    """A value SQLite can hold: wider integers become floats."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        try:
            return float(value)
        except OverflowError:
            return None
    return value


def us(time_s: float) -> int:
    """Microseconds that a column can hold."""
    return min(max(micros(time_s) or 0, -(2**62)), 2**62)


def text(value: str) -> str:
    """Text as SQLite can hold it: half characters are escaped."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
