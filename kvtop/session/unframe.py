"""What `session.frames` stored for each tick, back as the exact snapshot.

It reads files, so it trusts nothing: damaged data raises `ValueError` (or `BadDataError`
from the codec), never anything else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from kvtop.model import codec
from kvtop.model.snapshot import Request, Snapshot
from kvtop.session import delta, numbers
from kvtop.session.frames import REFS_BY_STATE, Columns, Function, Stream
from kvtop.session.rows import Expect, decode_rows


class StateDecoder:
    """State and requests of the ticks of one file, from a keyframe on.

    Its methods raise as the module says.
    """

    def __init__(self) -> None:
        self._state_stream = Stream()
        self._request_stream = Stream()
        self._tree: Any = None
        self._entries: list[dict[str, Any] | None] = []

    def apply(self, state: bytes, requests: bytes) -> None:
        """Take in one frame."""
        change = self._state_stream.unpack(state)
        if self._tree is None and not isinstance(change, list):
            raise ValueError("a delta without its keyframe")
        self._tree = delta.tree_apply(self._tree, change)
        entries = self._request_stream.unpack(requests)
        if not isinstance(entries, list):
            raise ValueError("requests that are no list")  # noqa: TRY004
        out: list[dict[str, Any] | None] = []
        for slot, entry in enumerate(entries):
            if entry is None:
                out.append(None)
                continue
            if not isinstance(entry, dict):
                raise ValueError("an entry that is no object")  # noqa: TRY004
            before = self._entries[slot] if slot < len(self._entries) else None
            if "k" not in entry:
                if before is None:
                    raise ValueError("a delta without its keyframe")
                entry["f"] = before["f"]
            table = [] if "k" in entry or before is None else before["table"]
            entry["table"] = delta.rows_apply(table, entry)
            out.append(entry)
        self._entries = out

    def names(self) -> set[int]:
        """Numbers of the requests in the present tick."""
        return {row[0] for entry in self._entries if entry for row in entry["table"] if row}

    def functions(self) -> set[int]:
        """Numbers of the functions in the present tick."""
        stacks = self._tree.get("stacks", []) if isinstance(self._tree, dict) else []
        return {row[0] for one in stacks for row in one["frames"]}

    def snapshot(
        self,
        gpus: Sequence[numbers.Row],
        engines: Sequence[numbers.Row],
        names: Callable[[int], str],
        functions: Callable[[int], Function],
    ) -> Snapshot:
        """The present tick, without block columns.

        Args:
            gpus: Numbers of each GPU, in order.
            engines: Numbers of each engine, in order.
            names: Request id by number.
            functions: Function by number.
        """
        tree = dict(self._tree)
        try:
            tree["gpus"] = [
                numbers.put_gpu(gpu, row) for gpu, row in zip(tree["gpus"], gpus, strict=True)
            ]
            tree["engines"] = [
                {**numbers.put_engine(engine, row), "requests": None}
                for engine, row in zip(tree["engines"], engines, strict=True)
            ]
            requests = [
                self._requests(slot, engine, names) for slot, engine in enumerate(tree["engines"])
            ]
            tree["stacks"] = [_full_stacks(stacks, functions) for stacks in tree["stacks"]]
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"a frame that does not fit: {error}") from None
        snapshot = codec.decode(Snapshot, tree)
        full = [
            engine if rows is None else dataclasses.replace(engine, requests=rows)
            for engine, rows in zip(snapshot.engines, requests, strict=True)
        ]
        return dataclasses.replace(snapshot, engines=tuple(full))

    def _requests(
        self, slot: int, tree: dict[str, Any], names: Callable[[int], str]
    ) -> tuple[Request, ...] | None:
        entry = self._entries[slot] if slot < len(self._entries) else None
        if entry is None:
            return None
        probe = tree.get("probe")
        cut = probe.get("cut_time_s") if isinstance(probe, dict) else None
        expect = Expect(tree.get("block_size"), tree.get("block_bytes"), cut)
        return decode_rows(entry, expect, names)


def _full_stacks(tree: dict[str, Any], functions: Callable[[int], Function]) -> dict[str, Any]:
    samples = tree["samples"]
    frames = []
    for number, own, total in tree["frames"]:
        known = functions(number)
        frames.append(
            {
                "function": known.function,
                "file": known.file,
                "line": known.line,
                "thread": known.thread,
                "self_percent": 100.0 * own / samples if isinstance(own, int) else own,
                "total_percent": 100.0 * total / samples if isinstance(total, int) else total,
            }
        )
    return {**tree, "frames": frames}


class BlockDecoder:
    """Block columns of the ticks of one file, from a keyframe on."""

    def __init__(self) -> None:
        self._columns: dict[tuple[int, int], Columns] = {}

    def apply(self, blocks: bytes) -> None:
        """Take in one frame.

        Raises:
            ValueError: Damaged data.
        """
        if not blocks:
            self._columns = {}
            return
        line, _, payload = blocks.partition(b"\n")
        at = 0
        seen: dict[tuple[int, int], Columns] = {}
        try:
            for slot, pool, *entries in json.loads(line):
                old = self._columns.get((slot, pool), (None, None, None))
                columns = []
                for before, entry in zip(old, entries, strict=True):
                    column, at = _decode_column(before, entry, payload, at)
                    columns.append(column)
                seen[slot, pool] = (columns[0], columns[1], columns[2])
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError(f"block columns that do not fit: {error}") from None
        self._columns = seen

    def fill(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot with its block columns."""
        if not self._columns:
            return snapshot
        engines = []
        for slot, engine in enumerate(snapshot.engines):
            pools = []
            for number, pool in enumerate(engine.pools):
                states, refs, tables = _full(self._columns.get((slot, number), (None,) * 3))
                pools.append(dataclasses.replace(pool, states=states, refs=refs, tables=tables))
            engines.append(dataclasses.replace(engine, pools=tuple(pools)))
        return dataclasses.replace(snapshot, engines=tuple(engines))


def _decode_column(
    old: bytes | None, entry: Sequence[int], payload: bytes, at: int
) -> tuple[bytes | None, int]:
    kind, *sizes = entry
    if any(not isinstance(size, int) or size < 0 for size in sizes):
        raise ValueError("a column of no size")
    parts: list[bytes] = []
    for size in sizes:
        parts.append(delta.inflate_raw(payload[at : at + size]))
        at += size
    if kind == 0:
        return None, at
    if kind == 1:
        return parts[0], at
    if old is None:
        raise ValueError("a delta without its keyframe")
    return (old if kind == 3 else delta.column_apply(old, parts[0], parts[1])), at


def _full(lean: Columns) -> Columns:
    states, refs, tables = lean
    if refs is not None and states is not None and len(states) == len(refs):
        refs = delta.xor(refs, states.translate(REFS_BY_STATE))
    if tables is not None and refs is not None and len(refs) == len(tables):
        tables = delta.xor(tables, refs)
    return states, refs, tables
