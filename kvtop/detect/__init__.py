"""Detectors: pure functions from history to findings."""
