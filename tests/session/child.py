"""Records as fast as it can until it is killed: `python -m tests.session.child FILE`."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtop.session.writer import SessionWriter
from tests.session.common import small


def main() -> None:
    churn = small()
    writer = SessionWriter(Path(sys.argv[1]), key_every=20)
    while True:
        writer.write(churn.tick())
        # Said after the commit: what is said must be in the file.
        print(writer.tick, flush=True)


if __name__ == "__main__":
    main()
