"""Flame graphs: captured with py-spy, kept as folded stacks, written in four formats."""
