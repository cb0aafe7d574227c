"""The pictures' script runs, and draws what the demo shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent


def test_the_script_makes_a_picture(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "screenshots/make.py", "small", "--seconds=3", "-o", tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    root = ElementTree.parse(tmp_path / "small.svg").getroot()
    text = " ".join(node.text or "" for node in root.iter() if node.text).replace("\u00a0", " ")
    assert "DEMO" in text
    assert "KV blocks 4,096 x 16 tok" in text
    assert "Requests" in text
