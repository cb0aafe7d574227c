"""Any snapshot and view, with the values nobody expects: NaN, negative, huge, empty."""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum

from hypothesis import strategies as st

from kvtop.draw.requests import COLUMNS
from kvtop.draw.view import Baseline, Detail, Player, View
from kvtop.model.blocks import BlockCounts, count_states
from kvtop.model.history import History
from kvtop.model.snapshot import Engine, Finding, Gpu, Pool, Snapshot

_TEXT = st.text(max_size=12) | st.sampled_from(
    [
        "a[/x]b",
        "\x1b[31m",
        "\u202ex",
        "\ud800",
        "宽" * 9,
        "x" * 300,
        "e\u0301\u0301\u0301",
        "RUNNING",
    ]
)
_INT = st.integers(0, 300) | st.integers(-(2**63), 2**63)
_FLOAT = st.floats(width=64) | st.floats(0, 200)


def _of(kind: typing.Any) -> st.SearchStrategy[typing.Any]:
    if kind is Pool:
        return pools()
    plain = {str: _TEXT, bool: st.booleans(), int: _INT, float: _FLOAT}
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {field.name: _of(hints[field.name]) for field in dataclasses.fields(kind)}
        return st.builds(kind, **fields)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.none() | _of(next(arg for arg in args if arg is not type(None)))
    if origin is tuple:
        return st.lists(_of(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(_TEXT, _of(args[1]), max_size=2)
    raise TypeError(kind)


def pools() -> st.SearchStrategy[Pool]:
    """Pools whose columns and counts agree, and some where nothing does."""
    states = st.binary(max_size=600) | st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 400)), max_size=6
    ).map(lambda runs: b"".join(bytes([state]) * length for state, length in runs))
    column = st.none() | st.binary(max_size=64)
    right = st.builds(
        lambda states, queue: Pool(
            counts=count_states(states),
            free_queue=queue,
            states=states,
            refs=bytes(len(states)),
            tables=states,
        ),
        states,
        st.none() | _INT,
    )
    wrong = st.builds(
        Pool,
        counts=st.builds(
            BlockCounts, **{field.name: _INT for field in dataclasses.fields(BlockCounts)}
        ),
        free_queue=st.none() | _INT,
        states=st.none() | states,
        refs=column,
        tables=column,
        label=_TEXT,
    )
    return right | wrong


ENGINES = _of(Engine)
GPUS = _of(Gpu)
FINDINGS = st.builds(
    Finding,
    rule=_TEXT | st.just("diagnosis.memory-fine"),
    severity=_TEXT | st.sampled_from(["info", "warning", "critical"]),
    since_s=_FLOAT,
    engine_pid=st.none() | _INT,
    summary=_TEXT,
    evidence=st.dictionaries(_TEXT, _TEXT, max_size=3),
    next_step=_TEXT,
    disproof=_TEXT,
    block_ids=st.lists(_INT, max_size=9).map(tuple),
    request_ids=st.lists(_TEXT, max_size=3).map(tuple),
)
_BASELINES = st.builds(
    Baseline,
    time_s=_FLOAT,
    counts=st.dictionaries(
        _TEXT,
        st.builds(BlockCounts, **{field.name: _INT for field in dataclasses.fields(BlockCounts)}),
        max_size=2,
    ),
)
SNAPSHOTS: st.SearchStrategy[Snapshot] = _of(Snapshot)


def _history(snaps: list[Snapshot]) -> History:
    kept = History()
    for snap in snaps:
        kept.append(snap)
    return kept


_DETAILS = st.builds(
    Detail,
    request_id=_TEXT,
    step=st.none() | _INT,
    tables=st.lists(
        st.tuples(_INT, st.none() | _INT, st.lists(_INT, max_size=30).map(tuple)), max_size=2
    ).map(tuple),
    refs=st.lists(st.lists(_INT, max_size=30).map(tuple), max_size=2).map(tuple),
    shared_with=st.dictionaries(_INT, st.lists(_TEXT, max_size=4), max_size=4),
    error=st.just("") | _TEXT,
)


def views(snap: Snapshot) -> st.SearchStrategy[View]:
    """Views of a snapshot; the history is made of it at rising times."""
    times = st.lists(_FLOAT, max_size=5)
    return st.builds(
        View,
        now_s=_FLOAT,
        engine=_INT,
        gpu=_INT,
        focus=st.sampled_from(["gpu", "kv", "requests", "stacks", "trend", "?"]),
        sort=st.sampled_from(COLUMNS) | _TEXT,
        reverse=st.booleans(),
        search=st.just("") | _TEXT,
        search_open=st.booleans(),
        cursor_id=st.none() | _TEXT,
        scroll=st.dictionaries(st.sampled_from(["requests", "detail", "stacks", "sources"]), _INT),
        lit_blocks=st.frozensets(st.integers(-5, 700), max_size=20),
        detail=st.none() | _DETAILS,
        stacks_on=st.booleans(),
        paused=st.booleans(),
        ascii=st.booleans(),
        mono=st.booleans(),
        message=st.just("") | _TEXT,
        findings=st.lists(FINDINGS, max_size=3).map(tuple),
        finding=st.none() | FINDINGS,
        recording=st.just("") | _TEXT,
        player=st.none() | _of(Player),
        baseline=st.none() | _BASELINES,
        history=st.none()
        | times.map(
            lambda moments: _history(
                [dataclasses.replace(snap, time_s=time_s) for time_s in moments]
            )
        ),
    )
