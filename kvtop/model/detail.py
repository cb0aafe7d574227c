"""The block table of one request, fetched only when somebody looks at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Detail:
    """The block table of one request, as its engine's probe gave it."""

    request_id: str
    """The request asked for."""
    step: int | None = None
    """Scheduler step of the answer. None: no answer yet, or it failed."""
    tables: tuple[tuple[int, int | None, tuple[int, ...]], ...] = ()
    """A group: its index, its block size in tokens, its physical block ids in logical order."""
    refs: tuple[tuple[int, ...], ...] = ()
    """Ref count of each entry, the same shape as the tables."""
    shared_with: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Other requests that hold a block, by block id."""
    age_s: float | None = None
    """How long before the moment shown it was read, on replay. None: it was read just now."""
    error: str = ""
    """Why there is no answer. Empty: there is one, or it is awaited."""
