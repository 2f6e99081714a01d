"""Runtime operators that compiled graphs call."""
