"""A simulated engine, served by the real probe."""
