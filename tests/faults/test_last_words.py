"""A real engine core that dies of an exception leaves a last snapshot, and kvtop says where."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from kvtop.detect.thresholds import apply_overrides
from tests.faults.conftest import PLUGIN
from tests.faults.watching import Faults, Watcher, long_requests
from tests.vllm.server import Server, make_model

pytestmark = pytest.mark.vllm


def test_an_exception_in_the_engine_core_leaves_its_last_state(
    python: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, place = tmp_path_factory.mktemp("switches"), tmp_path_factory.mktemp("server")
    server = Server(
        python,
        make_model(python, tmp_path_factory.mktemp("model")),
        place,
        ["--num-gpu-blocks-override", "256", "--max-num-seqs", "16"],
        {
            "KVTOP_FAULT": "die",
            "KVTOP_FAULT_DIR": str(folder),
            "PYTHONPATH": str(PLUGIN),
        },
    )
    faults = Faults(folder)
    try:
        server.wait()
        with Watcher(server.url, apply_overrides({}), server.sockets) as watcher:
            with long_requests(server.url, 6):
                busy = watcher.until(
                    lambda look: any(
                        e.probe and len(e.requests or ()) == 6 for e in look.snapshot.engines
                    ),
                    60,
                )
                assert busy is not None, "six requests were never seen"
                pid = busy.snapshot.engines[0].pid
                begin = len(watcher.looks)
                faults.on("die")
                gone = watcher.until(lambda look: "health.dead-engine" in look.rules(), 60, begin)
            assert gone is not None, {f.rule for look in watcher.looks for f in look.findings}
        broken = faults.broken("die")
    finally:
        server.stop()
    assert broken is not None
    assert broken["pid"] == pid
    (path,) = server.sockets.glob("last-*.json")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert re.fullmatch(rf"last-{pid}-\d{{8}}T\d{{6}}Z\.json", path.name)
    assert not list(server.sockets.glob("*.part"))
    body = path.read_text()
    assert "secret" not in body
    assert "xxxx" not in body

    (finding,) = (f for f in gone.findings if f.rule == "health.dead-engine")
    assert finding.severity == "critical"
    assert finding.evidence["last snapshot"] == str(path)
    assert str(path) in finding.next_step
    (engine,) = (e for e in gone.snapshot.engines if e.pid == pid)
    assert not engine.alive
    assert str(path) in engine.probe_reason

    done = subprocess.run(
        [sys.executable, "-m", "kvtop", "once", "--file", str(path), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    shown = json.loads(done.stdout)
    (dead,) = shown["engines"]
    assert (dead["pid"], dead["alive"], dead["state"]) == (pid, False, "gone")
    assert "died of RuntimeError in before (" in dead["probe_reason"]
    assert {request["id"] for request in dead["requests"]} >= set(broken["requests"])
    # It died before the step changed anything: the tables of the running requests are the
    # blocks that the scheduler itself had for them.
    holders = Counter(broken["blocks"])
    counts = dead["pools"][0]["counts"]
    assert counts["used"] + counts["shared"] == len(holders)
    assert dead["probe"]["point"] == "exception"
    assert abs(dead["probe"]["cut_time_s"] - time.time()) < 300

    text = subprocess.run(
        [sys.executable, "-m", "kvtop", "once", "--file", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "GONE" in text
    assert "the engine core died of RuntimeError" in text
