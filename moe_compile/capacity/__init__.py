"""Experts with a capacity: equal parts are exchanged, so shapes have a dimension of experts."""
