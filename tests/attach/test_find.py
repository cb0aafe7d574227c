from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtop.attach.find import Finder, Found, find_servers

API = ["/opt/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
LOOPBACK = "0100007F"
SPAWN = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()"]


def look(proc: Any) -> Found:
    return Finder(proc.root, tmp_dir=proc.tmp).find()


def shape(found: Found) -> list[tuple[str, int, list[tuple[int | None, int]]]]:
    """Key, number of API servers, and (rank, number of workers) of each engine."""
    return [
        (s.key, len(s.apis), [(e.rank, len(e.workers)) for e in s.engines]) for s in found.servers
    ]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("one.json", [("127.0.0.1:8100", 1, [(0, 1)])]),
        ("tp2.json", [("127.0.0.1:8102", 1, [(0, 2)])]),
        ("dp2.json", [("127.0.0.1:8102", 1, [(0, 1), (1, 1)])]),
        ("api2.json", [("127.0.0.1:8102", 2, [(0, 1)])]),
    ],
)
def test_trees_recorded_from_vllm_0_32(fake_proc: Any, tree: str, expected: list[object]) -> None:
    fake_proc.load(tree)
    found = look(fake_proc)
    assert shape(found) == expected
    server = found.servers[0]
    assert server.url == f"http://{server.key}"
    assert server.listening
    assert server.model == "tiny"
    assert server.python == "/opt/venv/bin/python"
    assert not any((server.orphan, server.offline, server.container, server.demo))
    assert found.notes == ()
    assert found.stray_pids == ()


def test_every_member_is_found_by_its_pid(fake_proc: Any) -> None:
    fake_proc.load("dp2.json")
    found = look(fake_proc)
    server = found.servers[0]
    for engine in server.engines:
        assert found.role_of(engine.pid) == "engine"
        assert engine.api_pids == server.api_pids
        for pid in engine.worker_pids:
            assert found.role_of(pid) == "worker"
            assert found.server_of(pid) is server
    assert found.role_of(server.api_pids[0]) == "api"
    assert found.server_of(1) is None


def test_two_servers_at_once(fake_proc: Any) -> None:
    fake_proc.load("one.json")
    fake_proc.load("tp2.json")
    assert [server.key for server in look(fake_proc).servers] == [
        "127.0.0.1:8100",
        "127.0.0.1:8102",
    ]


def test_an_engine_whose_api_server_died_is_a_server_of_its_own(fake_proc: Any) -> None:
    fake_proc.add(20, ["VLLM::EngineCore"], ppid=1, pgrp=10)
    fake_proc.add(21, ["VLLM::Worker"], ppid=20, pgrp=10)
    server = look(fake_proc).servers[0]
    assert (server.key, server.url, server.orphan) == ("pid 20", None, True)
    assert server.launcher_pid is None
    assert server.engines[0].worker_pids == (21,)


def test_an_engine_adopted_by_a_python_init_is_an_orphan_too(fake_proc: Any) -> None:
    fake_proc.add(1, ["python", "init.py"], ppid=0)
    fake_proc.add(20, ["VLLM::EngineCore"], ppid=1, pgrp=10)
    assert look(fake_proc).servers[0].orphan


def test_a_worker_without_an_engine_is_named(fake_proc: Any) -> None:
    fake_proc.add(21, ["VLLM::Worker_TP0"], ppid=1, pgrp=10)
    found = look(fake_proc)
    assert found.servers == ()
    assert found.stray_pids == (21,)
    assert "21" in found.notes[0]


def test_offline_llm_with_the_engine_in_a_child(fake_proc: Any) -> None:
    fake_proc.add(10, ["python", "batch.py"], pgrp=10)
    fake_proc.add(20, ["VLLM::EngineCore"], ppid=10, pgrp=10)
    server = look(fake_proc).servers[0]
    assert (server.key, server.url, server.offline, server.orphan) == ("pid 10", None, True, False)
    assert server.api_pids == ()
    assert server.engines[0].rank == 0


def test_offline_llm_with_the_engine_in_the_script(fake_proc: Any) -> None:
    fake_proc.add(10, ["python", "batch.py"], pgrp=10)
    fake_proc.add(20, ["VLLM::Worker_TP0"], ppid=10, pgrp=10)
    fake_proc.add(21, ["VLLM::Worker_TP1"], ppid=10, pgrp=10)
    server = look(fake_proc).servers[0]
    assert server.engines[0].pid == 10
    assert server.engines[0].worker_pids == (20, 21)


def test_a_probe_socket_alone_shows_an_engine(fake_proc: Any, bind: Callable[[Path], Path]) -> None:
    fake_proc.add(10, ["python", "batch.py"], uid=os.getuid())
    assert look(fake_proc).servers == ()
    path = bind(fake_proc.tmp / "kvtop-1" / "engine-10.sock")
    server = look(fake_proc).servers[0]
    assert server.engines[0].probe_socket == path
    assert server.offline


