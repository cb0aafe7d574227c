"""Makes the README's pictures from seeded runs of the demo: `python screenshots/make.py`.

The pictures are the real thing: a simulated engine in its own process, read through
the real probe, /metrics page and py-spy by the live stream, drawn by the same
functions as the screen.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from svg import picture  # noqa: E402

from kvtop.config import Options  # noqa: E402
from kvtop.demo.launch import running  # noqa: E402
from kvtop.demo.source import DemoGpuSource  # noqa: E402
from kvtop.detect.judge import Judge  # noqa: E402
from kvtop.draw.requests import visible_requests  # noqa: E402
from kvtop.draw.screen import screen  # noqa: E402
from kvtop.draw.view import View  # noqa: E402
from kvtop.model.history import History  # noqa: E402
from kvtop.model.snapshot import Snapshot  # noqa: E402
from kvtop.stream.live import Live  # noqa: E402
from kvtop.stream.target import Target  # noqa: E402
from kvtop.ui.keys import footer_keys  # noqa: E402


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture."""

    name: str
    scenario: str
    width: int
    height: int
    view: Callable[[Live, Snapshot, View], object] | None = None
    blocks: int | None = None


async def detail(live: Live, snap: Snapshot, view: View) -> View:
    """The request that holds most, opened."""
    wanted = next((r for r in visible_requests(snap, view) if r.shared_blocks), None)
    if wanted is None:
        wanted = visible_requests(snap, view)[0]
    answer = await live.request_detail(snap.engines[0], wanted.id)
    lit = frozenset(block for _, _, blocks in answer.tables for block in blocks)
    return replace(view, detail=answer, cursor_id=wanted.id, lit_blocks=lit, focus="requests")


SHOTS = (
    Shot("main", "healthy", 160, 50, blocks=4096),
    Shot("leak", "leak", 160, 44, blocks=4096),
    Shot("storm", "preempt-storm", 160, 44),
    Shot("detail", "healthy", 160, 44, detail, blocks=4096),
    Shot("small", "healthy", 80, 24, blocks=4096),
)


async def take(shot: Shot, seconds: float, seed: int) -> str:
    """Watch the demo for a while and draw the last snapshot."""
    with running(shot.scenario, seed=seed, blocks=shot.blocks, speed=3.0) as demo:
        target = Target(
            socket_dir=demo.directory,
            url=demo.url,
            gpu_source=DemoGpuSource(demo.url),
            demo=True,
        )
        live = Live(Options(interval_s=0.5), target)
        history = History()
        judge = Judge()
        view = View(history=history, interval_s=0.5)
        start: float | None = None
        try:
            async for snap in live.snapshots():
                history.append(snap)
                findings = judge.judge(snap)
                start = start or snap.mono_s
                if snap.mono_s - start >= seconds and snap.engines and snap.engines[0].requests:
                    break
            view = replace(view, now_s=snap.time_s, findings=findings)
            if shot.view is not None:
                view = await shot.view(live, snap, view)  # type: ignore[misc]
        finally:
            await live.close()
    lines = screen(snap, view, shot.width, shot.height, footer_keys(view))
    return picture(lines, f"kvtop on a simulated engine, scenario {shot.scenario}")


def main(argv: list[str] | None = None) -> int:
    """Make all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="pictures to make; all by default")
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to watch")
    parser.add_argument("--seed", type=int, default=3)
    options = parser.parse_args(argv)
    for shot in SHOTS:
        if not options.names or shot.name in options.names:
            path = options.out / f"{shot.name}.svg"
            path.write_text(asyncio.run(take(shot, options.seconds, options.seed)), "utf-8")
            print(path.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
