import sys
from pathlib import Path

# Helpers shared by tests stand beside them; there are no packages in `tests`.
for folder in ("e2e", "ui"):
    path = str(Path(__file__).resolve().parent.parent / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
