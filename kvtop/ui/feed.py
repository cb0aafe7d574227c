"""What the screen needs from whoever gives it snapshots, live or replayed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Snapshot, SourceState


class Feed(Protocol):
    """Where snapshots come from."""

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Snapshots as they are taken; may end."""

    def set_interval(self, seconds: float) -> None:
        """Ask for another time between two snapshots."""

    def set_visible(self, stacks: bool, pids: Sequence[int] = ()) -> None:
        """Say whether top frames are looked at; only those of these processes, when any are named.

        Others need not be sampled.
        """

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        """The block table of a request; a failure is in `Detail.error`."""

    async def close(self) -> None:
        """Stop everything. The screen waits for it only a short time."""


def numbers_only(snapshot: Snapshot) -> Snapshot:
    """A snapshot without what charts do not need, so that a long pause costs little memory."""
    engines = tuple(
        replace(
            engine,
            requests=None,
            pools=tuple(replace(p, states=None, refs=None, tables=None) for p in engine.pools),
        )
        for engine in snapshot.engines
    )
    return replace(snapshot, engines=engines, stacks=(), sources=())


def just_begun(snapshot: Snapshot) -> bool:
    """Whether the stream does not yet know which engines there are."""
    return any(
        source.kind == "discovery" and source.state is SourceState.STARTING
        for source in snapshot.sources
    )
