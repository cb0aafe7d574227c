"""Small parts of attaching: symbols, threads that may be borrowed, the payload, the choice."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtop.attach import elf, payload
from kvtop.attach.ability import AttachError
from kvtop.attach.borrow import choose_threads, may_borrow, parse_syscall
from kvtop.attach.find import Finder
from kvtop.attach.hello import ask, parse_hello
from kvtop.attach.helper import run_helper
from kvtop.attach.procfs import Proc
from kvtop.attach.select import members, parse_pid, select
from kvtop.attach.stub import C_FUNCTIONS, PYTHON_FUNCTIONS, x86_64
from kvtop.errors import NotFoundError, UsageError


def test_addresses_are_those_that_the_loader_gives() -> None:
    found = elf.functions_of(Proc(), os.getpid(), PYTHON_FUNCTIONS, C_FUNCTIONS)
    libc = ctypes.CDLL(None)
    for name in ("mmap", "munmap", "pthread_create", "pthread_self"):
        assert found[name] == ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
    ensure = ctypes.cast(ctypes.pythonapi.PyGILState_Ensure, ctypes.c_void_p).value
    assert found["PyGILState_Ensure"] == ensure


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(AttachError, match="no function no_such_name"):
        elf.functions_of(Proc(), os.getpid(), ["no_such_name"])


def test_a_process_that_is_not_python() -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        with pytest.raises(AttachError, match="not CPython"):
            elf.functions_of(Proc(), child.pid, PYTHON_FUNCTIONS)
        assert elf.python_version(Proc(), child.pid) is None
        child.kill()


def test_a_process_that_is_gone() -> None:
    with pytest.raises(AttachError, match="is gone"):
        elf.functions_of(Proc(), 2**22 + 1, PYTHON_FUNCTIONS)


def test_version_from_the_mapped_files() -> None:
    assert elf.python_version(Proc(), os.getpid()) == sys.version_info[:2]


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"MZ" + b"\0" * 200, b"\x7fELF\x02\x01" + b"\xff" * 300]
)
def test_images_that_are_none(data: bytes) -> None:
    def read(address: int, length: int) -> bytes:
        part = data[address : address + length]
        if len(part) != length:
            raise OSError("short")
        return part

    with pytest.raises(elf.ElfError):
        elf.Symbols(read, 0)


def test_maps_with_odd_names() -> None:
    text = (
        "00400000-00500000 r--p 00000000 fe:00 12 /usr/bin/python3.11\n"
        "00500000-00600000 r-xp 00100000 fe:00 12 /usr/bin/python3.11\n"
        "7f00000000-7f00001000 r--p 00000000 fe:00 13 /opt/a b/libc.so.6 (deleted)\n"
        "7f10000000-7f10001000 rw-p 00000000 00:00 0 [heap]\n"
        "7f20000000-7f20001000 rw-p 00000000 00:00 0 \n"
    )
    found = elf.parse_maps(text)
    assert [(image.base, image.name) for image in found] == [
        (0x400000, "python3.11"),
        (0x7F00000000, "libc.so.6"),
    ]


def test_the_hash_of_gnu_hash() -> None:
    # From the format's own description: printf -> 0x156b2bb8.
    assert elf.gnu_hash("printf") == 0x156B2BB8
    assert elf.gnu_hash("") == 5381


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("232 0x10 0x7f 0x100 0x0 0x0 0x0 0x7f 0x7f\n", (232, 0x7F)),
        ("running\n", None),
        ("-1 0x7ffc 0x7f3b\n", None),
        ("", None),
        ("1 zz\n", None),
    ],
)
def test_system_call_lines(text: str, call: tuple[int, int] | None) -> None:
    assert parse_syscall(text) == call


def test_which_threads_may_be_borrowed() -> None:
    condition, mutex = (202, 0x189), (202, 0x80)
    assert may_borrow(condition, "x86_64")
    assert not may_borrow(mutex, "x86_64")
    assert not may_borrow(None, "x86_64")
    assert not may_borrow((0, 0), "x86_64")  # read: may be a signal handler's or anybody's
    assert not may_borrow((9, 0), "x86_64")  # mmap: may be malloc's
    assert not may_borrow(condition, "riscv64")
    assert may_borrow((98, 0x189), "aarch64")
    calls = {1: condition, 2: (7, 0), 3: mutex, 4: (232, 0), 5: None}
    assert choose_threads(calls, "x86_64") == [4, 2, 1]


def test_the_stub_holds_every_address_once() -> None:
    names = (*PYTHON_FUNCTIONS, *C_FUNCTIONS)
    functions = {name: 0x1111_0000_0000_0000 + at for at, name in enumerate(names)}
    code = x86_64(functions, 0x2222_0000_0000_0000, 0x3333_0000_0000_0000, 0x5000)
    used = {"pthread_self", "pthread_detach", "PyGILState_Ensure", "PyRun_SimpleString"}
    used |= {"PyGILState_Release", "munmap"}
    for name, address in functions.items():
        assert code.count(address.to_bytes(8, "little")) == (name in used)
    assert code.endswith(b"\xff\xe0")
    assert len(code) < 4096


def test_the_payload_carries_the_whole_probe() -> None:
    sources = payload.probe_sources()
    folder = Path(payload.__file__).parent.parent / "probe"
    assert {f"{path.stem}.py" for path in folder.glob("*.py")} == {
        "__init__.py" if package else f"{name.rpartition('.')[2]}.py"
        for name, (package, _) in sources.items()
        if name != "kvtop"
    }
    assert payload.digest_of(sources) == payload.digest_of(payload.probe_sources())


def run_payload(tmp_path: Path, before: str, after: str, *, code: str | None = None) -> str:
    """Output of a Python that imports no kvtop and runs the payload between two pieces of code."""
    text = code if code is not None else payload.attach_code(any_process=True)
    script = tmp_path / "run.py"
    script.write_text(f"{before}\nexec({text!r})\n{after}\n")
    folder = tmp_path / "k"
    folder.mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-I", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"KVTOP_DIR": str(folder), "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert done.stderr == ""
    return done.stdout


# Until the probe runs, or the code has ended without one.
WAIT = """
import sys, threading, time
for _ in range(1000):
    module = sys.modules.get("kvtop.probe.control")
    if module is not None and getattr(module, "current", lambda: None)() is not None:
        break
    if "kvtop-attach" not in [t.name for t in threading.enumerate()]:
        break
    time.sleep(0.01)
