"""What a job would do on its machine, found out on a laptop: no GPU, no weights, no ranks."""
