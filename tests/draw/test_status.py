from __future__ import annotations

from dataclasses import replace

from kvtop.draw.status import sources_panel
from kvtop.draw.view import View
from tests.draw import samples
from tests.draw.golden import text_of


def test_an_engine_without_a_probe_is_among_the_sources() -> None:
    bare = replace(samples.ENGINE, probe=None, probe_reason="no probe; `kvtop attach` puts one in")
    snap = replace(
        samples.HEALTHY,
        engines=(bare,),
        sources=tuple(s for s in samples.HEALTHY.sources if s.kind != "engine"),
    )
    shown = "\n".join(text_of(line) for line in sources_panel(snap, View(), 100, 40))
    assert f"engine {bare.pid}" in shown
    assert "no probe" in shown
    assert "kvtop attach" in shown
    probed = "\n".join(text_of(line) for line in sources_panel(samples.HEALTHY, View(), 100, 40))
    assert "no probe" not in probed
