"""What the screen needs from whoever gives it snapshots, live or replayed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Snapshot


class Feed(Protocol):
    """Where snapshots come from."""

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Snapshots as they are taken; may end."""

    def set_interval(self, seconds: float) -> None:
        """Ask for another time between two snapshots."""

    def set_visible(self, stacks: bool) -> None:
        """Say whether the top frames are on screen; hidden ones need not be sampled."""

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        """The block table of a request; a failure is in `Detail.error`."""

    async def close(self) -> None:
        """Stop everything. The screen waits for it only a short time."""
