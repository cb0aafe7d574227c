"""What `kvtop once` tells the shell."""

from __future__ import annotations

import pytest

from kvtop.commands.once import outcome
from kvtop.errors import ExitCode
from kvtop.model.snapshot import Engine, Snapshot, SourceState, SourceStatus

ENGINE = Engine(engine=0, pid=20, server="127.0.0.1:8000")


def source(kind: str, state: SourceState) -> SourceStatus:
    return SourceStatus(kind, kind, state, 1.0)


@pytest.mark.parametrize(
    ("sources", "engines", "code"),
    [
        ([source("discovery", SourceState.OK)], (), ExitCode.NOT_FOUND),
        ([source("discovery", SourceState.STARTING)], (), ExitCode.UNREACHABLE),
        ([source("discovery", SourceState.OK)], (ENGINE,), ExitCode.OK),
        ([source("engine", SourceState.OK)], (ENGINE,), ExitCode.OK),
        ([source("engine", SourceState.FAILED)], (ENGINE,), ExitCode.UNREACHABLE),
        ([source("engine", SourceState.STARTING)], (ENGINE,), ExitCode.UNREACHABLE),
        ([source("nvml", SourceState.FAILED)], (ENGINE,), ExitCode.OK),
    ],
)
def test_outcome(sources: list[SourceStatus], engines: tuple[Engine, ...], code: ExitCode) -> None:
    assert outcome(Snapshot(1.0, 1.0, "h", "0", tuple(sources), (), engines)) is code
