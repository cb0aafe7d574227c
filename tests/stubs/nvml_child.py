"""Runs `NvmlSource` with the real pynvml in a process of its own, driven by its stdin.

Each line on stdin is a time; the source is read at that time by its clock, and what came
is one line of JSON on stdout. Options of the source are JSON in the first argument.
"""

import asyncio
import dataclasses
import json
import sys

from kvtop.sources.base import SourceError
from kvtop.sources.nvml import NvmlSource


async def main() -> None:
    now = 0.0
    source = NvmlSource(monotonic=lambda: now, **json.loads(sys.argv[1]))
    for line in sys.stdin:
        now = float(line)
        try:
            gpus = await source.read()
        except SourceError as error:
            answer = {"reason": error.reason, "remedy": error.remedy}
        else:
            answer = {"gpus": [dataclasses.asdict(gpu) for gpu in gpus]}
        print(json.dumps(answer), flush=True)
    await source.close()


asyncio.run(main())
