"""Predicted step times of mixture-of-experts models on clusters, from formulas alone."""
