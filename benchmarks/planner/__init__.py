"""What the planner chooses and predicts, held against the best and against steps that ran."""