"""


def test_the_payload_needs_no_file_and_leaves_nothing_in_main(tmp_path: Path) -> None:
    after = (
        "left = sorted(set(globals()) - before)\n"
        + WAIT
        + "print(left, sys.modules['kvtop'].__version__, module.current().loaded_by)\n"
        "print([f for f in sys.meta_path if 'kvtop' in repr(f)])\n"
    )
    out = run_payload(tmp_path, "before = {'before'} | set(globals())", after)
    from kvtop import __version__

    assert out.splitlines() == [f"[] {__version__} attach", "[]"]


def test_code_that_raises_is_noted_and_not_raised(tmp_path: Path) -> None:
    text = payload.boot(payload._COMMON + "def main():\n    1 / 0\n" + payload._RUN)
    run_payload(tmp_path, "", WAIT, code=text)
    notes = list((tmp_path / "k").glob("attach-*.txt"))
    assert [note.read_text() for note in notes] == ["ZeroDivisionError: division by zero"]
    assert notes[0].stat().st_mode & 0o777 == 0o600


def test_a_note_is_not_written_where_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k").chmod(0o777)
    text = payload.boot(payload._COMMON + "def main():\n    1 / 0\n" + payload._RUN)
    run_payload(tmp_path, "", WAIT, code=text)
    assert list((tmp_path / "k").iterdir()) == []


def test_a_vllm_without_v1_is_named(tmp_path: Path) -> None:
    before = "import sys, types\nsys.modules['vllm'] = types.SimpleNamespace(__version__='0.7.3')"
    run_payload(tmp_path, before, WAIT, code=payload.attach_code())
    note = next((tmp_path / "k").glob("attach-*.txt")).read_text()
    assert note == "vLLM 0.7.3 has no V1 engine in this process"


OLD = """
import sys, types
control = types.ModuleType("kvtop.probe.control")
control.stopped = 0
def stop():
    control.stopped += 1
    return {"state": "stopped"}
