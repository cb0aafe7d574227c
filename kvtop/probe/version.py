"""What the probe calls itself on the wire."""

from __future__ import annotations

VERSION = "0.1.0"
"""Equal to `kvtop.__version__`; the probe may run where the rest of kvtop is absent."""

SCHEMA = 1
"""Version of the JSON that the probe answers with."""
