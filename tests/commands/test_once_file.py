"""The last snapshot of a dead engine: found beside the socket, read, shown; hostile files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "probe"))

from probe_fakes import Engine

from kvtop.attach.last import last_snapshot
from kvtop.commands import once
from kvtop.commands.once_file import load
from kvtop.errors import BadDataError, DeniedError, ExitCode, KvtopError, NotFoundError
from kvtop.probe import control


class Core(Engine):
    """An engine that can die."""

    def shutdown(self) -> None:
        """Called on the way out."""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What a probe has left."""
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    engine = Core(blocks=64)
    for _ in range(4):
        engine.add(12, 30)
    engine.step()
    control.install(engine, directory=str(folder))
    try:
        raise RuntimeError("a\x1b[31m prompt")
    except RuntimeError:
        engine.shutdown()
    finally:
        control.stop()
    (path,) = folder.glob("last-*.json")
    return path


def call(*words: str) -> int:
    parser = argparse.ArgumentParser()
    once.add_arguments(parser)
    return once.run(parser.parse_args(words))


def test_it_is_shown_as_text_and_json(left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--file", str(left)) == ExitCode.OK
    text = capsys.readouterr().out
    assert "GONE" in text
    assert "the engine core died of RuntimeError in left (" in text
    assert "total 64 x 4 tok" in text
    assert call("--file", str(left), "--json") == ExitCode.OK
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["engines"][0]["requests"]) == 4
    assert shown["engines"][0]["alive"] is False
    assert "prompt" not in text


def test_it_is_found_beside_its_socket(left: Path) -> None:
    socket = left.with_name(f"engine-{os.getpid()}.sock")
    assert last_snapshot(socket, 0) == left
    assert last_snapshot(socket, left.stat().st_mtime + 1) is None
    assert last_snapshot(left.with_name("engine-1.sock"), 0) is None
    assert last_snapshot(left.with_name("other"), 0) is None
    assert last_snapshot(None, 0) is None
    assert last_snapshot(Path("/proc/1/nothing/engine-1.sock"), 0) is None


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", BadDataError),
        (b"{}", BadDataError),
        (b"[" * 100_000, BadDataError),
        (b'{"schema":1}', BadDataError),
        (b"SQLite format 3\0" + bytes(100), BadDataError),
        (bytes(9 * 2**20), BadDataError),
        (None, NotFoundError),
    ],
)
def test_other_files_are_one_plain_line(
    tmp_path: Path, content: bytes | None, error: type[KvtopError]
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error) as seen:
        load(str(path))
    assert "\n" not in seen.value.line()


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(DeniedError):
        load(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadDataError, match="not a file"):
        load(str(tmp_path / "pipe"))


def test_a_cut_or_changed_file_never_ends_in_a_traceback(left: Path) -> None:
    body = left.read_bytes()
    for end in range(0, len(body), 97):
        left.write_bytes(body[:end])
        with pytest.raises(KvtopError):
            load(str(left))
    data = json.loads(body)
    for last in (7, [], {"exception": 3, "frames": 7}, {"frames": [1, "x\x1b"], "time_s": 1e999}):
        data["last"] = last
        left.write_text(json.dumps(data))
        try:
            snapshot = load(str(left))
        except BadDataError:
            continue
        assert snapshot.engines[0].probe_reason.startswith("the engine core died of")
