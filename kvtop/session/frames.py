"""A snapshot as what is stored for one tick: a full frame, or the change since the last.

A tick has three parts, each a keyframe or a delta to the tick before. The JSON of state and
of requests is packed with the JSON of the tick before as preset dictionary, except in a
keyframe:

- state: raw deflate of JSON: the snapshot's fields by name, without the numbers that are
  SQL columns (`session.numbers`), without requests and block columns. A keyframe is
  `[tree]`, a delta is a `session.delta.tree_delta`. A stack frame is `[function id, self,
  total]`; an integer there counts samples, a decimal is a percentage.
- requests: raw deflate of JSON, one entry an engine: null (no probe), or the change of its
  table of requests, `{"f": columns, "k": 1 in a keyframe, "t": clock, "q": step, ...}` as in
  `session.delta.rows_delta`. Times are in microseconds. Numbers that follow from others are
  stored as their difference from what is expected (`_Expect`), which is nearly always 0.
- blocks: `[[engine, pool, blocks, column, column, column], ...]` as JSON, a line feed, then
  the payloads in that order. A column is `[0]` absent, `[1, n]` n bytes of raw deflate in
  full, `[2, n, m]` gaps and values of a `column_delta`, `[3]` as before. The second column
  (refs) is xor-ed with what its state makes one expect, the third (tables) with the second.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvtop.model import codec
from kvtop.model.snapshot import Engine, Pool, Snapshot, Stacks
from kvtop.model.snapshot import Frame as StackFrame
from kvtop.session import delta, numbers
from kvtop.session.rows import Expect, encode_rows

Columns = tuple[bytes | None, bytes | None, bytes | None]
"""States, refs and tables of a pool."""

REFS_BY_STATE = bytes([0, 0, 1, 2, 1, 1, 1]) + bytes(249)
"""The ref count that a block's state makes one expect."""
_MAX_JSON_BYTES = 64 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """One function of the stacks, by number."""

    id: int
    """Number in this file."""
    function: str
    """Function name."""
    file: str
    """File name."""
    line: int | None
    """Line."""
    thread: str
    """Thread."""


@dataclasses.dataclass(frozen=True, slots=True)
class Name:
    """One request, by number."""

    key: int
    """Number in this file."""
    engine: int
    """Index of its engine in the snapshot."""
    id: str
    """vLLM's request id."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What one tick adds to the file."""

    key: bool
    """True: a keyframe."""
    state: bytes
    """See the module."""
    requests: bytes
    """See the module."""
    blocks: bytes
    """See the module; empty when there are no columns."""
    gpus: tuple[numbers.Row, ...]
    """Numbers of each GPU."""
    engines: tuple[numbers.Row, ...]
    """Numbers of each engine."""
    functions: tuple[Function, ...]
    """Functions seen for the first time."""
    names: tuple[Name, ...]
    """Requests seen for the first time."""
    live: tuple[tuple[int, ...] | None, ...]
    """For each engine the request numbers in the order of its requests."""


class Stream:
    """JSON values that look alike, each packed with the help of the last."""

    def __init__(self) -> None:
        self._last = b""

    def pack(self, value: Any, key: bool) -> bytes:
        """Pack the next value; a keyframe without the help of the last."""
        text = json.dumps(value, separators=(",", ":")).encode("ascii")
        packed = delta.deflate(text, b"" if key else self._last)
        self._last = text
        return packed

    def unpack(self, data: bytes) -> Any:
        """The next value.

        Raises:
            ValueError: Damaged data.
        """
        self._last = delta.inflate_raw(data, self._last, _MAX_JSON_BYTES)
        return json.loads(self._last)


