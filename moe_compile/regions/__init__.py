"""MoE regions: how they are found, and the facts about their rows, counts and surroundings."""
