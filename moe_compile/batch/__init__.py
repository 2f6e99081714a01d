"""Parts of the batch: the proof that a graph may run on some sequences at a time."""
