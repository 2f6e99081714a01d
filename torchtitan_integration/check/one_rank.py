"""`python -m torchtitan_integration.check.one_rank SECTION ...`: one rank of a torchtitan job."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from moe_compile.check.job_sections import leave, run_rank
from moe_compile.torch_quirks.python311_frames import with_frame_space
from torchtitan_integration.cpu_launcher import cpu_trainer, prepare_torch
from torchtitan_integration.run_again import without_reads


@with_frame_space
def main() -> int:
    """Be one rank of the section named on the command line."""
    return run_rank("the job's trainer", _job)


def _job(words: list[str], asked: argparse.Namespace) -> Any:
    if asked.device == "cpu":
        prepare_torch()
    training: Any = importlib.import_module("torchtitan_integration.check.training_job")
    trainer = cpu_trainer() if asked.device == "cpu" else _trainer()
    return training.TrainingJob(words, trainer, num_steps=asked.steps, layers=asked.layers)


def _trainer() -> Any:
    return without_reads(importlib.import_module("torchtitan.train").Trainer)


if __name__ == "__main__":
    leave(main())
