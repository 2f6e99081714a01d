"""What of `normalize_exchanges` is large enough to stand alone."""
