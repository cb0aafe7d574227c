"""Entry point of vLLM's plugin group `vllm.general_plugins`.

vLLM calls it in each of its processes, before its objects exist, possibly several times,
and does not catch what it raises (vllm/plugins/__init__.py, 0.8.5 to 0.32).
"""

from __future__ import annotations

import os


def register() -> None:
    """Starts the probe, unless `KVTOP_PROBE=0`. Returns at once and never raises."""
    try:
        if os.environ.get("KVTOP_PROBE", "1").strip().lower() in ("0", "off", "no", "false"):
            return
        from kvtop.probe.control import start

        start(loaded_by="plugin")
    except Exception:
        pass
