"""The requests of one engine as rows of integers and words, and back.

Times become whole microseconds. A number that follows from others is stored as its
difference from what they make one expect, which is nearly always the same from tick to
tick, so that the delta of a tick is a few bytes a request:

- `age_s`: against the tick's clock less the arrival; both are in `Expect` or the entry.
- `computed_tokens`: prompt + output tokens less this.
- `blocks`: against the blocks that the computed tokens fill.
- `slack_tokens`: blocks x block size less computed tokens less this.
- `kv_bytes`: blocks x bytes a block less this.

Where one of the others is unknown the number is stored as it is; the reader sees the same
unknowns and knows which it was.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any

from kvtop.model.snapshot import Request

MICROSECONDS = 1_000_000
_STEPS = (1_000_000, 100_000, 10_000, 1_000, 100, 10, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Expect:
    """What is known of the engine of the rows."""

    block_size: int | None
    """Tokens a block."""
    block_bytes: int | None
    """Bytes a block."""
    cut_time_s: float | None
    """When the cut was taken."""


def _kind(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


_HINTS = {name: _kind(hint) for name, hint in typing.get_type_hints(Request).items()}
FIELDS = tuple(field.name for field in dataclasses.fields(Request) if field.name != "id")
"""Columns after the request's number."""
_FLOATS = frozenset(name for name in FIELDS if _HINTS[name] is float)
_ENUMS = frozenset(name for name in FIELDS if issubclass(_HINTS[name], Enum))
_MEMBERS = {name: {member.value: member for member in _HINTS[name]} for name in _ENUMS}
_OPTIONAL = frozenset(
    field.name for field in dataclasses.fields(Request) if field.default is not dataclasses.MISSING
)
_ALLOWED = {
    name: frozenset({_HINTS[name], type(None)} if name in _OPTIONAL else {_HINTS[name]})
    for name in FIELDS
}
"""Types of the values of a column."""
_GET = attrgetter(*FIELDS)

Column = Sequence[Any]


def micros(value: float | None) -> int | None:
    """Whole microseconds of seconds; None for what is no moment and no length of time."""
    if value is None or not math.isfinite(value * MICROSECONDS):
        return None
    return round(value * MICROSECONDS)


def encode_rows(
    requests: Sequence[Request], names: Sequence[int], expect: Expect
) -> tuple[list[list[Any]], dict[str, Any]]:
    """The requests as a table.

    Args:
        requests: Requests of one engine.
        names: The number of each in the file.
        expect: What is known of the engine.

    Returns:
        Rows of the number and `FIELDS`, and the entry's header: `f` the columns, `t` the
        clock that ages are counted from less the cut's time, in microseconds (absent:
        there is none), `q` the step of ages in microseconds.
    """
    header: dict[str, Any] = {"f": list(FIELDS)}
    if not requests:
        return [], header
    columns: dict[str, Column] = dict(
        zip(FIELDS, zip(*map(_GET, requests), strict=True), strict=True)
    )
    for name in _FLOATS:
        columns[name] = [micros(value) for value in columns[name]]
    for name in _ENUMS:
        columns[name] = [value.value for value in columns[name]]
    clock = _clock(columns)
    if clock is not None:
        step = next(q for q in _STEPS if all(a is None or a % q == 0 for a in columns["age_s"]))
        header["t"], header["q"] = clock - (micros(expect.cut_time_s) or 0), step
        columns["age_s"] = _ages(columns["age_s"], columns["arrival_time_s"], clock, step)
    _exchange(columns, expect, forward=True)
    rows = [list(row) for row in zip(names, *columns.values(), strict=True)]
    return rows, header


def decode_rows(
    entry: dict[str, Any], expect: Expect, names: Callable[[int], str]
) -> tuple[Request, ...]:
    """The requests again.

    A column at a time: a day has twenty million rows, and to check each cell by itself would
    take most of the time that reading takes.

    Args:
        entry: The header of `encode_rows` with the rows under `table`.
        expect: The same as for encoding.
        names: Request id by number.

    Raises:
        ValueError: Damaged data.
        TypeError, LookupError, ArithmeticError: The same.
    """
    fields, table = entry["f"], entry["table"]
    if not table:
        return ()
    keys, *rest = zip(*table, strict=True)
    columns: dict[str, Column] = dict(zip(fields, rest, strict=True))
    for name in FIELDS:
        columns.setdefault(name, [None] * len(keys))
    _exchange(columns, expect, forward=False)
    if "t" in entry:
        clock = entry["t"] + (micros(expect.cut_time_s) or 0)
        columns["age_s"] = _ages(columns["age_s"], columns["arrival_time_s"], clock, entry["q"])
    known = [_checked(name, columns[name]) for name in FIELDS]
    return tuple(map(Request, map(names, keys), *known))


def _checked(name: str, column: Column) -> Column:
    """A column as the model has it; `ValueError` where it is not of its kind."""
    if name in _ENUMS:
        return [_MEMBERS[name][value] for value in column]
    if name in _FLOATS:
        column = [None if value is None else value / MICROSECONDS for value in column]
        if not all(value is None or math.isfinite(value) for value in column):
            raise ValueError(f"{name} is not a finite number")
    if not set(map(type, column)) <= _ALLOWED[name]:
        raise ValueError(f"{name} is of another kind")
    return column


def _clock(columns: dict[str, Column]) -> int | None:
    """The moment that most ages are counted to, in microseconds."""
    sums = [
        age + arrival
        for age, arrival in zip(columns["age_s"], columns["arrival_time_s"], strict=True)
        if age is not None and arrival is not None
    ]
    return statistics.median_low(sums) if sums else None


def _ages(ages: Column, arrivals: Column, clock: int, step: int) -> list[Any]:
    """Ages against the expected ones, or back: the exchange is its own inverse."""
    half = step // 2
    return [
        age if age is None or arrival is None else (clock - arrival + half) // step * step - age
        for age, arrival in zip(ages, arrivals, strict=True)
    ]


def _exchange(columns: dict[str, Column], expect: Expect, forward: bool) -> None:
    """Numbers against expected numbers, in place, or back.

    Each is `expected - value`, its own inverse. Slack and bytes stand on the true blocks,
    and those on the true computed tokens: the order turns round on the way back.
    """

    def computed() -> None:
        columns["computed_tokens"] = [
            own if own is None or prompt is None or output is None else prompt + output - own
            for own, prompt, output in zip(
                columns["computed_tokens"],
                columns["prompt_tokens"],
                columns["output_tokens"],
                strict=True,
            )
        ]

    def blocks() -> None:
        size = expect.block_size
        if not size:
            return
        columns["blocks"] = [
            own if own is None or done is None else -(-done // size) - own
            for own, done in zip(columns["blocks"], columns["computed_tokens"], strict=True)
        ]

    def slack() -> None:
        size = expect.block_size
        if size is None:
            return
        columns["slack_tokens"] = [
            own if own is None or held is None or done is None else held * size - done - own
            for own, held, done in zip(
                columns["slack_tokens"], columns["blocks"], columns["computed_tokens"], strict=True
            )
        ]

    def size_bytes() -> None:
        each = expect.block_bytes
        if each is None:
            return
        columns["kv_bytes"] = [
            own if own is None or held is None else held * each - own
            for own, held in zip(columns["kv_bytes"], columns["blocks"], strict=True)
        ]

    inside_out = (slack, size_bytes, blocks, computed)
    for step in inside_out if forward else reversed(inside_out):
        step()
