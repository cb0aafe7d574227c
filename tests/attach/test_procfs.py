from __future__ import annotations

import os

import pytest

from kvtop.attach.procfs import (
    Proc,
    map_uid,
    parse_cmdline,
    parse_environ,
    parse_local_addresses,
    parse_stat,
    parse_status,
    parse_tcp,
    process_facts,
)

STAT = b"42 (%s) S 7 40 7 0 -1 4194304 1 0 0 0 2 1 0 0 20 0 3 0 8800 1000 25 0"


def test_stat_of_a_name_with_brackets_and_spaces() -> None:
    stat = parse_stat(STAT % b"a) R (b")
    assert stat is not None
    assert (stat.pid, stat.comm, stat.state, stat.ppid, stat.pgrp) == (42, "a) R (b", "S", 7, 40)
    assert (stat.threads, stat.start_ticks) == (3, 8800)
    assert stat.rss_bytes == 25 * os.sysconf("SC_PAGE_SIZE")
    assert not stat.kernel


@pytest.mark.parametrize("text", [b"", b"42", b"42 (x) S 1", b"x (y) S " + b"1 " * 30, b"\xff\0"])
def test_stat_that_is_none(text: bytes) -> None:
    assert parse_stat(text) is None


def test_status_gives_the_effective_user_and_all_pids() -> None:
    identity = parse_status("Name:\tx\nPid:\t70\nUid:\t1\t2\t3\t4\nNSpid:\t70\t5\t1\n")
    assert identity is not None
    assert identity.uid == 2
    assert identity.ns_pids == (70, 5, 1)


def test_status_of_an_old_kernel_has_no_nspid() -> None:
    identity = parse_status("Pid:\t70\nUid:\t1\t2\t3\t4\n")
    assert identity is not None
    assert identity.ns_pids == (70,)
    assert parse_status("Name:\tx\n") is None


def test_cmdline_padding_is_dropped() -> None:
    assert parse_cmdline(b"VLLM::EngineCore\0\0\0\0") == ("VLLM::EngineCore",)
    assert parse_cmdline(b"python\0-m\0x y\0") == ("python", "-m", "x y")
    assert parse_cmdline(b"a\0\0b\0") == ("a", "", "b")
    assert parse_cmdline(b"") == ()


def test_environ_that_a_title_has_overwritten() -> None:
    assert parse_environ(b"\0\0\0\0TAIL=1\0X=a=b\0junk\0") == {"TAIL": "1", "X": "a=b"}


def test_listening_sockets_only() -> None:
    text = (
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:1FA4 00000000:0000 0A 0:0 00:0 0 1000 0 5411 1 0\n"
        "   1: 0100007F:1FA4 0100007F:9999 01 0:0 00:0 0 1000 0 5412 1 0\n"
        "   2: broken\n"
        "   3: ZZ:1FA4 00000000:0000 0A 0:0 00:0 0 1000 0 5413 1 0\n"
        "   4: 00000000000000000000000001000000:1F90 0:0 0A 0:0 00:0 0 0 0 7 1 0\n"
    )
    found = [(one.address, one.port, one.uid, one.inode) for one in parse_tcp(text)]
    assert found == [("127.0.0.1", 8100, 1000, "5411"), ("::1", 8080, 0, "7")]


def test_own_addresses_of_a_network_namespace() -> None:
    text = (
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n"
        "     |-- 172.17.0.2\n        /32 host LOCAL\n"
        "     |-- 127.0.0.1\n        /32 host LOCAL\n"
        "Local:\n     |-- 172.17.0.2\n        /32 host LOCAL\n     |-- 172.17.255.255\n"
        "        /32 link BROADCAST\n"
    )
    assert parse_local_addresses(text) == ["172.17.0.2"]


def test_user_ids_inside_a_user_namespace() -> None:
    assert map_uid("         0       1000          1\n", 1000) == 0
    assert map_uid("0 100000 65536", 101000) == 1000
    assert map_uid("0 100000 65536", 5) == 5
    assert map_uid("garbage", 5) == 5


def test_facts_of_this_process() -> None:
    facts = process_facts(os.getpid())
    assert facts is not None
    assert facts.state in "RS"
    assert facts.rss_bytes > 1 << 20
    assert process_facts(2**22 + 1) is None


def test_a_process_that_is_gone_raises_nowhere() -> None:
    proc = Proc()
    pid = 2**22 + 1
    assert proc.stat(pid) is None
    assert proc.identity(pid) is None
    assert proc.cmdline(pid) == ()
    assert proc.environ(pid) == {}
    assert proc.socket_inodes(pid) is None
    assert proc.listeners(pid) == []
    assert Proc("/nowhere").pids() == []
