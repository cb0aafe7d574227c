"""Makes the fakes importable for the tests of this folder, and gives the probe by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kvtop.probe import control


@pytest.fixture
def probe_dir(tmp_path):
    directory = tmp_path / "sockets"
    directory.mkdir(mode=0o700)
    return str(directory)


@pytest.fixture(autouse=True)
def no_probe_left():
    yield
    control.stop()
