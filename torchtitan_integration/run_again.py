"""Steps without host reads, run again with reads where rows had no room on some rank.

Contract
    Before the gradients of a step are clipped all ranks agree whether rows had no room on any of
    them: one all-reduce of two integers, and one read by the host. If so, every rank runs all
    microbatches of the step again by the programs with reads. Before that random state, buffers
    (`tokens_per_expert` among them) and gradients are as they were when the step began; no weight
    has moved. The losses that torchtitan holds become those of the second run. Batches are not
    drawn again, and tokens not counted again.
    Outside of steps, in validation too, the programs with reads run.
    Where `row_room` is "auto", `room_choice.py` chooses the room between steps.
    A step holds its microbatches and a copy of the buffers. One that runs again takes the time of
    two.

Only `Trainer.forward_backward_step` and `train_step` are overridden, in a subclass that
torchtitan's `main` is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from moe_compile.runtime.rerun import RERUN
from torchtitan_integration.job_config import asks_for_megamoe, options_of
from torchtitan_integration.room_choice import RoomChoice, begin_anew

LOG: Final = logging.getLogger(__name__)
LARGER: Final = '. To do, if many do: write a larger megamoe.row_room, or "auto"'

Run = Callable[..., torch.Tensor]
"""Runs forward and backward of one microbatch, or of all that a pipeline splits it in; returns the
loss."""


def without_reads(trainer: type[Any]) -> type[Any]:
    """Return a subclass of torchtitan's `trainer` that runs steps again where the job asks for it.

    Any other job is trained as by `trainer`.
    """

    class RunsAgain(trainer):
        """torchtitan's trainer, whose steps may run again."""

        def __init__(self, job: Any) -> None:
            is_asked = asks_for_megamoe(job) and options_of(job).host_reads == "none"
            RERUN.begin(is_served=is_asked)
            self._step_at_hand: Step | None = None
            self._room_choice: RoomChoice | None = None
            super().__init__(job)
            if is_asked and options_of(job).row_room == "auto":
                self._room_choice = RoomChoice(Path(job.job.dump_folder), self.device)

        def train_step(self, batches: Any) -> None:
            """Train one step."""
            if not RERUN.is_served:
                super().train_step(batches)
                return
            self._step_at_hand, num_again = Step(self), RERUN.num_again
            with RERUN.reading_nothing():
                super().train_step(batches)
            self._step_at_hand = None
            if (choice := self._room_choice) is not None and choice.end_step(
                ran_again=RERUN.num_again > num_again
            ):
                begin_anew(self)

        def forward_backward_step(self, **given: Any) -> torch.Tensor:
            """Run one microbatch; after the last, all of them again where rows had no room."""
            if self._step_at_hand is None:
                return super().forward_backward_step(**given)
            return self._step_at_hand.run(super().forward_backward_step, given)

    return RunsAgain


class Step:
    """One step of a trainer."""

    def __init__(self, trainer: Any) -> None:
        """Keep the state that a second run begins with."""
        self._trainer = trainer
        self._done: list[tuple[dict[str, Any], torch.Tensor]] = []
        with torch.no_grad():
            buffers = [buffer for part in trainer.model_parts for buffer in part.buffers()]
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._is_on_gpu = trainer.device.type == "cuda"
        self._random = torch.get_rng_state()
        self._random_of_gpu = torch.cuda.get_rng_state() if self._is_on_gpu else None

    def run(self, run: Run, given: dict[str, Any]) -> torch.Tensor:
        """Run one microbatch; after the last, all of them again where rows had no room."""
        loss = run(**given)
        self._done.append((given, loss))
        trainer = self._trainer
        if len(self._done) == trainer.gradient_accumulation_steps:
            RERUN.num_steps += 1
            if RERUN.agreed(trainer.device):
                self._run_again(run)
        return loss

    def _run_again(self, run: Run) -> None:
        RERUN.num_again += 1
        LOG.warning(
            "megamoe: step %d: rows had no room on some rank, they need a row_room of %.2f: it "
            "runs again with host reads, as %d of %d steps so far%s",
            self._trainer.step,
            RERUN.needed,
            RERUN.num_again,
            RERUN.num_steps,
            "" if options_of(self._trainer.job_config).row_room == "auto" else LARGER,
        )
        self._restore()
        with RERUN.reading():
            for given, loss in self._done:
                again = run(**given)
                with torch.no_grad():
                    loss.detach().copy_(again)

    def _restore(self) -> None:
        self._trainer.optimizers.zero_grad()
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        torch.set_rng_state(self._random)
        if self._random_of_gpu is not None:
            torch.cuda.set_rng_state(self._random_of_gpu)
