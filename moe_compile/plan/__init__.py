"""The decisions on one graph: candidates, their prices, the choice, the plan."""
