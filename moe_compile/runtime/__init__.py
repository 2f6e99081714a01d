"""What compiled callables do before they run: ranks agree, launches are recorded."""
