"""Drivers of the real scheduler, run by the interpreter of the vLLM environment side by side."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.server import make_model, python_or_reason

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
INSTALLED = "0.32.0"
"""The version of tests/vllm/install.sh; it is run as it is installed."""
UNPACKED = ("0.10.2", "0.12.0", "0.15.1", "0.20.2", "0.25.1", "0.28.0", "0.33.0")
PATIENCE_S = 400
"""Longest run of one driver on a busy machine; 15 s on a quiet one."""

Driven = Callable[..., dict[str, Any]]


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


def folder_of(version: str) -> Path:
    """Where the files of a version are, if they are there."""
    return Path(os.environ.get("KVTOP_VLLM_VERSIONS") or "/nonexistent").resolve() / version


def is_there(version: str) -> bool:
    """Whether `drive` can run a version."""
    return version == INSTALLED or (folder_of(version) / "vllm/__init__.py").exists()


def paths(version: str) -> str:
    """`PYTHONPATH` on which `import vllm` gives a version; skips where it is not there."""
    if not is_there(version):
        absent(
            f"vLLM {version} is not in KVTOP_VLLM_VERSIONS: tests/versions/install.sh unpacks it"
        )
    return str(ROOT) if version == INSTALLED else f"{folder_of(version)}{os.pathsep}{ROOT}"


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
def driven(python: str, model: Path, request: pytest.FixtureRequest) -> Iterator[Driven]:
    """What came of a driver on a version; skips where that is not there.

    All that the tests of this run ask for are started at once, and run side by side.
    """
    wanted: dict[tuple[str, str], None] = {}
    for item in request.session.items:
        if "driven" in getattr(item, "fixturenames", ()):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            version = parameters.get("version")
            wanted["drive.py" if version else "faults.py", version or INSTALLED] = None
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
        runs: dict[tuple[str, str], Future[dict[str, Any]]] = {}
        for script, version in wanted:
            if is_there(version):
                runs[script, version] = pool.submit(drive, script, python, model, version)

        def result(version: str, script: str = "drive.py") -> dict[str, Any]:
            paths(version)
            return runs[script, version].result()

        try:
            yield result
        finally:
            pool.shutdown(cancel_futures=True)
