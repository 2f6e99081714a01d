"""The outcome of every candidate of every pass, and the words for it; imports nothing."""
