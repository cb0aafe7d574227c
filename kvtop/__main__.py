"""The program: `kvtop` and `python -m kvtop`.

Ctrl-C in the first moments, while modules are still being loaded, ends the process
like any other program; Python's own way would be a traceback.
"""

import signal
from typing import NoReturn


def entry() -> NoReturn:
    """The console script."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kvtop.cli import entry as run

    if before is not None:
        signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    entry()
