"""Stages compile before the first microbatch, and train as without; counts are of microbatches."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.report.process_report import REPORT
from moe_compile.runtime.rerun import RERUN
from tests.integration.layout_table import TESTED
from tests.integration.one_rank import Recorder, settings_of
from tests.integration.titan_jobs import OURS, ranks_of, train
from tests.scheduled_layers import one_rank_group
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.compile_ahead import microbatches_alone, run_and_forget

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
    """Leaves it to torch's schedule to run each stage first."""

    @contextlib.contextmanager
    def __call__(self, rank, trainer):
        trainer.pp_schedule.num_graphs = 0
        with super().__call__(rank, trainer):
            yield


def run(pool_for, layout, folder, recorder):
    folder.mkdir()
    settings = settings_of(layout)
    ranks = ranks_of(settings)
    train(pool_for(ranks), ranks, folder, settings, OURS, recorder=recorder(folder, descends=False))
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


class Routed(nn.Module):
    """Counts the tokens of its block, and notes that a 5 has no room, nor has its first run."""

    def __init__(self):
        super().__init__()
        block = nn.Module()
        block.moe_enabled, block.moe = True, Counts()
        block.moe.register_buffer("tokens_per_expert", torch.full((2,), 7.0))
        self.layers = nn.ModuleDict({"0": block})

    def forward(self, x):
        moe = self.layers["0"].moe
        moe.tokens_per_expert += len(x)
        RERUN.add(((x == 5).any() | (moe.seen == 0)).int())
        return moe(x)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("is_searched", [True, False], ids=["searched", "known"])
def test_a_schedules_counts_and_notes_are_those_of_microbatches(microbatches, is_searched):
    """A pipeline of one stage, whose shapes are searched for in its first step; then known."""
    one_rank_group()
    stage = PipelineStage(Routed(), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, microbatches, loss_fn=lambda out, target: (out - target).sum())
    x, rows = torch.ones(6, 4), 6.0
    target = torch.zeros(6, 4)
    if not is_searched:
        schedule.step(x, target=target)
    counter = stage.submod.layers["0"].moe.tokens_per_expert.fill_(7.0)
    RERUN.taken()
    with microbatches_alone([stage.submod], microbatches):
        schedule.step(x, target=target)
    assert counter.tolist() == [7.0 + rows] * 2
    assert RERUN.taken().item() == 0
    x[0] = 5  # in the first microbatch, which is what the search was given too
    with microbatches_alone([stage.submod], microbatches):
        schedule.step(x, target=target)
    assert counter.tolist() == [7.0 + 2 * rows] * 2
    assert RERUN.taken().item() == 1


def test_a_note_of_before_outlives_a_step():
    with microbatches_alone([], 1):
        RERUN.add(torch.ones((), dtype=torch.int32))
    with microbatches_alone([], 1):
        pass
    assert RERUN.taken().item() == 1


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
