"""What chunks, and a second start, take to compile."""
