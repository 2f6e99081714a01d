"""Agreement of ranks and records of launches, before compiled callables run."""
