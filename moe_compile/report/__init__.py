"""Reports of what megamoe did, in tables and JSON."""
