"""Drawn blocks in parts of their batch equal gradient accumulation over the parts, bit for bit.

The rewritten Dynamo graph itself is run, and differentiated by autograd: nothing else is compiled.
"""

import random
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_compile.journal.reasons import Reason
from moe_compile.testing.mirrored_rank import become_mirrored
from passes.normalize_exchanges import NormalizeExchanges
from passes.replay.batch_parts import part_sizes
from passes.split_batch import SplitBatch
from tests.batch.drawn_blocks import (
    APART,
    DTYPE,
    FORMS,
    MIXED,
    TALLIES,
    WIDTH,
    Drawn,
    DrawnBlock,
)
from tests.capture import state
from tests.slow_parameters import exhaustive_but, slow_but

ATTENTION = [name for name in APART if "attention" in name or name == "fewer KV heads"]
PER_TEST = 100
FIRST = 1000


def drawn(seed):
    """Return what a block is made of, how many parts it is to run in, and the sizes of its input.

    Positions attend to each other in all of them, so that sequences alone come apart.
    """
    draw = random.Random(seed)
    names = [*draw.sample(sorted(APART), draw.randint(1, 4)), draw.choice(ATTENTION)]
    names += ["experts"] * draw.choice([1, 1, 1, 2])
    names += [draw.choice(sorted(MIXED))] if draw.random() < 0.1 else []
    draw.shuffle(names)
    parts = draw.choice([2, 2, 3])
    sizes = (draw.randint(parts, 5), draw.choice([2, 3, 4, 8]))
    forms = {name: draw.choice(choices) for name, choices in FORMS.items()}
    return (names, forms, draw.choice(sorted(TALLIES)), draw.choice([1, 2, 2, 3])), parts, sizes


def run(block, inputs, gradients, program):
    """Go forward and back once for each of `inputs`; return all that is computed, by name."""
    results = []
    for x, gradient in zip(inputs, gradients, strict=True):
        results.append(program(x))
        results[-1].backward(gradient)
    found = {"output": torch.cat([y.detach() for y in results])}
    found |= {f"gradient of {name}": p.grad for name, p in block.named_parameters()}
    return found | dict(block.named_buffers())


def in_parts(block, parts, reports):
    """Return `block` run by its Dynamo graph, once `split_batch` has been at it."""

    def split(gm, example_inputs):
        NormalizeExchanges().run(gm.graph, state())
        reports.append(SplitBatch().run(gm.graph, state(batch_parts=parts)))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(block, backend=split, fullgraph=True)


def differences(seed):
    """Return what differs of the block of this seed, and the report on its graph."""
    return compared(*drawn(seed), seed)


def compared(made, parts, sizes, seed=0):
    """Return what differs of a block in parts from accumulation, and the report on its graph."""
    batch, positions = sizes
    own = torch.Generator().manual_seed(seed)
    shape = (2, batch, positions, WIDTH)
    (x, gradient), reports = torch.randn(shape, generator=own).to(DTYPE), []
    sizes = part_sizes(batch, parts)
    blocks = [DrawnBlock(*made, dist.group.WORLD, positions) for _ in range(2)]
    whole, cut = (x.clone().requires_grad_() for _ in range(2))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        ours = run(blocks[0], [whole], [gradient], in_parts(blocks[0], parts, reports))
    if not reports[0].applied:
        return [], reports[0]
    theirs = run(blocks[1], cut.split(sizes), gradient.split(sizes), blocks[1])
    ours["input gradient"], theirs["input gradient"] = whole.grad, cut.grad
    return [n for n, t in theirs.items() if not same(t, ours[n])], reports[0]


def differences_of_any_size(seed):
    """Return what differs of steps with other numbers of sequences, and the reports on graphs."""
    made, parts, (_, positions) = drawn(seed)
    own, reports, found = torch.Generator().manual_seed(seed), [], []
    blocks = [DrawnBlock(*made, dist.group.WORLD, positions) for _ in range(2)]
    program = in_parts(blocks[0], parts, reports)
    for batch in (2 * parts + 1, 2 * parts, 2 * parts + 2):
        x, gradient = torch.randn(2, batch, positions, WIDTH, generator=own).to(DTYPE)
        whole, cut = (x.clone().requires_grad_() for _ in range(2))
        torch._dynamo.mark_dynamic(whole, 0)
        for block in blocks:
            block.zero_grad()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            ours = run(blocks[0], [whole], [gradient], program)
        if not reports[0].applied:
            return [], reports
        sizes = part_sizes(batch, parts)
        theirs = run(blocks[1], cut.split(sizes), gradient.split(sizes), blocks[1])
        ours["input gradient"], theirs["input gradient"] = whole.grad, cut.grad
        found += [(batch, n) for n, t in theirs.items() if not same(t, ours[n])]
    return found, reports


