"""A command line around the screen on the fake feed, for tests in a real terminal.

See the options below; what each does is told in `fake_feed.FakeFeed`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ui"))

from fake_feed import FakeEngine, FakeFeed

from kvtop import cli
from kvtop.config import Options


def show(argv) -> int:
    from kvtop.ui.start import run

    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-after", type=int)
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--made", type=int, default=0)
    parser.add_argument("--rush", type=int, default=0)
    parser.add_argument("--no-first", action="store_true")
    parser.add_argument("--ascii", action="store_true")
    options = parser.parse_args(argv)
    engine = FakeEngine(blocks=options.blocks, requests=options.requests, engines=options.engines)
    feed = FakeFeed(
        engine,
        options.interval,
        options.fail_after,
        options.hang,
        options.made,
        options.rush,
    )
    first = None if options.no_first else engine.snapshot()
    return run(feed=feed, first=first, options=Options(options.interval, ascii=options.ascii))


if __name__ == "__main__":
    cli.run = show
    code = cli.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
