"""Reads a session file: exact snapshots by tick or time, markers, the timeline.

It never writes to the file, and it may be read while it is still being written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtop.errors import BadDataError
from kvtop.model.capture import StackCapture
from kvtop.model.codec import check_schema
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Snapshot
from kvtop.session import beside
from kvtop.session.chosen import NOT_KEPT
from kvtop.session.format import ReadOnly, damage
from kvtop.session.frames import Function
from kvtop.session.schema import SLOT_BITS
from kvtop.session.unframe import BlockDecoder, StateDecoder

_NAMES_KEPT = 20_000
_BATCH = 64
_MOST_FRAMES = 100_000


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What a session file says of itself."""

    path: Path
    """The file."""
    host: str
    """Host that was watched."""
    version: str
    """kvtop version that wrote it."""
    demo: bool
    """True: a simulated engine."""
    anonymized: bool
    """True: names were replaced."""
    interval_s: float | None
    """Time meant between two ticks. None: not said."""
    closed_reason: str | None
    """Why it was closed. None: still being written, or its writer was killed."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A moment that somebody marked."""

    tick: int
    """Tick at that moment."""
    time_s: float
    """When."""
    note: str
    """Text from outside."""


class SessionReader:
    """One open session file.

    Args:
        path: The file.

    Raises:
        NotFoundError, DeniedError: It cannot be opened.
        BadDataError: Not a session, empty, damaged, or of a newer kvtop.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = ReadOnly(path)
        self._names: dict[int, str] = {}
        self._functions: dict[int, Function] = {}
        self._state = StateDecoder()
        self._state_at: int | None = None
        self._blocks = BlockDecoder()
        self._blocks_at: int | None = None
        self.first_tick = self.last_tick = 0
        try:
            self.info = self._read_info()
            self.refresh()
        except BaseException:
            self._file.close()
            raise
        if self.last_tick == 0:
            self._file.close()
            raise BadDataError(f"{path} holds no tick: nothing was recorded")

    def __enter__(self) -> SessionReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def sql(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Rows of a query on the file.

        Raises:
            BadDataError: The file is damaged.
            StorageError: It cannot be read now.
        """
        return self._file.rows(query, parameters)

    def _read_info(self) -> SessionInfo:
        meta = dict(self.sql("SELECT name, value FROM meta"))
        # A recording that ended before its first tick says only why.
        if meta.keys() - {"closed_reason"}:
            try:
                check_schema(meta.get("model_schema"))
            except BadDataError as error:
                raise BadDataError(f"{self.path}: {error.what}", error.remedy) from None
        interval = meta.get("interval_s")
        reason = meta.get("closed_reason")
        return SessionInfo(
            path=self.path,
            host=str(meta.get("host", "")),
            version=str(meta.get("kvtop_version", "")),
            demo=bool(meta.get("demo")),
            anonymized=bool(meta.get("anonymized")),
            interval_s=interval if isinstance(interval, float) else None,
            closed_reason=None if reason is None else str(reason),
        )

    def refresh(self) -> bool:
        """Look for ticks written since; True when there are any."""
        first, last = self.sql("SELECT min(tick), max(tick) FROM tick")[0]
        before = self.last_tick
        with damage(self.path, "its ticks"):
            self.first_tick, self.last_tick = int(first or 0), int(last or 0)
        return self.last_tick > before

    def closed(self) -> bool:
        """Whether its writer has finished with it."""
        if self.info.closed_reason is None:
            self.info = self._read_info()
        return self.info.closed_reason is not None

    @property
    def first_s(self) -> float:
        """Time of the first tick."""
        return self.time_of(self.first_tick)

    @property
    def last_s(self) -> float:
        """Time of the last tick."""
        return self.time_of(self.last_tick)

    def time_of(self, tick: int) -> float:
        """When a tick was taken, Unix seconds."""
        rows = self.sql("SELECT time_us FROM tick WHERE tick = ?", tick)
        if not rows:
            raise BadDataError(f"{self.path} has no tick {tick}")
        with damage(self.path, f"tick {tick}"):
            return float(rows[0][0]) / 1e6

    def clocks(self, first: int, last: int) -> list[tuple[int, float, float]]:
        """Tick, wall clock and monotonic clock in seconds, of a range of ticks."""
        rows = self.sql(
            "SELECT tick, time_us, mono_us FROM tick WHERE tick BETWEEN ? AND ? ORDER BY tick",
            first,
            last,
        )
        with damage(self.path, f"tick {first}"):
            return [(tick, time_us / 1e6, mono_us / 1e6) for tick, time_us, mono_us in rows]

    def tick_at(self, time_s: float) -> int:
        """The last tick at or before a moment; the first when it is earlier than all."""
        rows = self.sql(
            "SELECT tick FROM tick WHERE time_us <= ? ORDER BY time_us DESC, tick DESC LIMIT 1",
            round(min(max(time_s, -1e12), 1e12) * 1e6),
        )
        return int(rows[0][0]) if rows else self.first_tick

    def tick_at_percent(self, percent: float) -> int:
        """The tick at a share of the session's time, 0-100."""
        first, last = self.first_s, self.last_s
        return self.tick_at(first + (last - first) * min(max(percent, 0.0), 100.0) / 100)

    def snapshot_at(self, time_s: float) -> Snapshot:
        """What was true at a moment: the last snapshot at or before it."""
        return self.load(self.tick_at(time_s))

    def load(self, tick: int, columns: bool = True) -> Snapshot:
        """The snapshot of one tick.

        Args:
            tick: Its number, from `first_tick` to `last_tick`.
            columns: False: without block columns, which is quicker.

        Raises:
            BadDataError: No such tick, or a damaged one.
        """
        rows = self.sql("SELECT key_tick FROM tick WHERE tick = ?", tick)
        if not rows:
            raise BadDataError(f"{self.path} has no tick {tick}")
        with damage(self.path, f"tick {tick}"):
            key = int(rows[0][0])
            if not 0 < tick - key + 1 <= _MOST_FRAMES:
                raise ValueError(f"its keyframe is said to be {key}")
            self._seek_state(key, tick)
            snapshot = self._snapshot(tick)
            if columns:
                self._seek_blocks(key, tick)
                snapshot = self._blocks.fill(snapshot)
            return snapshot

    def snapshots(
        self, first: int | None = None, last: int | None = None, columns: bool = True
    ) -> Iterator[Snapshot]:
        """The snapshots of a range of ticks, both ends included; all by default.

        Raises:
            BadDataError: As for `load`.
        """
        tick = self.first_tick if first is None else max(first, self.first_tick)
        end = self.last_tick if last is None else min(last, self.last_tick)
        while tick <= end:
            yield self.load(tick, columns)
            tick += 1

    def _seek_state(self, key: int, tick: int) -> None:
        at = self._state_at
        if at is None or not key <= at <= tick:
            self._state = StateDecoder()
            at = key - 1
        self._state_at = None
        if at < tick:
            rows = self.sql(
                "SELECT state, requests FROM frame WHERE tick > ? AND tick <= ? ORDER BY tick",
                at,
                tick,
            )
            if len(rows) != tick - at:
                raise ValueError("a frame is missing")
            for state, requests in rows:
                self._state.apply(state, requests)
        self._state_at = tick

    def _seek_blocks(self, key: int, tick: int) -> None:
        at = self._blocks_at
        if at is None or not key <= at <= tick:
            self._blocks = BlockDecoder()
            at = key - 1
        self._blocks_at = None
        if at < tick:
            rows = self.sql(
                "SELECT t.tick, b.columns FROM tick t LEFT JOIN block_frame b USING (tick)"
                " WHERE t.tick > ? AND t.tick <= ? ORDER BY t.tick",
                at,
                tick,
            )
            for _, columns in rows:
                self._blocks.apply(columns or b"")
        self._blocks_at = tick

    def _snapshot(self, tick: int) -> Snapshot:
        low, high = tick << SLOT_BITS, (tick + 1) << SLOT_BITS
        gpus = self.sql("SELECT * FROM gpu_sample WHERE id >= ? AND id < ? ORDER BY id", low, high)
        engines = self.sql(
            "SELECT * FROM engine_sample WHERE id >= ? AND id < ? ORDER BY id", low, high
        )
        self._learn_names(self._state.names())
        self._learn_functions(self._state.functions())
        return self._state.snapshot(
            [row[1:] for row in gpus],
            [row[1:] for row in engines],
            self._name,
            self._function,
        )

    def _name(self, number: int) -> str:
        return self._names.get(number, f"request {number}")

    def _function(self, number: int) -> Function:
        return self._functions.get(number) or Function(number, "?", "?", None, "?")

    def _learn_names(self, wanted: set[int]) -> None:
        missing = sorted(wanted - self._names.keys())
        if not missing:
            return
        if len(self._names) > _NAMES_KEPT:
            self._names = {number: self._names[number] for number in wanted & self._names.keys()}
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            marks = ", ".join("?" * len(batch))
            self._names.update(
                self.sql(
                    f"SELECT request, id FROM request_name WHERE request IN ({marks})",  # noqa: S608
                    *batch,
                )
            )

    def _learn_functions(self, wanted: set[int]) -> None:
        if wanted <= self._functions.keys():
            return
        for row in self.sql("SELECT function, name, file, line, thread FROM function"):
            self._functions[row[0]] = Function(*row)

    def markers(self) -> list[Marker]:
        """All markers, in order."""
        rows = self.sql("SELECT tick, time_us, note FROM marker_note ORDER BY marker")
        with damage(self.path, "its markers"):
            return [Marker(int(tick), time_us / 1e6, str(note)) for tick, time_us, note in rows]

    def captures(self, last_tick: int | None = None) -> list[StackCapture]:
        """Captures of whole stacks in their order, without the stacks; `stacks_of` gives them.

        Args:
            last_tick: Only those that had ended by this tick. None: all.
        """
        if not self._has_captures():
            return []
        rows = self.sql(
            f"SELECT {beside.CAPTURE_COLUMNS} FROM flame_capture"  # noqa: S608
            " WHERE tick <= ? ORDER BY tick, capture",
            2**62 if last_tick is None else last_tick,
        )
        with damage(self.path, "its captures"):
            return [beside.capture_from(row) for row in rows]

    def stacks_of(self, capture: StackCapture) -> StackCapture:
        """A capture from `captures` with its stacks.

        Raises:
            BadDataError: They are damaged.
        """
        rows = self.sql(
            "SELECT folded FROM flame_capture WHERE tick = ? AND pid = ? AND time_us = ?",
            capture.tick,
            capture.pid,
            round(capture.time_s * 1e6),
        )
        with damage(self.path, f"the capture at tick {capture.tick}"):
            return beside.with_stacks(capture, rows[0][0])

    def _has_captures(self) -> bool:
        """A file of format 1 has no such table."""
        return bool(self.sql("SELECT 1 FROM sqlite_master WHERE name = 'flame_capture'"))

    def details(self, after: int, last: int) -> list[tuple[int | None, Detail]]:
        """Engine pid and block table of what was looked at after a tick, up to another."""
        rows = self.sql(
            "SELECT engine_pid, request_id, json FROM detail WHERE tick > ? AND tick <= ?"
            " ORDER BY rowid",
            after,
            last,
        )
        return [(pid, beside.read_detail(str(name), packed)) for pid, name, packed in rows]

    def detail(self, engine_pid: int | None, request_id: str, tick: int) -> Detail:
        """The newest block table of a request that was looked at by then.

        Returns:
            One with `error` when nobody had looked.
        """
        rows = self.sql(
            "SELECT json, tick FROM detail WHERE engine_pid IS ? AND request_id = ?"
            " AND tick <= ? ORDER BY tick DESC, rowid DESC LIMIT 1",
            engine_pid,
            request_id,
            tick,
        )
        if not rows:
            return Detail(request_id, error=NOT_KEPT)
        packed, at = rows[0]
        detail = beside.read_detail(request_id, packed)
        with damage(self.path, f"tick {at}"):
            return replace(detail, age_s=max(self.time_of(tick) - self.time_of(int(at)), 0.0))
