"""One stream of text for every layout: its global batches are those of a single data-parallel rank.

torchtitan gives each data-parallel rank a text of its own, so that jobs on different meshes read
different batches, and their losses differ by their data. A job asks for this by `ONE_STREAM`.
"""

import dataclasses

ONE_STREAM = {"training.dataset_path": "one_stream"}
"""Of no other use: the text of our recipes has its path from the recipe."""


class RowsOf:
    """The rows of one data-parallel rank of the batches that one rank alone would read."""

    def __init__(self, loader, rank, num_rows):
        self.loader = loader
        self.rows = slice(rank * num_rows, (rank + 1) * num_rows)

    def __iter__(self):
        for inputs, labels in self.loader:
            yield {name: x[self.rows] for name, x in inputs.items()}, labels[self.rows]

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


def read_one_stream(spec):
    """Have jobs of `spec` that ask for it read one stream."""
    build = spec.build_dataloader_fn

    def dataloader(*, dp_world_size, dp_rank, job_config, **others):
        training = job_config.training
        if training.dataset_path != ONE_STREAM["training.dataset_path"]:
            return build(
                dp_world_size=dp_world_size, dp_rank=dp_rank, job_config=job_config, **others
            )
        rows = training.local_batch_size
        training = dataclasses.replace(training, local_batch_size=rows * dp_world_size)
        whole = dataclasses.replace(job_config, training=training)
        loader = build(dp_world_size=1, dp_rank=0, job_config=whole, **others)
        return RowsOf(loader, dp_rank, rows)

    spec.build_dataloader_fn = dataloader
