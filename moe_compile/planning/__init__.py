"""What to do about it: costs, simulated time, plans. Pure arithmetic, the same on every rank."""
