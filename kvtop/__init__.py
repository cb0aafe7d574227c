"""kvtop: where every KV-cache block of a running vLLM is, who holds it, and why."""

__version__ = "0.1.0"
