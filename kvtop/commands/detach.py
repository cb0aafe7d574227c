"""`kvtop detach`: takes the probe out of running engines."""

from __future__ import annotations

import argparse

from kvtop.attach import probe
from kvtop.commands.attach import add_common, each, ways


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `kvtop detach`."""
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Takes the probe out of engine cores, API servers and workers.

    Returns:
        OK when none of them has a probe now, DEGRADED when some still do, else the code
        of the first failure.
    """
    among = ways(options.via)
    return each(options, lambda chosen: probe.detach(*chosen, among=among))