def same(theirs, ours):
    if theirs is None or ours is None:
        return theirs is ours
    return torch.equal(theirs, ours)


def check(seeds):
    """Check the blocks of some seeds; return how many ran in parts."""
    become_mirrored()
    num_split = 0
    for seed in seeds:
        (names, *_), *_ = made = drawn(seed)
        differing, report = differences(seed)
        assert not differing, f"seed {seed}, {made}: {differing}"
        mixes = [name for name in names if name in MIXED]
        assert not (mixes and report.applied), f"seed {seed}: {mixes} did not keep it whole"
        num_split += bool(report.applied)
    return num_split


class CommonForms(Drawn):
    """Counts by `+=`, weighs rows by `scores[order, None]`, and drops nothing of them."""

    forms: ClassVar = {name: choices[0] for name, choices in FORMS.items()}

    def exchange_counts(self, counts):
        with torch.no_grad():
            self.seen += counts
        return super().exchange_counts(counts)

    def total(self, x, order, out, scores):
        out = F.dropout(out * scores.flatten()[order, None].to(out.dtype), p=0.0)
        return torch.zeros_like(x).index_add(0, order // self.top_k, out)


@pytest.mark.parametrize("times", [1, 2])
def test_common_forms_equal_gradient_accumulation(times):
    """What adds to a counter by `+=` returns it: the counts of all parts are added to it once, and
    of each time that the layer runs."""
    become_mirrored()
    made = (["attention", *["experts"] * times], CommonForms.forms, "compare", 2)
    blocks = [DrawnBlock(*made, dist.group.WORLD, 4) for _ in range(2)]
    for block in blocks:
        block.moe.__class__ = type("Forms", (CommonForms,), {"tally": type(block.moe).tally})
    x, gradient = torch.randn(2, 5, 4, WIDTH, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    (whole, cut), reports = (x.clone().requires_grad_() for _ in range(2)), []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        ours = run(blocks[0], [whole], [gradient], in_parts(blocks[0], 2, reports))
    assert reports[0].applied, reports[0].skipped
    theirs = run(blocks[1], cut.split((3, 2)), gradient.split((3, 2)), blocks[1])
    assert [name for name, t in theirs.items() if not same(t, ours[name])] == []
    assert torch.equal(whole.grad, cut.grad)


REPEATED = (
    "a token ahead of each", "queries of a weight", "a row for each token", "a weight expanded",
)  # fmt: skip


def test_what_repeats_a_parameter_has_the_gradient_of_accumulation():
    become_mirrored()
    forms = {name: choices[0] for name, choices in FORMS.items()}
    made = ([*REPEATED, "attention", "experts"], forms, "compare", 2)
    differing, report = compared(made, 2, (7, 3), seed=1)
    assert report.applied and not differing, (differing, report)


def repeated_in_turn(m, x):
    return x + m.gain[None].repeat_interleave(x.shape[0], 0)[:, None]


def test_what_repeats_a_parameter_otherwise_is_left_whole(monkeypatch):
    become_mirrored()
    monkeypatch.setitem(APART, "in turn", repeated_in_turn)
    forms = {name: choices[0] for name, choices in FORMS.items()}
    _, report = compared((["in turn", "attention", "experts"], forms, "compare", 2), 2, (6, 3))
    (skipped,) = report.skipped
    assert skipped.reason is Reason.BATCH_LOST and "repeat_interleave" in skipped.detail


@pytest.mark.slow
def test_blocks_in_parts_equal_gradient_accumulation():
    assert check(range(12)) >= 8


@pytest.mark.parametrize("first", exhaustive_but([FIRST], range(FIRST, 2300, PER_TEST)))
def test_more_blocks_in_parts_equal_gradient_accumulation(first):
    """1,300 blocks, of which more than 1,000 run in parts."""
    assert check(range(first, first + PER_TEST)) >= 0.7 * PER_TEST


@pytest.mark.parametrize(("first", "last"), slow_but([(0, 4)], [(4, 24)]))
def test_blocks_of_any_batch_size_equal_gradient_accumulation(first, last):
    """Each is compiled once, for steps of all sizes."""
    become_mirrored()
    num_split = 0
    for seed in range(first, last):
        differing, reports = differences_of_any_size(seed)
        assert not differing, f"seed {seed}: {differing}"
        assert len(reports) == 1
        num_split += bool(reports[0].applied)
    assert num_split >= 0.7 * (last - first)