control.stop = stop
control.status = lambda: {"state": "ok", "kvtop": "0.0.1"}
for name in ("kvtop", "kvtop.probe"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["kvtop.probe.control"] = control
"""


def test_a_probe_of_another_version_stays_unless_replaced(tmp_path: Path) -> None:
    after = WAIT + "print(control.stopped, sys.modules['kvtop.probe.control'] is control)"
    assert run_payload(tmp_path, OLD, after).split() == ["0", "True"]
    note = next((tmp_path / "k").glob("attach-*.txt")).read_text()
    assert note == "a probe of version 0.0.1 is in it already"
    code = payload.attach_code(replace=True, any_process=True)
    assert run_payload(tmp_path, OLD, after, code=code).split() == ["1", "False"]


@pytest.mark.parametrize("text", ["", "abc", "-1", "0", "1.5", "99999999999", "٣"])
def test_pids_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not a process id"):
        parse_pid(text)


def test_selection(fake_proc: Any) -> None:
    fake_proc.load("api2.json")
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    server = found.servers[0]
    roles = [role for _, role in members(server)]
    assert roles == ["engine", "api", "api", "worker"]
    worker = server.engines[0].worker_pids[0]
    assert select(found, worker, every=False) == members(server)
    assert select(found, server.launcher_pid, every=False) == members(server)
    assert select(found, None, every=False) == members(server)
    fake_proc.load("one.json")
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    with pytest.raises(UsageError, match="2 vLLM servers"):
        select(found, None, every=False)
    assert len(select(found, None, every=True)) == 7


def test_selection_of_what_is_not_there(fake_proc: Any) -> None:
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    with pytest.raises(NotFoundError, match="no vLLM server"):
        select(found, None, every=True)
    with pytest.raises(NotFoundError, match="there is no process 77"):
        select(found, 77, every=False, proc=Proc(fake_proc.root))
    fake_proc.add(77, ["bash"], comm="ba\x1bsh")
    with pytest.raises(NotFoundError, match=r"77 \(ba\?sh\) is not part"):
        select(found, 77, every=False, proc=Proc(fake_proc.root))


def test_a_script_with_vllm_loaded_can_be_named(fake_proc: Any) -> None:
    folder = fake_proc.add(77, ["python", "batch.py"])
    (folder / "maps").write_text(
        "7f00-7f10 r--p 00000000 fe:00 9 /v/site-packages/vllm/_C.abi3.so\n"
    )
    found = Finder(fake_proc.root, tmp_dir=fake_proc.tmp).find()
    ((process, role),) = select(found, 77, every=False, proc=Proc(fake_proc.root))
    assert (process.pid, process.uid, role) == (77, 1000, "engine")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 404 Not Found\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\nnot json",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1"}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": "x"}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": Infinity}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": NaN}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": true}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": 1.5}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": -1}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": 4294967296}',
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": "1", "role": "engine", "pid": ' + b"9" * 5000 + b"}",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 60_000,
        b'HTTP/1.1 200 OK\r\n\r\n{"kvtop": ' + b'{"a":' * 10_000,
    ],
)
def test_answers_that_are_no_hello(answer: bytes) -> None:
    assert parse_hello(answer) is None


@pytest.mark.parametrize("text", ["\u00b2", "9" * 5000, "1_0", " 1", "0", "2147483648", "a\x1b"])
def test_what_is_no_pid(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pid(text)
    assert caught.value.line().isprintable()
    assert len(caught.value.line()) < 150


def test_nobody_answers(tmp_path: Path) -> None:
    assert ask(tmp_path / "none.sock") is None


def test_a_helper_that_takes_too_long_is_left_alive() -> None:
    with pytest.raises(AttachError, match="not finished") as caught:
        run_helper([sys.executable, "-c", "import time; time.sleep(2)"], "", 0.2, "the tool")
    pid = int(caught.value.remedy.split("process ")[1].split(";")[0])
    stat = Proc().stat(pid)
    assert stat is not None
    assert stat.state != "Z"
    os.waitpid(pid, 0)


def test_a_helper_that_is_not_there() -> None:
    with pytest.raises(AttachError, match="the tool cannot be started"):
        run_helper(["/nonexistent/tool"], "", 1.0, "the tool")
