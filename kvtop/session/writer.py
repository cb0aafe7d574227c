"""Writes one session file: a tick is one transaction."""

from __future__ import annotations

import contextlib
import os
import platform
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from kvtop.errors import StorageError
from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import SCHEMA, Gpu, Request, Snapshot
from kvtop.session import beside, cells
from kvtop.session import format as file_format
from kvtop.session.frames import Frame, FrameEncoder
from kvtop.session.lives import Lives
from kvtop.session.numbers import ENGINE_COLUMNS, GPU_COLUMNS, Row
from kvtop.session.schema import SLOT_BITS

KEY_EVERY = 90
"""Ticks from keyframe to keyframe."""
SAMPLE_EVERY = 300
"""Ticks between two rounds of rows of `request_sample`."""
_MOST_GAP_S = 300.0
_BY_TICK = (
    *("tick", "frame", "block_frame", "gpu_process", "stack_sample", "detail", "flame_capture"),
    *("request_event", "request_sample"),
)
"""Tables that a ring forgets by their tick."""


class DiskFullError(StorageError):
    """No space is left for the file."""


class SessionWriter:
    """One session file being written. Not thread-safe: one thread uses it at a time.

    Args:
        path: The new file.
        interval_s: How often a tick is meant to come, for the file's own description.
        anonymized: True: what comes was anonymized; said in the file.
        key_every: Ticks from keyframe to keyframe.

    Raises:
        UsageError: The file is already there.
        StorageError: It cannot be made.
    """

    def __init__(
        self,
        path: Path,
        interval_s: float | None = None,
        anonymized: bool = False,
        key_every: int = KEY_EVERY,
    ) -> None:
        self.path = path
        self.ticks = 0
        """Ticks written."""
        self.tick = 0
        """Number of the last tick."""
        self.waiting = 0
        """Ticks whose commit waits for a reader's lock."""
        self._interval_s = interval_s
        self._anonymized = anonymized
        self._key_every = key_every
        self._key_tick = 0
        self._last: Snapshot | None = None
        self._frames = FrameEncoder()
        self._lives = Lives()
        self._seen: dict[tuple[str, int], Row | tuple[Row, ...]] = {}
        self._sources: dict[str, Row] = {}
        self._db: sqlite3.Connection | None = file_format.create(path)
        self.size_bytes = path.stat().st_size
        """Size of the file at the last commit."""

    def write(self, snapshot: Snapshot) -> None:
        """Store the next tick.

        Raises:
            DiskFullError: No space; the ticks before are safe.
            StorageError: Another failure of the disk.
        """
        with self._plain_errors():
            db = self._begin()
            if self._last is None:
                self._describe(db, snapshot)
            self._write(db, snapshot)
            self.ticks += 1
            self._commit(db)

    def marker(self, time_s: float, note: str) -> None:
        """Store a marker at the last tick.

        Raises:
            StorageError: As for `write`.
        """
        with self._plain_errors():
            db = self._begin()
            beside.write_marker(db, self.tick, time_s, note)
            self._commit(db)

    def detail(self, engine_pid: int | None, detail: Detail) -> None:
        """Store the block table of a request at the last tick.

        Raises:
            StorageError: As for `write`.
        """
        with self._plain_errors():
            db = self._begin()
            beside.write_detail(db, self.tick, engine_pid, detail)
            self._commit(db)

    def capture(self, capture: StackCapture) -> None:
        """Store captured stacks at the last tick.

        Raises:
            StorageError: As for `write`.
        """
        with self._plain_errors():
            db = self._begin()
            beside.write_capture(db, self.tick, capture)
            self._commit(db)

    def trim(self, before_s: float) -> None:
        """Drop ticks before a moment, whole keyframe spans only, for the ring on disk.

        Raises:
            StorageError: As for `write`.
        """
        with self._plain_errors():
            db = self._connection()
            if db.in_transaction:
                return
            found = db.execute(
                "SELECT max(key_tick) FROM tick WHERE time_us <= ?", (cells.us(before_s),)
            ).fetchone()[0]
            if found is None:
                return
            db.execute("BEGIN IMMEDIATE")
            shift = found << SLOT_BITS
            for table in _BY_TICK:
                db.execute(f"DELETE FROM {table} WHERE tick < ?", (found,))  # noqa: S608
            for table in ("gpu_sample", "engine_sample"):
                db.execute(f"DELETE FROM {table} WHERE id < ?", (shift,))  # noqa: S608
            db.execute(
                "DELETE FROM request_name WHERE request IN"
                " (SELECT request FROM request_life WHERE last_tick < ?)",
                (found,),
            )
            db.execute("DELETE FROM request_life WHERE last_tick < ?", (found,))
            self._commit(db)

    def dump(self, path: Path, reason: str) -> None:
        """Write all of it out as a new, closed session file.

        Raises:
            UsageError: The file is already there.
            StorageError: It cannot be written.
        """
        with self._plain_errors():
            source = self._connection()
            if source.in_transaction:
                self._commit(source)
            target = file_format.create(path)
            try:
                source.backup(target)
                target.execute("PRAGMA journal_mode = DELETE")
                target.execute("BEGIN")
                target.executemany(_LIFE, cells.clean(self._lives.rest()))
                self._close_meta(target, reason)
                target.execute("COMMIT")
            finally:
                target.close()

    def close(self, reason: str = "stopped") -> None:
        """Finish the file; may be called twice. What fails here loses no committed tick."""
        db, self._db = self._db, None
        if db is None:
            return
        try:
            with contextlib.suppress(sqlite3.Error):
                if not db.in_transaction:
                    db.execute("BEGIN IMMEDIATE")
                db.executemany(_LIFE, cells.clean(self._lives.rest()))
                self._close_meta(db, reason)
                db.execute("PRAGMA busy_timeout = 2000")
                db.execute("COMMIT")
            if db.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
            # Leaves the file alone in its directory, without its journal.
            with contextlib.suppress(sqlite3.Error):
                db.execute("PRAGMA journal_mode = DELETE").fetchall()
        finally:
            db.close()
        with contextlib.suppress(OSError):
            self.size_bytes = self.path.stat().st_size

    def abandon(self, reason: str) -> None:
        """Give up after an error: roll back what is open and close what is there."""
        if self._db is not None and self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
        self.close(reason)

    def _begin(self) -> sqlite3.Connection:
        """The database inside a transaction; one that waits for a reader goes on."""
        db = self._connection()
        if not db.in_transaction:
            db.execute("BEGIN IMMEDIATE")
        return db

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StorageError(f"{self.path} is closed")
        return self._db

    @contextlib.contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = str(error)
            if "full" in text or _no_space(self.path):
                raise DiskFullError(f"no space is left for {self.path}") from None
            raise StorageError(f"cannot write {self.path}: {text}") from None

    def _commit(self, db: sqlite3.Connection) -> None:
        try:
            db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
            # A reader keeps the file locked: the transaction stays open and grows.
            self.waiting += 1
            return
        self.waiting = 0
        self.size_bytes = self.path.stat().st_size

    def _describe(self, db: sqlite3.Connection, first: Snapshot) -> None:
        facts = {
            "kvtop_version": first.version,
            "model_schema": SCHEMA,
            "host": first.host,
            "demo": int(first.demo),
            "created_us": cells.us(first.time_s),
            "interval_s": self._interval_s,
            "anonymized": int(self._anonymized),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "system": f"{platform.system()} {platform.machine()}",
        }
        db.executemany(
            "INSERT INTO meta VALUES (?, ?)",
            [(name, cells.sql(value)) for name, value in facts.items()],
        )

    def _close_meta(self, db: sqlite3.Connection, reason: str) -> None:
        last = self._last
        rows = [("closed_reason", cells.text(reason))]
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
        if last is not None:
            db.execute(
                "INSERT OR REPLACE INTO meta VALUES ('closed_us', ?)", (cells.us(last.time_s),)
            )

    def _write(self, db: sqlite3.Connection, snapshot: Snapshot) -> None:
        tick = self.tick + 1
        key = self._last is None or tick - self._key_tick >= self._key_every
        frame = self._frames.encode(snapshot, key)
        self.tick = tick
        if key:
            self._key_tick = tick
        db.execute(
            "INSERT INTO tick VALUES (?, ?, ?, ?)",
            (tick, cells.us(snapshot.time_s), cells.us(snapshot.mono_s), self._key_tick),
        )
        db.execute("INSERT INTO frame VALUES (?, ?, ?)", (tick, frame.state, frame.requests))
        if frame.blocks:
            db.execute("INSERT INTO block_frame VALUES (?, ?)", (tick, frame.blocks))
        self._write_samples(db, tick, frame)
        for slot, gpu in enumerate(snapshot.gpus):
            self._change(db, "gpu_change", tick, slot, cells.gpu_row(gpu))
            self._processes(db, tick, slot, gpu, key)
        for slot, engine in enumerate(snapshot.engines):
            self._change(db, "engine_change", tick, slot, cells.engine_row(engine))
        self._write_requests(db, tick, snapshot, frame)
        self._write_sources(db, tick, snapshot)
        db.executemany(
            "INSERT INTO function VALUES (?, ?, ?, ?, ?)",
            [
                (
                    new.id,
                    cells.text(new.function),
                    cells.text(new.file),
                    cells.sql(new.line),
                    cells.text(new.thread),
                )
                for new in frame.functions
            ],
        )
        if key:
            self._write_stacks(db, tick, snapshot)
        self._last = snapshot

    def _write_samples(self, db: sqlite3.Connection, tick: int, frame: Frame) -> None:
        base = tick << SLOT_BITS
        for table, columns, rows in (
            ("gpu_sample", GPU_COLUMNS, frame.gpus),
            ("engine_sample", ENGINE_COLUMNS, frame.engines),
        ):
            marks = ", ".join("?" * (len(columns) + 1))
            db.executemany(
                f"INSERT INTO {table} VALUES ({marks})",  # noqa: S608
                [(base + slot, *row) for slot, row in enumerate(rows)],
            )

    def _change(self, db: sqlite3.Connection, table: str, tick: int, slot: int, row: Row) -> None:
        if self._seen.get((table, slot)) != row:
            self._seen[table, slot] = row
            marks = ", ".join("?" * (len(row) + 2))
            db.execute(f"INSERT INTO {table} VALUES ({marks})", (tick, slot, *row))  # noqa: S608

    def _processes(self, db: sqlite3.Connection, tick: int, slot: int, gpu: Gpu, key: bool) -> None:
        who: tuple[Row, ...] = tuple((one.pid, one.engine_pid) for one in gpu.processes or ())
        if key or self._seen.get(("gpu_process", slot), ()) != who:
            self._seen["gpu_process", slot] = who
            db.executemany(
                "INSERT INTO gpu_process VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (
                        tick,
                        slot,
                        one.pid,
                        cells.sql(one.command),
                        cells.sql(one.mem_bytes),
                        one.engine_pid,
                    )
                    for one in gpu.processes or ()
                ],
            )

    def _write_requests(
        self, db: sqlite3.Connection, tick: int, snapshot: Snapshot, frame: Frame
    ) -> None:
        db.executemany(
            "INSERT INTO request_name VALUES (?, ?, ?, ?)",
            [(name.key, name.engine, tick, cells.text(name.id)) for name in frame.names],
        )
        names: list[int] = []
        requests: list[Request] = []
        for engine, live in zip(snapshot.engines, frame.live, strict=True):
            names += live or ()
            requests += engine.requests or ()
        # Over a longer gap nobody knows what was held.
        elapsed = 0.0 if self._last is None else snapshot.mono_s - self._last.mono_s
        elapsed = elapsed if 0 < elapsed < _MOST_GAP_S else 0.0
        changes = self._lives.step(tick, elapsed, names, requests, sample=tick % SAMPLE_EVERY == 1)
        db.executemany(_LIFE, cells.clean(changes.ended))
        db.executemany(
            "INSERT INTO request_event VALUES (?, ?, ?, ?, ?, ?)", cells.clean(changes.events)
        )
        db.executemany(
            "INSERT INTO request_sample VALUES (?, ?, ?, ?, ?, ?)", cells.clean(changes.samples)
        )

    def _write_sources(self, db: sqlite3.Connection, tick: int, snapshot: Snapshot) -> None:
        now: dict[str, Row] = {}
        for source in snapshot.sources:
            row = (source.kind, source.state.value, source.since_s, source.reason, source.remedy)
            now[source.name] = row
            if self._sources.get(source.name) != row:
                values = [cells.sql(value) for value in (source.name, *row)]
                db.execute(
                    "INSERT INTO source_change VALUES (?, ?, ?, ?, ?, ?, ?)", (tick, *values)
                )
        self._sources = now

    def _write_stacks(self, db: sqlite3.Connection, tick: int, snapshot: Snapshot) -> None:
        for stacks in snapshot.stacks:
            db.executemany(
                "INSERT INTO stack_sample VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        tick,
                        stacks.pid,
                        cells.sql(stacks.role),
                        stacks.samples,
                        self._frames.function_id(frame),
                        frame.self_percent,
                        frame.total_percent,
                    )
                    for frame in stacks.frames
                ],
            )


_LIFE = f"INSERT OR REPLACE INTO request_life VALUES ({', '.join('?' * 14)})"  # noqa: S608


def _no_space(path: Path) -> bool:
    """Whether the file system of `path` has no room for another page."""
    try:
        room = os.statvfs(path.parent)
    except OSError:
        return False
    return room.f_bavail * room.f_frsize < 2 * file_format.PAGE_BYTES
