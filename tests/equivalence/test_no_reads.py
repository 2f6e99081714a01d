"""Regions without host reads: where all rows have room no bit differs, elsewhere ranks are told.

In chunks, values are those of the program with reads in as many chunks of tokens.
"""

import math

import pytest
import torch
import torch.distributed as dist

from moe_compile.errors import InvalidConfig
from moe_compile.report.process_report import REPORT
from moe_compile.report.region_reports import CHUNKED, NO_READS
from moe_compile.runtime.rerun import RERUN
from moe_compile.testing.mirrored_rank import MirroredGroup
from tests.layers import FusedGateUp, GroupedExperts, LoopExperts
from tests.padded_layers import Checkpointed, MeanOfRows, PaddedGroups, TwoLayers
from tests.slow_parameters import slow_but

WIDTH, HIDDEN, EXPERTS, TOP_K = 64, 32, 8, 2
OPTIONS = {"megamoe.codegen": "fx", "megamoe.host_reads": "none", "megamoe.equal_tokens": True}


def step(program, layer, tokens):
    """Return the output and all gradients of a step, by name."""
    x = tokens.clone().requires_grad_()
    out = program(x)
    out.backward(0.5 * tokens + 1)
    return {"out": out.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}


def tokens_of(rank, seed):
    generator = torch.Generator().manual_seed(2 * seed + rank)
    return torch.randn(32, WIDTH, generator=generator).to(torch.bfloat16)


def layer_of(style):
    return style(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD)


def compiled(style, **options):
    torch._dynamo.reset()
    layer, given = layer_of(style), {**OPTIONS, **options}
    return torch.compile(layer, backend="megamoe", fullgraph=True, options=given), layer


def differing(style, tokens, program, layer, found=None):
    """Return the names of the tensors that are not those of eager, or of the program with reads."""
    layer.zero_grad()
    found = step(program, layer, tokens) if found is None else found
    if style is None:
        layer.zero_grad()
        with RERUN.reading():
            expected = step(program, layer, tokens)
    else:
        expected = step(eager := layer_of(style), eager, tokens)
    return [name for name, value in found.items() if not torch.equal(value, expected[name])]


def in_chunks(num):
    return {"megamoe.chunks": num, "megamoe.chunk_by": "tokens"} if num > 1 else {}


def serve():
    RERUN.begin(is_served=True)
    return RERUN.reading_nothing()


def room_in_thousandths(factor):
    """Return the room over an even share of 64 rows, rounded as notes are."""
    return math.ceil(math.ceil(factor * 32) * 1000 / 32) / 1000


def with_room(rank, style, room, seeds, num=1):
    """Return for every step the tensors that differ from eager, this rank's note, what is agreed,
    and the tensors that differ once the step ran again; then the verdicts."""
    before, steps = len(REPORT.compilations), []
    with serve():
        program, layer = compiled(style, **{"megamoe.row_room": room}, **in_chunks(num))
        of = style if num == 1 else None
        for seed in seeds:
            tokens = tokens_of(rank, seed)
            wrong = differing(of, tokens, program, layer)
            own = bool(RERUN._note[0])
            agreed = RERUN.agreed(torch.device("cpu"))
            assert agreed == (RERUN.needed > room_in_thousandths(room))
            with RERUN.reading():
                again = differing(of, tokens, program, layer)
            steps.append((wrong, own, agreed, again))
    RERUN.begin(is_served=False)
    found = [r for c in REPORT.compilations[before:] for r in c.regions]
    return steps, [(r.verdict, r.num_host_reads, r.num_chunks) for r in found]


@pytest.mark.parametrize("style", slow_but([TwoLayers], [PaddedGroups, TwoLayers, Checkpointed]))
def test_rows_with_room_have_the_bits_of_the_program(two_ranks, style):
    for steps, verdicts in two_ranks.run(with_room, style, 2.0, range(2)):
        assert steps == [([], False, False, [])] * 2
        assert (NO_READS, 0, 1) in verdicts


@pytest.mark.parametrize(
    ("style", "num"),
    slow_but([(PaddedGroups, 3)], [(PaddedGroups, 3), (TwoLayers, 2), (Checkpointed, 4)]),
)
def test_chunks_with_room_have_the_bits_of_the_chunks_with_reads(two_ranks, style, num):
    for steps, verdicts in two_ranks.run(with_room, style, 2.0, range(2), num):
        assert steps == [([], False, False, [])] * 2
        assert {(NO_READS, 0, num), (CHUNKED, 1, num)} <= {*verdicts}


