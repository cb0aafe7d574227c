"""The session file: one SQLite database that anyone can query.

What is in it is in `session.schema`; this module makes files, and opens them for reading.

The journal is SQLite's rollback journal, not its write-ahead log: at every moment between
two commits the file is whole by itself, so it can be copied, read from read-only media
and followed while it grows, and a reader never needs to write beside it. Each tick is one
transaction. A process killed inside a commit leaves a journal beside the file; a reader
then works on a private copy that SQLite rolls back, and leaves both as they are.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtop.errors import BadDataError, DeniedError, NotFoundError, StorageError, UsageError
from kvtop.session.schema import schema_sql

APPLICATION_ID = 0x6B767470
"""`kvtp`, at byte 68 of the file."""
FORMAT = 2
"""`user_version`, at byte 60 of the file. 2 added captured stacks; files of 1 are read."""
PAGE_BYTES = 8192
"""Rows are 0.3 to 2 kB: on larger pages each commit writes more, on smaller ones more
space is lost at the end of each."""
_DAMAGE = ("malformed", "not a database", "no such", "file is encrypted", "unsupported file format")
_MAGIC = b"SQLite format 3\0"


def create(path: Path) -> sqlite3.Connection:
    """A new, empty session file, for its owner only.

    Raises:
        UsageError: There is a file of that name: nothing is ever overwritten.
        StorageError: It cannot be made.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise UsageError(f"{path} is already there", "choose another name") from None
    except OSError as error:
        raise storage_error(path, error) from None
    db = sqlite3.connect(path, timeout=0.2, isolation_level=None, check_same_thread=False)
    try:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute("PRAGMA synchronous = NORMAL")
        # A page is never written before its commit, so a reader who keeps the file locked
        # delays commits and nothing else.
        db.execute("PRAGMA cache_spill = 0")
        db.execute("BEGIN")
        for statement in schema_sql():
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT}")
        db.execute("COMMIT")
    except sqlite3.Error as error:
        db.close()
        for made in (path, _journal(path)):
            with contextlib.suppress(OSError):
                made.unlink()
        raise StorageError(f"cannot write {path}: {error}") from None
    return db


def storage_error(path: Path, error: OSError) -> StorageError | NotFoundError | DeniedError:
    """The plain form of an operating-system error about `path`."""
    reason = (error.strerror or str(error)).lower()
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"{path}: no such file or directory")
    if isinstance(error, PermissionError):
        return DeniedError(f"{path}: {reason}")
    return StorageError(f"{path}: {reason}")


def check_header(path: Path) -> None:
    """Look at the first bytes, before SQLite sees the file.

    Raises:
        NotFoundError, DeniedError, StorageError: It cannot be opened.
        BadDataError: It is not a session file, or one of a newer kvtop.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadDataError(f"{path} is not a file")
        with path.open("rb") as file:
            head = file.read(100)
    except OSError as error:
        raise storage_error(path, error) from None
    foreign = BadDataError(
        f"{path} is not a kvtop session", "record one with: kvtop record -o FILE"
    )
    if not head:
        raise BadDataError(f"{path} is empty: nothing was recorded")
    if len(head) < 100 or not head.startswith(_MAGIC):
        raise foreign
    if int.from_bytes(head[68:72], "big") != APPLICATION_ID:
        # A file killed while it was made has no id yet.
        raise foreign
    version = int.from_bytes(head[60:64], "big")
    if version > FORMAT:
        raise BadDataError(
            f"{path} was written by a newer kvtop (format {version}, this one reads {FORMAT})",
            "upgrade kvtop",
        )


@contextlib.contextmanager
def damage(path: Path, where: str) -> Iterator[None]:
    """Turns what damaged data does to the code that reads it into one plain error.

    Args:
        path: The file.
        where: The place in it, for example `tick 7`.

    Raises:
        BadDataError: The data is damaged.
    """
    try:
        yield
    except BadDataError as error:
        what = error.what.removeprefix(f"{path} ")
        raise BadDataError(f"{path} is damaged at {where} ({what})", error.remedy) from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise BadDataError(f"{path} is damaged at {where} ({_one_line(str(error))})") from None
    except RecursionError:
        raise BadDataError(f"{path} is damaged at {where} (nested too deeply)") from None


class ReadOnly:
    """A connection that reads a session file and never writes to it or beside it.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        check_header(path)
        self._db = self._connect(path)
        try:
            self.rows("PRAGMA cache_size = -8000")
            self.rows("SELECT name FROM sqlite_master LIMIT 1")
        except BaseException:
            self.close()
            raise

    def _connect(self, path: Path) -> sqlite3.Connection:
        where = urllib.parse.quote(os.fsencode(os.path.abspath(path)))
        try:
            db = sqlite3.connect(
                f"file:{where}?mode=ro",
                uri=True,
                timeout=5.0,
                isolation_level=None,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise self._plain(error) from None
        db.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
        return db

    def rows(self, sql: str, parameters: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        """All rows of a query; no lock is kept.

        Raises:
            BadDataError: The file is damaged.
            StorageError: It cannot be read now.
        """
        return self._try(lambda: self._db.execute(sql, parameters).fetchall())

    def _try(self, query: Callable[[], list[tuple[object, ...]]]) -> list[tuple[object, ...]]:
        try:
            return query()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if self._copy is not None or not _needs_rollback(error, self.path):
                raise self._plain(error) from None
        self._use_copy()
        try:
            return query()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._plain(error) from None

    def _use_copy(self) -> None:
        """Its writer died inside a commit: let SQLite roll back a copy of both files."""
        self._db.close()
        self._copy = tempfile.TemporaryDirectory(prefix="kvtop-")
        copy = Path(self._copy.name) / "session.kvtop"
        try:
            shutil.copyfile(_journal(self.path), _journal(copy))
            shutil.copyfile(self.path, copy)
        except OSError as error:
            raise storage_error(self.path, error) from None
        try:
            db = sqlite3.connect(copy, isolation_level=None)
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            db.close()
        except sqlite3.Error as error:
            raise self._plain(error) from None
        self._db = self._connect(copy)

    def _plain(self, error: sqlite3.Error | UnicodeDecodeError) -> BadDataError | StorageError:
        # SQLite quotes the damaged part of a schema in its message, which is then no text.
        text = str(error) if isinstance(error, sqlite3.Error) else "the schema is no text"
        if isinstance(error, UnicodeDecodeError) or any(word in text for word in _DAMAGE):
            return BadDataError(f"{self.path} is damaged or cut short ({_one_line(text)})")
        return StorageError(f"cannot read {self.path}: {text}")

    def close(self) -> None:
        """Close it; may be called twice."""
        self._db.close()
        if self._copy is not None:
            self._copy.cleanup()


def _journal(path: Path) -> Path:
    return path.with_name(path.name + "-journal")


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[:200]


def _needs_rollback(error: Exception, path: Path) -> bool:
    text = str(error)
    if not ("readonly database" in text or "unable to open" in text):
        return False
    try:
        return _journal(path).stat().st_size > 0
    except OSError:
        return False


def spool_stdin(directory: str | None = None) -> Path:
    """Standard input as a temporary file, for commands that take `-`.

    Raises:
        StorageError: It cannot be stored.
        BadDataError: Nothing came.
    """
    handle, name = tempfile.mkstemp(prefix="kvtop-", suffix=".kvtop", dir=directory)
    path = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        if path.stat().st_size == 0:
            raise BadDataError("nothing came on standard input")
    except OSError as error:
        path.unlink()
        raise storage_error(path, error) from None
    except BaseException:
        path.unlink()
        raise
    return path
