"""Whether a reading is one of this moment: old data proves nothing."""

from __future__ import annotations

from kvtop.detect.thresholds import Thresholds
from kvtop.model.snapshot import SourceState, SourceStatus


def is_fresh(source: SourceStatus, now_s: float, limits: Thresholds) -> bool:
    """Whether a source's value is one of this moment.

    A wall clock that jumps makes it look old or of the future for a while; both mean no.
    """
    if source.state not in (SourceState.OK, SourceState.STALE) or source.value_time_s is None:
        return False
    allowed = max(limits.stale_s, 3 * (source.period_s or 0.0))
    return -1.0 <= now_s - source.value_time_s <= allowed