@pytest.mark.parametrize("num", slow_but([1], [1, 2]))
def test_ranks_agree_on_steps_whose_rows_have_no_room_and_run_them_again(two_ranks, num):
    """Values of the other steps are the program's; of these, once they ran again."""
    ranks = two_ranks.run(with_room, PaddedGroups, 1.05, range(8), num)
    agreed = [[step[2] for step in steps] for steps, _ in ranks]
    assert agreed[0] == agreed[1] and len(set(agreed[0])) == 2
    notes = [[step[1] for step in steps] for steps, _ in ranks]
    assert [any(each) for each in zip(*notes, strict=True)] == agreed[0]
    assert notes[0] != notes[1]
    for steps, _ in ranks:
        assert all(again == [] for *_, again in steps)
        assert all(wrong == [] for wrong, _, is_again, _ in steps if not is_again)


def poisoned(rank, num):
    """Return the tensors that differ, padding being NaN on every way; and whether there was any."""
    filled = []

    def from_others(group, sent):
        if not sent.is_floating_point():
            return sent
        is_padding = (sent == 0).all(1)
        filled.append(bool(is_padding.any()))
        return torch.where(is_padding[:, None], torch.nan, sent)

    tokens = tokens_of(rank, 0)
    with serve():
        program, layer = compiled(PaddedGroups, **{"megamoe.row_room": 1.9}, **in_chunks(num))
        given, MirroredGroup._from_others = MirroredGroup._from_others, from_others
        try:
            found = step(program, layer, tokens)
        finally:
            MirroredGroup._from_others = given
        wrong = differing(PaddedGroups if num == 1 else None, tokens, program, layer, found)
    RERUN.begin(is_served=False)
    return wrong, filled


@pytest.mark.parametrize("num", slow_but([2], [1, 2, 4]))
def test_padding_is_never_read_nor_its_gradient(mirrored_ranks, num):
    for wrong, filled in mirrored_ranks.run(poisoned, num):
        assert filled == [True] * 4 * num  # dispatch, combine, and their gradients
        assert wrong == []


def nan_token(rank):
    """Return which tokens of the output are finite where one token is NaN."""
    tokens = tokens_of(rank, 0)
    with serve():
        program, layer = compiled(PaddedGroups, **{"megamoe.row_room": 2.0})
        expected, found = (step(f, m, tokens)["out"] for f, m in ((layer, layer), (program, layer)))
        tokens[3] = torch.nan
        broken = program(tokens.requires_grad_())  # as before: no program is compiled anew
    RERUN.begin(is_served=False)
    assert torch.equal(expected, found)
    return broken.isfinite().all(1).tolist()


def test_a_token_that_is_nan_spoils_no_other(mirrored_ranks):
    for finite in mirrored_ranks.run(nan_token):
        assert [number for number, is_finite in enumerate(finite) if not is_finite] == [3]


LEFT = {
    GroupedExperts: "could not be evaluated",
    LoopExperts: "an operator outside reads a value",
    FusedGateUp: "padding rows follow",
    MeanOfRows: "mixes rows",
}


def why_left(rank, style):
    """Return the remarks on a region that keeps its read, and what differs."""
    before = len(REPORT.compilations)
    with serve():
        program, layer = compiled(style)
        wrong = differing(style, tokens_of(rank, 0), program, layer)
    RERUN.begin(is_served=False)
    regions = [r for c in REPORT.compilations[before:] for r in c.regions]
    return wrong, [(r.verdict != NO_READS, r.num_host_reads > 0, r.remarks) for r in regions]


@pytest.mark.parametrize("style", LEFT, ids=lambda style: style.__name__)
def test_experts_that_may_read_rows_behind_keep_the_read_and_say_why(mirrored_ranks, style):
    for wrong, ((is_left, reads, remarks),) in mirrored_ranks.run(why_left, style):
        assert wrong == [] and is_left and reads
        (said,) = [
            remark for remark in remarks if remark.startswith("the host still reads its counts")
        ]
        assert LEFT[style] in said, said


def refused(rank):
    program, _ = compiled(PaddedGroups)
    with pytest.raises(InvalidConfig, match="a trainer that runs a step again"):
        program(tokens_of(rank, 0))


def test_a_backend_alone_refuses_and_says_what_to_write(mirrored_ranks):
    mirrored_ranks.run(refused)
