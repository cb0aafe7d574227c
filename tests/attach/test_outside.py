"""What any user may write on a command line must not break the look at the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvtop.attach.find as find_module
from kvtop.attach.find import Finder
from kvtop.attach.group import Draft
from kvtop.attach.outside import port_number, shown_host, whole
from kvtop.attach.procfs import Proc
from kvtop.attach.titles import classify, server_args
from kvtop.attach.where import address_of
from kvtop.sources.metrics import normalize_url

API = ["/v/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
LOOPBACK = "0100007F"
WORDS = st.one_of(
    st.sampled_from(
        [
            "python", "-m", "-c", "-um", "vllm", "serve", "VLLM::EngineCore", "VLLM::Worker_TP0",
            "vllm.entrypoints.openai.api_server", "--host", "--port", "--uds", "--root-path",
            "--ssl-keyfile", "--model", "--headless", "--host=::", "--port=80", "-W", "\u00b2",
            "9" * 5000, "/" + "u" * 5000, "[::1]", "VLLM::EngineCore_DP" + "9" * 5000,
        ]
    ),
    st.text(max_size=12),
    st.builds("{}={}".format, st.sampled_from(["--host", "--port", "--uds", "--root_path"]),
              st.text(max_size=12)),
)  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "\u00b2", "\u0663", "1_0", " 1", "+1", "-1", "1234", "9" * 5000, "1.0", "0x1"]
)
def test_what_is_no_whole_number(text: str) -> None:
    assert whole(text, 3) is None


def test_whole_numbers_and_ports() -> None:
    assert [whole(text, 3) for text in ("0", "007", "999")] == [0, 7, 999]
    assert [port_number(t) for t in ("1", "65535", "0", "65536", None)] == [1, 65535] + [None] * 3


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("box.example", "box.example"), ("10.0.0.1", "10.0.0.1"), ("::1", "[::1]"),
        ("a b", None), ("1:2:x", None), ("x]y[", None), ("", None), ("a..b", None),
        ("a/b", None), ("a@b", None), ("\u00e4", None), ("fe80::1%]/x", None), ("a\n", None),
    ],
)  # fmt: skip
def test_hosts(host: str, shown: str | None) -> None:
    assert shown_host(host) == shown


@given(st.lists(WORDS, max_size=8), st.booleans())
@example([*API, "--host", "1:2:x"], False)
@example([*API, "--host", "x]y["], False)
@example([*API, "--uds", "u" * 5000], True)
@settings(deadline=None)
def test_any_command_line_gives_an_address_that_can_be_asked_or_none(
    words: list[str], foreign: bool
) -> None:
    argv = tuple(words)
    classify(argv)
    address = address_of(Proc("/nowhere"), [7], server_args(argv), foreign_net=foreign)
    if address.url is None:
        return
    # The source would raise UsageError for one that it does not take.
    assert normalize_url(address.url).startswith("http")
    assert address.url.isascii()
    assert address.url.isprintable()


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--host", "a b"], "--host"),
        (["--host", "1:2:x"], "--host"),
        (["--host", "x]y["], "--host"),
        (["--root-path", "/a b"], "--root-path"),
        (["--root-path", "/\u00e4"], "--root-path"),
        (["--uds", "u" * 5000], "--uds"),
        (["--uds", "/" + "u" * 108], "--uds"),
    ],
)
def test_an_address_that_cannot_be_is_a_note_and_hides_nobody(
    fake_proc: Any, words: list[str], word: str
) -> None:
    fake_proc.add(10, [*API, *words])
    fake_proc.add(20, [*API, "--port", "8200"], listen=(LOOPBACK, 8200))
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    bad = found.server_of(10)
    assert bad is not None
    assert (bad.url, bad.uds) == (None, None)
    (note,) = found.notes
    assert word in note
    assert "pid 10" in note
    assert note.isprintable()
    assert len(note) < 200
    good = found.server_of(20)
    assert good is not None
    assert good.url == "http://127.0.0.1:8200"


@pytest.mark.parametrize("port", ["\u00b2", "9" * 5000, "0", "-1", "1_0"])
def test_a_port_that_is_none_is_as_if_not_given(fake_proc: Any, port: str) -> None:
    fake_proc.add(10, [*API, "--port", port])
    (server,) = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find().servers
    assert server.url == "http://127.0.0.1:8000"


def test_a_rank_of_absurd_length_is_not_known() -> None:
    title = classify(("VLLM::EngineCore_DP" + "9" * 5000,))
    assert title is not None
    assert title.rank is None


@pytest.mark.parametrize("where", ["classify", "server_args", "kvtop_dir_of", "address_of"])
def test_a_process_that_breaks_the_look_is_a_note(
    fake_proc: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    fake_proc.add(10, [*API, "--port", "8100"])
    fake_proc.add(20, [*API, "--port", "8200"])
    real = getattr(find_module, where)

    def breaks(*args: Any, **options: Any) -> Any:
        if any(value == 10 or value == [10] or "8100" in str(value) for value in args):
            raise RecursionError("deep\x1b")
        return real(*args, **options)

    monkeypatch.setattr(find_module, where, breaks)
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    assert [server.key for server in found.servers] == ["127.0.0.1:8200"]
    assert found.notes == ("process 10 cannot be made out and is passed over (RecursionError)",)


def test_a_draft_that_breaks_is_a_note(fake_proc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_proc.add(10, ["VLLM::EngineCore"], pgrp=9)
    fake_proc.add(20, ["VLLM::EngineCore"], pgrp=9)
    real = Draft.server

    def breaks(self: Draft, *args: Any) -> Any:
        if self.root.process.pid == 10:
            raise ValueError
        return real(self, *args)

    monkeypatch.setattr(Draft, "server", breaks)
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    assert [server.key for server in found.servers] == ["pid 20"]
    assert "process 10" in found.notes[0]


def test_odd_names_in_proc_are_no_pids(tmp_path: Path) -> None:
    for name in ("7", "\u00b2", "\u0663", "9" * 200):
        (tmp_path / name).mkdir()
    assert Proc(tmp_path).pids() == [7]


def test_a_process_without_arguments_is_no_note(fake_proc: Any) -> None:
    fake_proc.add(10, [])
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    assert (found.servers, found.notes) == ((), ())
