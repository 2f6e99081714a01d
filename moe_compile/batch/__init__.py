"""Parts of the batch: may a graph run on some sequences at a time."""