def test_a_socket_of_another_user_is_not_taken_for_the_process_own(
    fake_proc: Any, bind: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvtop.attach.find as find_module
    from kvtop.attach.paths import SocketFile

    fake_proc.add(10, ["VLLM::EngineCore"], uid=1000)
    (fake_proc.tmp / "kvtop-7").mkdir()
    forged = SocketFile(fake_proc.tmp / "kvtop-7/engine-10.sock", "engine", 10, 7)
    monkeypatch.setattr(find_module, "list_sockets", lambda folder: [forged])
    assert look(fake_proc).servers[0].engines[0].probe_socket is None


def test_a_directory_that_others_can_write_to_is_passed_over(
    fake_proc: Any, bind: Callable[[Path], Path]
) -> None:
    fake_proc.add(10, ["VLLM::EngineCore"], uid=os.getuid())
    path = bind(fake_proc.tmp / "kvtop-1" / "engine-10.sock")
    path.parent.chmod(0o777)
    assert look(fake_proc).servers[0].engines[0].probe_socket is None


def test_only_servers_with_a_probe_in_the_directory_asked_for(
    fake_proc: Any, bind: Callable[[Path], Path], tmp_path: Path
) -> None:
    fake_proc.add(10, ["VLLM::EngineCore"], uid=os.getuid(), pgrp=9)
    fake_proc.add(11, ["VLLM::EngineCore"], uid=os.getuid(), pgrp=9)
    bind(tmp_path / "only" / "engine-11.sock")
    found = Finder(fake_proc.root, tmp_path / "only", fake_proc.tmp).find()
    assert [server.key for server in found.servers] == ["pid 11"]


def test_a_container_is_seen_through_its_root(
    fake_proc: Any, bind: Callable[[Path], Path], tmp_path: Path
) -> None:
    inside = tmp_path / "c"
    folder = fake_proc.add(
        500, ["VLLM::EngineCore"], uid=os.getuid(), ns_pids=(500, 7), mnt="mnt:[2]"
    )
    (folder / "root").symlink_to(inside)
    (folder / "uid_map").write_text(f"0 {os.getuid()} 1\n")
    bind(inside / "tmp/kvtop-0/engine-7.sock")
    server = look(fake_proc).servers[0]
    engine = server.engines[0]
    assert server.container
    assert (engine.pid, engine.ns_pid) == (500, 7)
    assert engine.probe_socket == folder / "root/tmp/kvtop-0/engine-7.sock"


def test_kvtop_dir_of_the_launcher_serves_an_engine_that_lost_its_environment(
    fake_proc: Any, bind: Callable[[Path], Path], tmp_path: Path
) -> None:
    uid = os.getuid()
    run = tmp_path / "r"
    fake_proc.add(10, API, uid=uid, environ=b"A=1\0KVTOP_DIR=" + bytes(run) + b"\0")
    fake_proc.add(20, ["VLLM::EngineCore"], ppid=10, uid=uid, environ=b"\0\0\0\0TAIL=1\0")
    path = bind(run / "engine-20.sock")
    assert look(fake_proc).servers[0].engines[0].probe_socket == path


def test_the_port_is_the_one_that_is_open(fake_proc: Any) -> None:
    fake_proc.add(10, [*API, "--root-path", "/v"], listen=("00000000", 8123))
    server = look(fake_proc).servers[0]
    assert (server.key, server.url) == ("127.0.0.1:8123", "http://127.0.0.1:8123/v")


def test_before_it_listens_the_command_line_tells_the_port(fake_proc: Any) -> None:
    fake_proc.add(10, [*API, "--port", "9001", "--host", "0.0.0.0"])
    server = look(fake_proc).servers[0]
    assert (server.key, server.listening, server.engines) == ("127.0.0.1:9001", False, ())
    fake_proc.add(11, [*API, "--host", "::"])
    assert "[::1]:8000" in [server.key for server in look(fake_proc).servers]


def test_open_files_that_cannot_be_read_are_told(fake_proc: Any) -> None:
    folder = fake_proc.add(10, [*API, "--port", "9001"], listen=(LOOPBACK, 9001))
    for file in (folder / "fd").iterdir():
        file.unlink()
    (folder / "fd").rmdir()
    found = look(fake_proc)
    assert found.servers[0].url == "http://127.0.0.1:9001"
    assert found.servers[0].listening
    assert "pid 10" in found.notes[0]


def test_another_network_namespace(fake_proc: Any) -> None:
    folder = fake_proc.add(10, API, listen=("00000000", 8000), net="net:[2]", mnt="mnt:[2]")
    (folder / "net/fib_trie").write_text("|-- 172.17.0.2\n /32 host LOCAL\n")
    assert look(fake_proc).servers[0].url == "http://172.17.0.2:8000"
    fake_proc.add(11, API, listen=(LOOPBACK, 8000), net="net:[3]", mnt="mnt:[3]")
    found = look(fake_proc)
    hidden = next(server for server in found.servers if server.key == "pid 11")
    assert hidden.url is None
    assert "--url" in found.notes[0]


def test_a_vllm_without_titles_shows_engines_once_it_listens(fake_proc: Any) -> None:
    fake_proc.add(10, API)
    fake_proc.add(20, SPAWN, ppid=10)
    fake_proc.add(30, SPAWN, ppid=20)
    assert look(fake_proc).servers[0].engines == ()
    fake_proc.remove(10)
    fake_proc.add(10, API, listen=(LOOPBACK, 8000))
    engine = look(fake_proc).servers[0].engines[0]
    assert (engine.pid, engine.worker_pids) == (20, (30,))


def test_a_forked_engine_without_a_title(fake_proc: Any) -> None:
    fake_proc.add(10, API, listen=(LOOPBACK, 8000))
    fake_proc.add(20, API, ppid=10)
    assert shape(look(fake_proc)) == [("127.0.0.1:8000", 1, [(0, 0)])]


def test_a_supervisor_with_one_server_a_rank(fake_proc: Any) -> None:
    fake_proc.add(10, ["python", "/v/bin/vllm", "serve", "m"])
    for rank in (0, 1):
        front = 20 + rank
        fake_proc.add(front, [f"VLLM::APIServer_DP{rank}"], ppid=10, listen=(LOOPBACK, 8000 + rank))
        fake_proc.add(30 + rank, [f"VLLM::EngineCore_DP{rank}"], ppid=front)
    found = look(fake_proc)
    assert shape(found) == [("127.0.0.1:8000", 1, [(0, 0)]), ("127.0.0.1:8001", 1, [(1, 0)])]
    assert {server.model for server in found.servers} == {"m"}


def test_headless_node(fake_proc: Any) -> None:
    fake_proc.add(10, ["python", "/v/bin/vllm", "serve", "m", "--headless"])
    fake_proc.add(20, ["VLLM::EngineCore_DP4"], ppid=10)
    server = look(fake_proc).servers[0]
    assert (server.key, server.url, server.apis) == ("pid 10", None, ())
    assert server.engines[0].rank == 4


def test_the_demo(fake_proc: Any) -> None:
    fake_proc.add(10, ["python", "-m", "kvtop", "demo", "--serve"], listen=(LOOPBACK, 43210))
    server = look(fake_proc).servers[0]
    assert (server.demo, server.url) == (True, "http://127.0.0.1:43210")
    assert server.engines[0].pid == 10


def test_the_dead_and_the_kernel_are_passed_over(fake_proc: Any) -> None:
    fake_proc.add(10, ["VLLM::EngineCore"], state="Z")
    folder = fake_proc.add(11, [])
    (folder / "stat").write_text("11 (x) S 2 0 0 0 -1 2097152 " + "0 " * 20)
    (fake_proc.root / "12").mkdir()
    assert look(fake_proc).servers == ()


def test_a_recycled_pid_is_looked_at_anew(fake_proc: Any) -> None:
    finder = Finder(fake_proc.root, tmp_dir=fake_proc.tmp)
    fake_proc.add(10, ["VLLM::EngineCore"], comm="VLLM::EngineCor", start=1, pgrp=9)
    before = finder.find().servers[0].engines[0]
    fake_proc.remove(10)
    fake_proc.add(10, ["bash"], comm="bash", start=2)
    assert finder.find().servers == ()
    fake_proc.remove(10)
    fake_proc.add(10, ["VLLM::EngineCore"], comm="VLLM::EngineCor", start=3, uid=5, pgrp=9)
    after = finder.find().servers[0].engines[0]
    assert (before.start_ticks, after.start_ticks) == (1, 3)
    assert (before.uid, after.uid) == (1000, 5)


def test_an_exec_and_a_new_title_are_noticed(fake_proc: Any) -> None:
    finder = Finder(fake_proc.root, tmp_dir=fake_proc.tmp)
    folder = fake_proc.add(10, ["python", "launcher.py"])
    assert finder.find().servers == ()
    (folder / "cmdline").write_bytes("\0".join(API).encode() + b"\0")
    assert finder.find().servers[0].api_pids == (10,)
    child = fake_proc.add(20, SPAWN, ppid=10)
    assert finder.find().servers[0].engines == ()
    (child / "cmdline").write_bytes(b"VLLM::EngineCore\0\0\0")
    assert finder.find().servers[0].engines[0].pid == 20


def test_no_proc_at_all(tmp_path: Path) -> None:
    found = find_servers(tmp_path / "none")
    assert found.servers == ()
    assert "cannot be listed" in found.notes[0]
    assert found.looked_for


def test_this_machine_raises_nowhere() -> None:
    assert find_servers().looked_for == find_servers().looked_for
