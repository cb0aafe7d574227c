"""Which servers are meant, and what is said of a directory that no probe will use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtop.config import Options
from kvtop.errors import NotFoundError, UsageError
from kvtop.stream.target import check_target, folder_notes, narrow
from tests.stream import make


def two() -> object:
    return make.found(
        make.server(make.found_engine(20), key="127.0.0.1:8000"),
        make.server(make.found_engine(40), key="127.0.0.1:8001"),
    )


def test_by_address() -> None:
    for text in ("127.0.0.1:8001", "http://localhost:8001/metrics", ":8001"):
        found = narrow(two(), text, None)
        assert [server.key for server in found.servers] == ["127.0.0.1:8001"]
        assert found.servers[0].engines


def test_by_any_process_of_a_server() -> None:
    for pid in (39, 40, 41):
        assert [s.key for s in narrow(two(), None, pid).servers] == ["127.0.0.1:8001"]
    assert narrow(two(), None, 99).servers == ()


def test_an_address_without_processes_is_kept() -> None:
    (server,) = narrow(two(), "10.1.2.3:8000", None).servers
    assert (server.key, server.engines) == ("10.1.2.3:8000", ())


def test_what_can_never_be_watched_is_refused() -> None:
    with pytest.raises(NotFoundError, match="no process 999999999"):
        check_target(Options(pid=999999999))
    with pytest.raises(UsageError):
        check_target(Options(url="ftp://x"))


def test_an_open_directory_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (note,) = folder_notes(str(tmp_path))
    assert "chmod 700" in note
    tmp_path.chmod(0o700)
    assert folder_notes(str(tmp_path)) == ()
    file = tmp_path / "file"
    file.touch()
    assert "not a directory" in folder_notes(str(file))[0]
    assert folder_notes(None) == folder_notes(str(tmp_path / "none")) == ()
