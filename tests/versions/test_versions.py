"""The probe on the real scheduler of each vLLM version, against a count from nothing."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.server import make_model, python_or_reason

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALLED = "0.32.0"
"""The version of tests/vllm/install.sh; it is run as it is installed."""
UNPACKED = ("0.10.2", "0.12.0", "0.15.1", "0.20.2", "0.25.1", "0.28.0", "0.33.0")
PATIENCE_S = 400
"""Longest run of one driver on a busy machine; 15 s on a quiet one."""

LACKS = {
    "0.10.2": {"deferred frees", "deferred requests", "pause state"},
    "0.12.0": {"deferred frees", "deferred requests", "pause state"},
    "0.15.1": {"deferred frees", "deferred requests", "pause state"},
    "0.20.2": {"deferred frees"},
    "0.25.1": set(),
    "0.28.0": set(),
    "0.32.0": set(),
    "0.33.0": set(),
}
"""What each version does not have, and the probe must name."""


def absent(reason: str) -> Any:
    """Skips, or fails where everything was promised to be there."""
    if os.environ.get("KVTOP_VLLM_REQUIRED"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def python() -> str:
    python, reason = python_or_reason()
    return python or absent(reason)


@pytest.fixture(scope="session")
def model(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(python, tmp_path_factory.mktemp("model"))


def paths(version: str) -> str:
    """`PYTHONPATH` on which `import vllm` gives a version."""
    if version == INSTALLED:
        return str(ROOT)
    folder = Path(os.environ.get("KVTOP_VLLM_VERSIONS", "")).resolve() / version
    if not os.environ.get("KVTOP_VLLM_VERSIONS") or not (folder / "vllm/__init__.py").exists():
        absent(
            f"vLLM {version} is not in KVTOP_VLLM_VERSIONS: tests/versions/install.sh unpacks it"
        )
    return f"{folder}{os.pathsep}{ROOT}"


def drive(script: str, python: str, model: Path, version: str) -> dict[str, Any]:
    """Runs a driver on a version; the JSON that it prints last."""
    done = subprocess.run(
        [python, str(HERE / script), str(model)],
        env={
            **os.environ,
            "PYTHONPATH": paths(version),
            # The driver installs the probe itself.
            "KVTOP_PROBE": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="session")
def driven(python: str, model: Path) -> Any:
    return functools.cache(lambda version: drive("drive.py", python, model, version))


@pytest.mark.parametrize("config", ["full", "window"])
@pytest.mark.parametrize("version", [*UNPACKED, INSTALLED])
class TestVersion:
    def test_every_cut_equals_the_count_from_nothing(self, driven, version, config):
        result = driven(version)[config]
        assert result["failures"] == []
        assert result["version"] == version
        assert result["cuts"] > 300
        # How many come too late is a matter of the machine; most must be compared.
        assert result["late"] < result["cuts"] / 4
        assert set(result["points"]) >= {"boundary", "idle"}

    def test_each_kind_of_block_and_request_was_there(self, driven, version, config):
        seen = driven(version)[config]["seen"]
        kinds = ("free", "cached", "used", "shared", "null")
        phases = ("waiting", "prefill", "decode", "preempted")
        assert all(seen[name] > 5 for name in (*kinds, *phases)), seen
        assert seen["ghost"] == 0

    def test_every_counter_moved(self, driven, version, config):
        counters = driven(version)[config]["counters"]
        assert None not in counters.values()
        assert 0 not in counters.values()

    def test_what_it_lacks_is_named(self, driven, version, config):
        result = driven(version)[config]
        assert set(result["missing"]) == LACKS[version]
        assert not set(result["missing"]) & set(result["found"])

    def test_the_engine_is_described(self, driven, version, config):
        result = driven(version)[config]
        engine = result["engine"]
        groups = [
            (g["kind"], g["block_size_tokens"], g["sliding_window_tokens"])
            for g in engine["groups"]
        ]
        full, window = ("FullAttention", 16, None), ("SlidingWindow", 16, 48)
        assert groups == ([full] if config == "full" else [full, window])
        assert (engine["block_size"], engine["max_model_len"], engine["max_num_seqs"]) == (
            16,
            2048,
            8,
        )
        assert engine["block_bytes"] == result["block_bytes"]
        assert engine["prefix_caching"] is True
        assert engine["state"] == "idle"

    def test_nothing_is_left_behind(self, driven, version, config):
        assert driven(version)[config]["left_behind"] == []
