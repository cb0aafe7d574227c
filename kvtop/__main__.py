"""`python -m kvtop`."""

from kvtop.cli import entry

entry()
