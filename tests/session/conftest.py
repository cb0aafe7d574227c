import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that is possible: thousands of commits wait for a real disk each time."""
    memory = "/dev/shm"
    home = memory if os.access(memory, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="kvtop-test-", dir=home))
    yield path
    shutil.rmtree(path, ignore_errors=True)
