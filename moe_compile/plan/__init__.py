"""What is decided on one graph: candidates, their price, the choice, the plan."""
