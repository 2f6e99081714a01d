"""A MoE region: how it is found, what is known of its rows and counts, what is around it."""
