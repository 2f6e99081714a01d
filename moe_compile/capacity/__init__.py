"""Experts with a capacity: equal parts travel, so that the axis of experts is in the shapes."""
