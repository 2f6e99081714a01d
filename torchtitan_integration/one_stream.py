"""One stream of text for any number of ranks: a step has the sequences that one rank alone reads.

Contract
    A job asks for it by `training.dataset_path = "one_stream"`, with our text. Each data-parallel
    rank then takes its rows of the batches of one rank alone, so that jobs on other layouts train
    on the same sequences. torchtitan gives each data-parallel rank a text of its own.
    Every rank reads all of the stream: for small jobs, whose losses are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torchtitan.config import JobConfig

from torchtitan_integration.corpus import DATASET

ONE_STREAM: Final = "one_stream"
"""Value of `training.dataset_path`, which our text has no other use for."""


def asks_for_one_stream(job: JobConfig) -> bool:
    """Whether a job's ranks read one stream of our text."""
    return job.training.dataset == DATASET and job.training.dataset_path == ONE_STREAM


class RowsOf:
    """The rows of one data-parallel rank of the batches that one rank alone would read."""

    def __init__(self, loader: Any, rank: int, num_rows: int) -> None:
        """Take `num_rows` rows of each batch of `loader`, those of `rank`."""
        self._loader = loader
        self._rows = slice(rank * num_rows, (rank + 1) * num_rows)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield this rank's inputs and labels."""
        for inputs, labels in self._loader:
            yield {name: x[self._rows] for name, x in inputs.items()}, labels[self._rows]

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._loader.load_state_dict(state)


def read_one_stream(
    build: Callable[..., Any], job: JobConfig, dp_world_size: int, dp_rank: int, **others: Any
) -> RowsOf:
    """Return the loader of one rank; `build` is torchtitan's, `job` says where the text lies."""
    rows = job.training.local_batch_size
    training = dataclasses.replace(job.training, local_batch_size=rows * dp_world_size)
    whole = dataclasses.replace(job, training=training)
    loader = build(dp_world_size=1, dp_rank=0, job_config=whole, **others)
    return RowsOf(loader, dp_rank, rows)
