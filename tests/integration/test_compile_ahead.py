"""Stages of a pipeline compile before the first microbatch, and the job trains as without that."""

import contextlib

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.report.process_report import REPORT
from tests.integration.layout_table import TESTED
from tests.integration.one_rank import Recorder, num_ranks, settings_of
from tests.integration.titan_jobs import OURS, train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.compile_ahead import run_and_forget

PIPELINE, INTERLEAVED = TESTED[13], TESTED[14]
TENSOR = next(layout for layout in TESTED if layout.pp > 1 and layout.tp > 1)


class Counting(Recorder):
    """Also notes how many graphs were compiled ahead, and in all."""

    @contextlib.contextmanager
    def __call__(self, rank, trainer):
        before = len(REPORT.compilations)
        with super().__call__(rank, trainer):
            yield
        graphs = (trainer.pp_schedule.num_graphs, len(REPORT.compilations) - before)
        torch.save(graphs, self.folder / f"graphs{rank}.pt")


class AsTheyCome(Recorder):
    """Steps torch's own schedule."""

    @contextlib.contextmanager
    def __call__(self, rank, trainer):
        trainer.pp_schedule = trainer.pp_schedule._schedule
        with super().__call__(rank, trainer):
            yield


def run(pool_for, layout, folder, recorder):
    folder.mkdir()
    ranks = num_ranks(layout)
    job = (settings_of(layout), OURS)
    train(pool_for(ranks), ranks, folder, *job, recorder=recorder(folder, descends=False))
    return ranks


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return x * self.weight


def test_a_run_ahead_leaves_nothing_behind():
    """In a pipeline torch's own search for shapes clears gradients too, and hides this."""
    part, x = Counts(), torch.ones(4, requires_grad=True)
    run_and_forget(part, (x,), {})
    assert x.grad.tolist() == [1.0] * 4  # it ran
    assert part.weight.grad is None and part.seen.item() == 0


@pytest.mark.slow
def test_all_is_compiled_before_the_first_microbatch(pool_for, tmp_path):
    ranks = run(pool_for, PIPELINE, tmp_path / "job", Counting)
    for rank in range(ranks):
        ahead, in_all = torch.load(tmp_path / f"job/graphs{rank}.pt")
        assert ahead == in_all > 0


@pytest.mark.parametrize(
    "layout", exhaustive_but([INTERLEAVED], [INTERLEAVED, TENSOR]), ids=["interleaved", "tensor"]
)
def test_the_job_trains_as_without(pool_for, tmp_path, layout):
    ranks = run(pool_for, layout, tmp_path / "ahead", Counting)
    run(pool_for, layout, tmp_path / "not", AsTheyCome)
    for rank in range(ranks):
        ahead, in_all = torch.load(tmp_path / f"ahead/graphs{rank}.pt")
        assert ahead == in_all > 0
        one, other = (torch.load(tmp_path / f"{job}/rank{rank}.pt") for job in ("ahead", "not"))
        for kind in ("gradients", "after", "moments"):
            assert one[kind].keys() == other[kind].keys()
            for name, value in one[kind].items():
                assert torch.equal(value, other[kind][name]), (kind, name)
