"""One real vLLM with every fault built in and switched off."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop.detect.thresholds import apply_overrides
from tests.faults.watching import Faults, Watcher
from tests.vllm import load
from tests.vllm.server import Server, make_model, python_or_reason

PLUGIN = Path(__file__).with_name("plugin")
NAMES = (
    "lose-free,lose-many,forget,bump-ref,lose-abort,keep-deferred,wedge,stall,"
    "leak-host,leak-tensor"  # all but keep-sent, which the connector brings
)
LIMITS = apply_overrides(
    {
        "rss_window_s": 60,
        "rss_settle_s": 0,
        "lease_s": 8,
        "lease_grace_s": 2,
        "balance_window_s": 40,
        "balance_blocks": 100,
    }
)
"""Growth in one minute instead of two, a balance of 40 s instead of 300, and a short lease: so
long the tests need not last. All else is as users have it."""
CONNECTOR = {
    "kv_connector": "FaultConnector",
    "kv_connector_module_path": "kvtop_fault_connector",
    "kv_role": "kv_both",
}
"""Does nothing but for the fault `keep-sent`."""


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of the vLLM environment."""
    python, reason = python_or_reason()
    if not python:
        if os.environ.get("KVTOP_VLLM_REQUIRED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the switches are."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def server(python: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of 256 blocks of 128 tokens, the probe, and the faults."""
    place = tmp_path_factory.mktemp("server")
    server = Server(
        python,
        make_model(python, tmp_path_factory.mktemp("model")),
        place,
        [
            *("--num-gpu-blocks-override", "256", "--max-num-seqs", "16"),
            *("--kv-transfer-config", json.dumps(CONNECTOR)),
        ],
        {
            "KVTOP_FAULT": NAMES,
            "KVTOP_FAULT_DIR": str(folder),
            "PYTHONPATH": str(PLUGIN),
        },
    )
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def faults(folder: Path) -> Faults:
    """The switches."""
    return Faults(folder)


@pytest.fixture(scope="session")
def watcher(server: Server) -> Iterator[Watcher]:
    """The live stream and the judge."""
    with Watcher(server.url, LIMITS, server.sockets) as watcher:
        ready = watcher.until(
            lambda look: any(e.probe and e.requests is not None for e in look.snapshot.engines), 60
        )
        assert ready is not None, "no probe reading within a minute"
        yield watcher


@pytest.fixture(scope="session", autouse=True)
def _turns() -> Iterator[None]:
    """Looks are not starved by the load that the tests make themselves."""
    with load.taking_turns():
        yield
