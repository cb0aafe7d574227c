"""Sources of readings. Each reads one thing and knows nothing of the others."""
