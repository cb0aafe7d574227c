"""Which block tables a recording keeps: a few that matter, seldom. Pure.

All tables of a busy engine would be several times the rest of the file, and each is a
question to its probe. Kept are those that a post-mortem asks for: of requests that a
finding names, that hold blocks without running, the largest, and the oldest; of a small
engine, all.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtop.model.history import engine_key
from kvtop.model.snapshot import Engine, Finding, Phase, Request, Snapshot

EVERY_S = 30.0
"""Time between two rounds."""
MOST = 6
"""Tables of one engine in a round."""
FEW = 16
"""Of an engine with so few requests that hold blocks all tables are kept."""
FEW_BLOCKS = 1_000
"""So long as they have no more blocks together."""
_EACH = 2
"""Requests that hold without running, and of each finding."""
_NAMED = 4

NOT_KEPT = (
    "its block table was not recorded: kept are, twice a minute, those of requests that a finding"
    " names, that hold blocks without running, the largest and the oldest (all where 16 or"
    " fewer hold any); and what was open on screen"
)
"""Said on replay where there is none."""


class Chooser:
    """Says which tables to ask for."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._named: frozenset[tuple[str, int | None]] = frozenset()

    def wanted(
        self, snapshot: Snapshot, findings: Iterable[Finding] = ()
    ) -> list[tuple[Engine, str]]:
        """Engines and request ids whose tables are due; empty most of the time.

        Args:
            snapshot: The newest.
            findings: What holds; a new one makes a round due at once.
        """
        bad = [f for f in findings if f.severity != "info" and f.request_ids]
        named = frozenset((finding.rule, finding.engine_pid) for finding in bad)
        new, self._named = named - self._named, named
        now = snapshot.mono_s
        if self._last_s is not None and 0 <= now - self._last_s < EVERY_S and not new:
            return []
        out: dict[tuple[str, str], Engine] = {}
        for engine in snapshot.engines:
            if engine.probe is None or not engine.alive:
                continue
            for name in _of_engine(engine, bad):
                out[engine_key(engine), name] = engine
        if out:
            # As long as nobody holds anything, the first one who does is not waited for.
            self._last_s = now
        return [(engine, name) for (_, name), engine in out.items()]


def _of_engine(engine: Engine, findings: list[Finding]) -> list[str]:
    holding = [request for request in engine.requests or () if request.blocks]
    if not holding:
        return []
    here = {request.id for request in holding}
    named = [
        name
        for finding in findings
        if finding.engine_pid in (None, engine.pid)
        for name in finding.request_ids[:_EACH]
        if name in here
    ][:_NAMED]
    kept = sorted(
        (r for r in holding if r.phase is Phase.HELD or r.client == "gone"),
        key=lambda request: -(request.held_s or request.client_gone_s or 0.0),
    )
    largest = max(holding, key=lambda request: request.blocks or 0)
    oldest = max(holding, key=_age)
    ids = [*named, *(request.id for request in kept[:_EACH]), largest.id, oldest.id]
    first = list(dict.fromkeys(ids))[:MOST]
    if len(holding) > FEW or sum(request.blocks or 0 for request in holding) > FEW_BLOCKS:
        return first
    return list(dict.fromkeys([*first, *(request.id for request in holding)]))


def _age(request: Request) -> float:
    return request.age_s or 0.0
