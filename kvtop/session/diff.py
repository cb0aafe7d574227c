"""Two moments side by side, from one session or from two."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvtop.model.blocks import BlockCounts
from kvtop.model.snapshot import Counters, Engine, EngineMetrics, Gpu, Request, Snapshot

MOST_REQUESTS = 20
"""Requests listed at most."""

_GPU_FIELDS = (
    "mem_used_bytes",
    "mem_free_bytes",
    "util_percent",
    "power_w",
    "temperature_c",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One number at two moments."""

    subject: str
    """`engine 0`, `gpu 0`, or `request ID`; parts may come from outside."""
    name: str
    """What is counted, unit in the name."""
    before: float | None
    """At the first moment. None: unknown, or it was not there."""
    after: float | None
    """At the second moment."""

    @property
    def change(self) -> float | None:
        """After - before; None where one of them is unknown."""
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


def difference(before: Snapshot, after: Snapshot) -> list[Change]:
    """What is not the same at two moments.

    Engines are matched by server and rank, or by their place where both moments have as many;
    counters are compared only within one process. Requests are matched by id; those with the
    largest change of blocks come first.

    Args:
        before: The first moment.
        after: The second moment.

    Returns:
        Only numbers that differ.
    """
    out: list[Change] = []
    for old, new in _pairs(before.engines, after.engines):
        out += _engine(old, new)
    for index in sorted({g.index for g in before.gpus} | {g.index for g in after.gpus}):
        out += _gpu(index, _by_index(before.gpus, index), _by_index(after.gpus, index))
    return [change for change in out if change.before != change.after]


def _pairs(
    old: tuple[Engine, ...], new: tuple[Engine, ...]
) -> list[tuple[Engine | None, Engine | None]]:
    if len(old) == len(new):
        return list(zip(old, new, strict=True))
    by_key = {(engine.server, engine.engine): engine for engine in new}
    pairs: list[tuple[Engine | None, Engine | None]] = [
        (engine, by_key.pop((engine.server, engine.engine), None)) for engine in old
    ]
    return pairs + [(None, engine) for engine in by_key.values()]


def _by_index(gpus: tuple[Gpu, ...], index: int) -> Gpu | None:
    return next((gpu for gpu in gpus if gpu.index == index), None)


def _numbers(kind: type, value: Any) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    for field in fields(kind):
        number = None if value is None else getattr(value, field.name)
        if number is None or (isinstance(number, (int, float)) and not isinstance(number, bool)):
            out[field.name] = number
    return out


def _compare(
    subject: str, old: dict[str, float | None], new: dict[str, float | None]
) -> list[Change]:
    names = [*old, *(name for name in new if name not in old)]
    return [Change(subject, name, old.get(name), new.get(name)) for name in names]


def _engine(old: Engine | None, new: Engine | None) -> list[Change]:
    known = new or old
    if known is None:
        return []
    subject = f"engine {'-' if known.engine is None else known.engine}"
    out = _compare(
        subject,
        {f"blocks_{k}": v for k, v in _numbers(BlockCounts, old and old.blocks).items()},
        {f"blocks_{k}": v for k, v in _numbers(BlockCounts, new and new.blocks).items()},
    )
    same = old is not None and new is not None and old.pid == new.pid
    if same:
        out += _compare(
            subject,
            _numbers(Counters, old and old.counters),
            _numbers(Counters, new and new.counters),
        )
    out += _compare(
        subject,
        _numbers(EngineMetrics, old and old.metrics),
        _numbers(EngineMetrics, new and new.metrics),
    )
    return out + _requests(old, new)


def _requests(old: Engine | None, new: Engine | None) -> list[Change]:
    was = {request.id: request for request in (old.requests if old else None) or ()}
    now = {request.id: request for request in (new.requests if new else None) or ()}
    changes = [
        Change(f"request {name}", "blocks", _held(was.get(name)), _held(now.get(name)))
        for name in [*was, *(name for name in now if name not in was)]
    ]
    changes.sort(key=lambda change: -abs((change.after or 0) - (change.before or 0)))
    return changes[:MOST_REQUESTS]


def _held(request: Request | None) -> int | None:
    return None if request is None else request.blocks


def _gpu(index: int, old: Gpu | None, new: Gpu | None) -> list[Change]:
    return [
        Change(
            f"gpu {index}",
            name,
            None if old is None else getattr(old, name),
            None if new is None else getattr(new, name),
        )
        for name in _GPU_FIELDS
    ]
