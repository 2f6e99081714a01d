"""What was done, in tables and JSON."""
