"""What the commands that read session files share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kvtop.session.format import spool_stdin
from kvtop.session.reader import SessionReader


@contextlib.contextmanager
def opened(name: str) -> Iterator[SessionReader]:
    """A session file open for reading; `-` is standard input.

    Raises:
        NotFoundError, DeniedError: It cannot be opened.
        BadDataError: It is no session file, or a damaged one.
    """
    spooled = spool_stdin() if name == "-" else None
    try:
        with SessionReader(spooled or Path(name)) as reader:
            yield reader
    finally:
        if spooled is not None:
            spooled.unlink(missing_ok=True)
