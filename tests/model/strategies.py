"""Hypothesis strategies for the model, built from its type hints."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum

from hypothesis import strategies as st

from kvtop.model.blocks import BlockCounts, BlockState, count_states
from kvtop.model.snapshot import Pool, Snapshot

_TEXT = st.text(max_size=8) | st.sampled_from(["a[/x]b", "\x1b[31m", "<script>", "=1+1", "'; --"])
_FLOAT = st.floats(allow_nan=False, allow_infinity=False, width=64)
_TIME = st.integers(0, 4_000_000_000_000_000).map(lambda us: us / 1_000_000)
_INT = st.integers(-(2**53), 2**53)


def of(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Any value of a type of the model."""
    if kind is Pool:
        return pools()
    if kind is str:
        return _TEXT
    if kind is bool:
        return st.booleans()
    if kind is int:
        return _INT
    if kind is float:
        return _FLOAT
    if kind is bytes:
        return st.binary(max_size=32)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(
            kind,
            **{
                field.name: _TIME if field.name == "time_s" else of(hints[field.name])
                for field in dataclasses.fields(kind)
            },
        )
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        return st.none() | of(rest[0])
    if origin is tuple:
        return st.lists(of(args[0]), max_size=2).map(tuple)
    if origin is dict:
        keys = st.integers(-(2**31), 2**31) if args[0] is int else _TEXT
        return st.dictionaries(keys, of(args[1]), max_size=2)
    raise TypeError(kind)


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """A pool whose counts add up, with or without columns."""
    states = bytes(draw(st.lists(st.sampled_from([int(s) for s in BlockState]), max_size=48)))
    counts: BlockCounts = count_states(states)
    bare = Pool(counts=counts, free_queue=counts.free + counts.cached, label=draw(_TEXT))
    if not draw(st.booleans()):
        return bare
    column = st.binary(min_size=len(states), max_size=len(states))
    return dataclasses.replace(bare, states=states, refs=draw(column), tables=draw(column))


def snapshots() -> st.SearchStrategy[Snapshot]:
    """Any snapshot."""
    return of(Snapshot)
