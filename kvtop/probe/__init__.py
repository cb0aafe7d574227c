"""The code that runs inside vLLM: standard library only, imports nothing else of kvtop."""