class FrameEncoder:
    """Encodes the snapshots of one file in their order."""

    def __init__(self) -> None:
        self._state_stream = Stream()
        self._request_stream = Stream()
        self._tree: Any = None
        self._functions: dict[tuple[str, str, int | None, str], int] = {}
        self._names: list[dict[tuple[str, int], int]] = []
        self._owners: list[tuple[str, int | None]] = []
        self._next_name = 1
        self._tables: list[delta.Table | None] = []
        self._columns: dict[tuple[int, int], Columns] = {}

    def encode(self, snapshot: Snapshot, key: bool) -> Frame:
        """The frame of the next snapshot.

        Args:
            snapshot: What to store.
            key: True: a keyframe, which is read without the frames before it.
        """
        key = key or self._tree is None
        new_functions: list[Function] = []
        names: list[Name] = []
        tree, gpus, engines = self._state(snapshot, new_functions)
        change = [tree] if key else delta.tree_delta(self._tree, tree)
        self._tree = tree
        live = self._name_requests(snapshot.engines, names)
        requests = self._requests(snapshot.engines, live, key)
        blocks = self._blocks(snapshot.engines, key)
        return Frame(
            key=key,
            state=self._state_stream.pack(change, key),
            requests=requests,
            blocks=blocks,
            gpus=gpus,
            engines=engines,
            functions=tuple(new_functions),
            names=tuple(names),
            live=live,
        )

    def function_id(self, frame: StackFrame) -> int:
        """The number of a function that was encoded before."""
        return self._functions[frame.function, frame.file, frame.line, frame.thread]

    def _state(
        self, snapshot: Snapshot, new: list[Function]
    ) -> tuple[Any, tuple[numbers.Row, ...], tuple[numbers.Row, ...]]:
        bare = dataclasses.replace(
            snapshot, engines=tuple(_bare_engine(engine) for engine in snapshot.engines), stacks=()
        )
        tree: dict[str, Any] = codec.encode(bare)
        tree["stacks"] = [self._stacks(stacks, new) for stacks in snapshot.stacks]
        gpus = tuple(numbers.take_gpu(gpu) for gpu in tree["gpus"])
        engines = tuple(numbers.take_engine(engine) for engine in tree["engines"])
        return tree, gpus, engines

    def _stacks(self, stacks: Stacks, new: list[Function]) -> dict[str, Any]:
        out: dict[str, Any] = codec.encode(dataclasses.replace(stacks, frames=()))
        rows = []
        for frame in stacks.frames:
            key = (frame.function, frame.file, frame.line, frame.thread)
            number = self._functions.get(key)
            if number is None:
                number = self._functions[key] = len(self._functions) + 1
                new.append(Function(number, *key))
            rows.append(
                [
                    number,
                    _as_samples(frame.self_percent, stacks.samples),
                    _as_samples(frame.total_percent, stacks.samples),
                ]
            )
        out["frames"] = rows
        return out

    def _name_requests(
        self, engines: Sequence[Engine], new: list[Name]
    ) -> tuple[tuple[int, ...] | None, ...]:
        owners = [(engine.server, engine.pid) for engine in engines]
        while len(self._names) < len(owners):
            self._names.append({})
        out: list[tuple[int, ...] | None] = []
        for slot, engine in enumerate(engines):
            if slot >= len(self._owners) or self._owners[slot] != owners[slot]:
                self._names[slot] = {}
            if engine.requests is None:
                out.append(None)
                continue
            before, now = self._names[slot], {}
            for request in engine.requests:
                turn = 0
                # One id can be there twice: a new request beside the remains of an old one.
                while (request.id, turn) in now:
                    turn += 1
                number = before.get((request.id, turn))
                if number is None:
                    number = self._next_name
                    self._next_name += 1
                    new.append(Name(number, slot, request.id))
                now[request.id, turn] = number
            self._names[slot] = now
            out.append(tuple(now.values()))
        self._owners = owners
        return tuple(out)

    def _requests(
        self, engines: Sequence[Engine], live: Sequence[tuple[int, ...] | None], key: bool
    ) -> bytes:
        entries: list[Any] = []
        tables: list[delta.Table | None] = []
        for slot, (engine, names) in enumerate(zip(engines, live, strict=True)):
            if engine.requests is None or names is None:
                entries.append(None)
                tables.append(None)
                continue
            table, entry = encode_rows(engine.requests, names, _expect(engine))
            before = self._tables[slot] if slot < len(self._tables) else None
            if key or before is None:
                entry["k"] = 1
                before = []
            else:
                del entry["f"]
            entry.update(delta.rows_delta(before, table))
            entries.append(entry)
            tables.append(table)
        self._tables = tables
        return self._request_stream.pack(entries, key)

    def _blocks(self, engines: Sequence[Engine], key: bool) -> bytes:
        header: list[Any] = []
        parts: list[bytes] = []
        seen: dict[tuple[int, int], Columns] = {}
        for slot, engine in enumerate(engines):
            for number, pool in enumerate(engine.pools):
                columns = _lean(pool)
                before = None if key else self._columns.get((slot, number))
                entry: list[Any] = [slot, number]
                for index, column in enumerate(columns):
                    old = None if before is None else before[index]
                    entry.append(_encode_column(old, column, parts))
                if any(column is not None for column in columns) or before is not None:
                    header.append(entry)
                    seen[slot, number] = columns
        self._columns = seen
        if not header:
            return b""
        line = json.dumps(header, separators=(",", ":")).encode("ascii")
        return line + b"\n" + b"".join(parts)


def _bare_engine(engine: Engine) -> Engine:
    pools = tuple(
        dataclasses.replace(pool, states=None, refs=None, tables=None) for pool in engine.pools
    )
    return dataclasses.replace(engine, pools=pools, requests=None)


def _expect(engine: Engine) -> Expect:
    cut = None if engine.probe is None else engine.probe.cut_time_s
    return Expect(engine.block_size, engine.block_bytes, cut)


def _as_samples(percent: float, samples: int) -> float | int | None:
    """The count of samples where it gives exactly this percentage, else the percentage."""
    if samples > 0 and 0 <= percent <= 100:
        count = round(percent * samples / 100)
        if 100.0 * count / samples == percent:
            return count
    value: float | None = codec.encode(float(percent))
    return value


def _lean(pool: Pool) -> Columns:
    states, refs, tables = pool.states, pool.refs, pool.tables
    lean_refs = refs
    if refs is not None and states is not None and len(states) == len(refs):
        lean_refs = delta.xor(refs, states.translate(REFS_BY_STATE))
    if tables is not None and refs is not None and len(refs) == len(tables):
        return states, lean_refs, delta.xor(tables, refs)
    return states, lean_refs, tables


def _encode_column(old: bytes | None, new: bytes | None, parts: list[bytes]) -> list[int]:
    if new is None:
        return [0]
    if old == new:
        return [3]
    if old is None or len(old) != len(new):
        packed = delta.deflate(new)
        parts.append(packed)
        return [1, len(packed)]
    gaps, values = (delta.deflate(part) for part in delta.column_delta(old, new))
    parts += [gaps, values]
    return [2, len(gaps), len(values)]


def total_bytes(frames: Iterable[Frame]) -> dict[str, int]:
    """How many bytes each part of some frames takes, for the benchmark."""
    out = {"state": 0, "requests": 0, "blocks": 0}
    for frame in frames:
        out["state"] += len(frame.state)
        out["requests"] += len(frame.requests)
        out["blocks"] += len(frame.blocks)
    return out
