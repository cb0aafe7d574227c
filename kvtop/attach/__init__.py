"""Finding vLLM servers on this machine, and getting the probe into them."""
