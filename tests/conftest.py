"""What all tests share."""

from hypothesis import settings

# A shared machine makes any time limit a coin toss; speed is measured in tests/benchmarks.
settings.register_profile("kvtop", deadline=None)
settings.load_profile("kvtop")
