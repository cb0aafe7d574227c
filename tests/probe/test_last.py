"""The last snapshot: written on an exception, once, bounded, and never in the engine's way."""

from __future__ import annotations

import json
import os
import stat
import threading
import time

import pytest
from probe_fakes import Engine

from kvtop.probe import control, last


class Core(Engine):
    """An engine that ends as vLLM's does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.told = []

    def _send_engine_dead(self):
        self.told.append("dead")

    def shutdown(self):
        self.told.append("shutdown")

    def die(self, error):
        """vllm/v1/engine/core.py, run_engine_core."""
        try:
            raise error
        except SystemExit:
            raise
        except Exception:
            self._send_engine_dead()
            raise
        finally:
            self.shutdown()


def dies(engine, error):
    """Ends an engine; it must end with that very exception."""
    with pytest.raises(type(error)) as seen:
        engine.die(error)
    assert seen.value is error


def files(probe_dir):
    return sorted(name for name in os.listdir(probe_dir) if not name.endswith(".sock"))


def loaded(engine, rows=6, steps=3):
    for _ in range(rows):
        engine.add(12, 30)
    for _ in range(steps):
        engine.step()
    return engine


def test_an_exception_leaves_what_the_engine_was(probe_dir):
    engine = loaded(Core(blocks=64))
    probe = control.install(engine, directory=probe_dir)
    requests = set(engine.scheduler.requests)
    dies(engine, RuntimeError("the prompt was: xxxx"))
    assert engine.told == ["dead", "shutdown"]
    (name,) = files(probe_dir)
    path = os.path.join(probe_dir, name)
    assert last.FILE_NAME.fullmatch(name)[1] == str(os.getpid())
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with open(path, encoding="ascii") as file:
        body = file.read()
    assert "xxxx" not in body
    data = json.loads(body)
    assert data["last"]["exception"] == "RuntimeError"
    assert data["last"]["frames"][-1].startswith("die (")
    assert data["last"]["requests_left_out"] == 0
    assert data["probe"]["point"] == "exception"
    at = data["requests"]["columns"].index("id")
    assert {row[at] for row in data["requests"]["rows"]} == requests
    counts = data["pools"][0]["counts"]
    pool = engine.pools[0]
    assert counts["free"] + counts["cached"] == pool.get_num_free_blocks()
    assert counts["used"] + counts["shared"] == sum(b.ref_cnt > 0 for b in pool.blocks[1:])
    assert probe.role.watch.errors == 0


def test_an_end_in_order_leaves_nothing(probe_dir):
    engine = loaded(Core())
    control.install(engine, directory=probe_dir)
    engine.shutdown()
    dies(engine, SystemExit())
    dies(engine, KeyboardInterrupt())
    assert engine.told == ["shutdown"] * 3
    assert files(probe_dir) == []


def test_only_shutdown_is_there_in_a_ray_actor(probe_dir):
    class Actor(Engine):
        def shutdown(self):
            """Only this."""

    engine = loaded(Actor())
    control.install(engine, directory=probe_dir)
    try:
        try:
            raise ValueError
        finally:
            engine.shutdown()
    except ValueError:
        pass
    assert len(files(probe_dir)) == 1


def test_it_is_written_once_and_taken_out_with_the_probe(probe_dir):
    engine = loaded(Core())
    control.install(engine, directory=probe_dir)
    dies(engine, RuntimeError())
    before = files(probe_dir)
    dies(engine, RuntimeError())
    assert files(probe_dir) == before
    control.stop()
    assert "_send_engine_dead" not in vars(engine)
    assert "shutdown" not in vars(engine)
    for name in before:
        os.unlink(os.path.join(probe_dir, name))
    dies(engine, RuntimeError())
    assert files(probe_dir) == []


@pytest.mark.parametrize(
    "bad", ["unwritable", "gone", "open to others", "no memory", "stuck thread", "cut held"]
)
def test_whatever_goes_wrong_the_engine_dies_as_it_would(probe_dir, monkeypatch, bad):
    monkeypatch.setattr(last, "WAIT_S", 0.3)
    monkeypatch.setattr(last, "LOCK_S", 0.1)
    engine = loaded(Core())
    probe = control.install(engine, directory=probe_dir)
    if bad == "unwritable":
        monkeypatch.setattr(last.os, "replace", _raises(OSError(28, "no space")))
    elif bad == "gone":
        monkeypatch.setattr(last.os, "open", _raises(FileNotFoundError()))
    elif bad == "open to others":
        os.chmod(probe_dir, 0o755)
    elif bad == "no memory":
        monkeypatch.setattr(last, "_final", _raises(MemoryError()))
    elif bad == "stuck thread":
        monkeypatch.setattr(probe.role, "work", lambda: threading.Event().wait(1.0))
    elif bad == "cut held":
        probe.role.capture.lock.acquire()
    begin = time.monotonic()
    dies(engine, RuntimeError())
    assert time.monotonic() - begin < 5
    assert engine.told == ["dead", "shutdown"]
    if bad == "cut held":
        probe.role.capture.lock.release()
    assert files(probe_dir) == []


def _raises(error):
    def call(*args, **kwargs):
        raise error

    return call


def test_many_requests_and_a_large_pool_are_bounded(probe_dir, monkeypatch):
    monkeypatch.setattr(last, "MAX_ROWS", 5)
    engine = loaded(Core(blocks=64), rows=20)
    control.install(engine, directory=probe_dir)
    dies(engine, RuntimeError())
    (name,) = files(probe_dir)
    with open(os.path.join(probe_dir, name), encoding="ascii") as file:
        data = json.load(file)
    assert data["last"]["requests_left_out"] == len(engine.scheduler.requests) - 5
    at = data["requests"]["columns"].index("blocks")
    rows = [row[at] or 0 for row in data["requests"]["rows"]]
    assert len(rows) == 5
    assert min(rows) > 0


def test_too_large_columns_are_left_out_and_then_everything(probe_dir, monkeypatch):
    engine = loaded(Core(blocks=2000))
    probe = control.install(engine, directory=probe_dir)
    full = []
    plain = probe.role.snapshot
    monkeypatch.setattr(
        probe.role, "snapshot", lambda columns: full.append(columns) or plain(columns)
    )
    monkeypatch.setattr(last, "MAX_BYTES", 5000)
    assert last._final(probe.role, _cut(probe.role))[0].count(b'"states"') == 1
    monkeypatch.setattr(last, "MAX_BYTES", 1200)
    assert last._final(probe.role, None)[0].count(b'"states"') == 0
    assert full == [True, True, False]
    dies(engine, RuntimeError())
    assert files(probe_dir) == []


def _cut(role):
    while True:
        raw = role.capture.slice(on_engine=True)
        if raw is not None:
            return raw


def test_a_very_deep_recursion(probe_dir):
    engine = loaded(Core())
    control.install(engine, directory=probe_dir)

    def deeper():
        return deeper()

    try:
        deeper()
    except RecursionError as error:
        dies(engine, error)
    (name,) = files(probe_dir)
    with open(os.path.join(probe_dir, name), encoding="ascii") as file:
        data = json.load(file)
    assert len(data["last"]["frames"]) == last.FRAMES


def test_old_files_and_halves_go(probe_dir):
    def put(name):
        with open(os.path.join(probe_dir, name), "w", encoding="ascii"):
            pass

    for hour in range(12):
        put(f"last-{77 - hour}-20250101T{hour:02}0000Z.json")
    put("last-5-20250101T000000Z.json.part")
    os.utime(os.path.join(probe_dir, "last-5-20250101T000000Z.json.part"), (1.0, 1.0))
    put("other.json")
    last.prune(probe_dir)
    assert files(probe_dir) == [
        *(f"last-{77 - hour}-20250101T{hour:02}0000Z.json" for hour in range(11, 3, -1)),
        "other.json",
    ]


def test_what_another_engine_is_writing_is_left_alone(probe_dir):
    # The engines of one server die together.
    theirs = "last-5-20250101T000000Z.json.part"
    with open(os.path.join(probe_dir, theirs), "w", encoding="ascii"):
        pass
    control.install(engine := loaded(Core()), directory=probe_dir)
    dies(engine, RuntimeError())
    assert theirs in files(probe_dir)


def test_its_own_file_stays_among_those_of_a_clock_that_was_ahead(probe_dir):
    for number in range(last.KEPT):
        name = f"last-{number}-99991231T000000Z.json"
        with open(os.path.join(probe_dir, name), "w", encoding="ascii"):
            pass
    control.install(engine := loaded(Core()), directory=probe_dir)
    dies(engine, RuntimeError())
    left = files(probe_dir)
    assert len(left) == last.KEPT
    assert any(last.FILE_NAME.fullmatch(name)[1] == str(os.getpid()) for name in left)
