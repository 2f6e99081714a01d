"""Prices of operators: amounts of work, hardware rates, traced layers."""
