"""The private directory and its sockets."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import pytest

from kvtop.probe import rundir


def test_the_directory_is_made_private_whatever_the_umask(tmp_path):
    path = str(tmp_path / "new")
    before = os.umask(0)
    try:
        rundir.prepare(path)
        server, sock = rundir.listen(path, "engine")
    finally:
        os.umask(before)
    server.close()
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o700
    assert stat.S_IMODE(os.lstat(sock).st_mode) == 0o600
    assert os.path.basename(sock) == f"engine-{os.getpid()}.sock"


def test_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(rundir.RefusedError, match="not a directory"):
        rundir.prepare(str(tmp_path / "link"))


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rundir.RefusedError, match="not a directory"):
        rundir.prepare(str(tmp_path / "file"))


def test_a_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(rundir.RefusedError, match="belongs to user"):
        rundir.prepare(str(path))


def test_a_directory_that_others_can_enter_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(rundir.RefusedError, match="0700"):
        rundir.prepare(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


def test_no_parent_no_directory(tmp_path):
    with pytest.raises(rundir.RefusedError, match="cannot make"):
        rundir.prepare(str(tmp_path / "a" / "b"))


def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    path = tmp_path / ("x" * 120)
    path.mkdir(mode=0o700)
    with pytest.raises(rundir.RefusedError, match="cannot listen"):
        rundir.listen(str(path), "engine")


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_sockets_of_dead_processes_are_swept_and_others_stay(probe_dir):
    gone = os.path.join(probe_dir, f"engine-{dead_pid()}.sock")
    elsewhere = os.path.join(probe_dir, f"worker-{dead_pid()}.sock")
    alive = os.path.join(probe_dir, f"api-{os.getpid()}.sock")
    other = os.path.join(probe_dir, "notes.txt")
    with socket.socket(socket.AF_UNIX) as closed, socket.socket(socket.AF_UNIX) as listening:
        closed.bind(gone)
        # A pid that means nothing here, but somebody listens: another pid namespace.
        listening.bind(elsewhere)
        listening.listen(1)
        with socket.socket(socket.AF_UNIX) as mine:
            mine.bind(alive)
        open(other, "w").close()
        closed.close()
        rundir.sweep(probe_dir)
        assert sorted(os.listdir(probe_dir)) == sorted(
            os.path.basename(p) for p in (elsewhere, alive, other)
        )


def test_names_that_hold_no_pid_do_not_stop_the_sweep(probe_dir):
    for name in ("engine-9999999999.sock", "engine-\u0663.sock", f"api-{'9' * 200}.sock"):
        open(os.path.join(probe_dir, name), "w").close()
    rundir.sweep(str(probe_dir))


def test_a_zombie_counts_as_dead(probe_dir):
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        path = os.path.join(probe_dir, f"engine-{process.pid}.sock")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
        rundir.sweep(probe_dir)
        assert os.listdir(probe_dir) == []
    finally:
        process.wait()


def test_the_peer_must_be_the_same_user_or_root(monkeypatch):
    left, right = socket.socketpair()
    with left, right:
        assert rundir.admitted(left)
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        assert rundir.admitted(left) == (os.getuid() == 0)
    with socket.socket() as closed:
        assert not rundir.admitted(closed)


def test_a_stranger_is_shut_out(monkeypatch, probe_dir):
    from kvtop.probe.server import Server

    monkeypatch.setattr("kvtop.probe.server.admitted", lambda sock: False)
    listener, path = rundir.listen(probe_dir, "engine")
    server = Server(lambda connection, request: connection.answer(200, b"{}"))
    server.add_listener(listener)
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(path)
        server.poll(1.0)
        assert client.recv(10) == b""
        assert not server.connections
    server.close()


def test_the_default_directory(monkeypatch):
    monkeypatch.delenv("KVTOP_DIR", raising=False)
    assert rundir.default_directory() == f"/tmp/kvtop-{os.geteuid()}"
    monkeypatch.setenv("KVTOP_DIR", "/run/x")
    assert rundir.default_directory() == "/run/x"
