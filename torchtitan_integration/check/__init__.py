"""`megamoe check` for torchtitan jobs: the training job that its sections run, and its ranks."""
