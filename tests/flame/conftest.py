from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TARGET = Path(__file__).with_name("target.py")


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts targets, and ends them with everything below them."""
    running: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, str(TARGET), *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield start
    for child in running:
        for number in (signal.SIGKILL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
