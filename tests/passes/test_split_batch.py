"""Which graphs are not run in parts of their batch, and what those that are look like."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from torch.utils.checkpoint import checkpoint

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import RegionRefused
from moe_compile.graph.query import expression_of, is_all_to_all, is_integer, tensor_of
from moe_compile.journal.reasons import Reason
from moe_compile.testing.programs.grammar import Capacity
from tests.batch_layers import POSITIONS, WIDTH, Block, Counted, Recomputed, Transposed
from tests.capture import dynamo_graphs
from tests.dispatch_layers import (
    AddedInPlace,
    Around,
    ByEinsum,
    ByInverse,
    InColumns,
    InOrderWeighted,
    IntoEmpty,
    OfWrittenLength,
    OneOrAll,
    OntoNewZeros,
    OntoZeros,
    WeighedByIndex,
    WeightedInOrder,
)
from tests.layer_programs import layer_of
from tests.layers import GroupedExperts, LoopExperts, SegmentStarts
from tests.loop_layers import CenteredExperts
from tests.slow_parameters import slow_but


def drawn(size=4):
    return torch.randn(size, POSITIONS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


class OfCapacity(nn.Module):
    def __init__(self):
        super().__init__()
        layer = Capacity(local=4, top_k=2)
        self.layer = layer_of(layer, width=WIDTH, hidden=64, dtype="bfloat16")

    def forward(self, x):
        return self.layer(x.flatten(0, 1))[0].view(x.shape)


def verdicts(program, x, **options):
    (gm, *_) = dynamo_graphs(program, x)
    settings = {"hardware": "cpu", "chunks": 1, "batch_parts": 2} | options
    _, compilation = rewrite(gm, MegaMoEConfig(**settings))
    records = [r for _, r in compilation.journal.records if r.pass_name == "split_batch"]
    skipped = [verdict.reason for record in records for verdict in record.skipped]
    return gm, skipped, compilation


OTHER_SUMS = [IntoEmpty, WeightedInOrder, ByInverse, ByEinsum, InColumns, AddedInPlace]


@pytest.mark.parametrize("layer", OTHER_SUMS)
def test_sums_of_rows_put_in_order_are_known(fake_ranks, layer):
    _, skipped, compilation = verdicts(Block(layer, torch.bfloat16), drawn())
    assert skipped == [], compilation.rewrites


@pytest.mark.parametrize("layer", [WeighedByIndex, OfWrittenLength, OneOrAll])
def test_rows_of_a_part_are_as_many_as_it_has(fake_ranks, layer):
    _, skipped, compilation = verdicts(Block(layer, torch.bfloat16), drawn())
    assert skipped == [], compilation.rewrites


class OfBits(Block):
    """Weighs numbers by their last bit."""

    def forward(self, x):
        return super().forward(x) * (x.detach().view(torch.int16) % 2)


def test_a_part_reads_its_numbers_as_bits(fake_ranks):
    """`view` has a type here, and no sizes."""
    gm, skipped, _ = verdicts(OfBits(GroupedExperts, torch.bfloat16), drawn())
    assert skipped == []
    seen = [n for n in gm.graph.nodes if n.target == "view" and torch.int16 in n.args]
    assert len(seen) == 2


class ChosenAnew(Around):
    """Tokens of the last expert go to the first, which they may have chosen as well."""

    def by_expert(self, flat):
        return super().by_expert(torch.where(flat == flat.max(), 0, flat))


def test_what_is_made_of_the_choice_is_named(fake_ranks):
    _, skipped, compilation = verdicts(Block(ChosenAnew, torch.bfloat16), drawn())
    assert skipped == [Reason.CHOSEN_TWICE]
    assert "(`where` at test_split_batch.py:" in compilation.rewrites[0]


class WrittenZeros(OntoZeros):
    """Something is written into the zeros before rows are added to them."""

    def zeros(self, x):
        zeros = super().zeros(x)
        zeros[0] = 1
        return zeros


class OntoOnes(OntoZeros):
    def zeros(self, x):
        return torch.ones(x.shape, dtype=x.dtype)


class OntoTable(OntoZeros):
    """Each token of the batch has a row of its own in a table of constants."""

    def zeros(self, x):
        return torch.arange(x.shape[0], dtype=x.dtype)[:, None] * torch.ones(
            x.shape[1], dtype=x.dtype
        )


@pytest.mark.parametrize(
    "layer", slow_but([OntoNewZeros, OntoTable], [OntoZeros, OntoNewZeros, OntoOnes, OntoTable])
)
def test_what_sums_are_added_to_is_as_large_as_a_part(fake_ranks, layer):
    gm, skipped, compilation = verdicts(Block(layer, torch.bfloat16), drawn())
    assert skipped == []
    (applied,) = compilation.rewrites
    assert applied.startswith("split_batch: applied to the batch, in 2 parts (bounded: ")
    added = [n for n in gm.graph.nodes if n.target == "index_add"]
    assert [len(n.args[0].meta["example_value"]) for n in added] == [2 * POSITIONS] * 2


class OfItsType(OntoZeros):
    """What has no batch is given the type of what has."""

    def zeros(self, x):
        return torch.zeros_like(x) + x.new_ones(x.shape[1])


def test_constants_that_read_a_type_off_the_batch_are_named(fake_ranks):
    _, skipped, compilation = verdicts(Block(OfItsType, torch.bfloat16), drawn())
    assert skipped == [Reason.BATCH_LOST]
    (said,) = compilation.rewrites
    assert "`.new_ones()` at test_split_batch.py:" in said
    assert (
        "in zeros reads the type of a tensor with the batch dimension, but not its values" in said
    )


def test_what_is_written_into_zeros_is_not_left_out(fake_ranks):
    _, skipped, _ = verdicts(Block(WrittenZeros, torch.bfloat16), drawn())
    assert skipped == [Reason.WRITTEN]


class OfSaidLength(OntoZeros):
    """An operator is told how long its result is, which is not how long it is of a part."""

    def zeros(self, x):
        twice = x.repeat_interleave(2, 0, output_size=2 * len(x))
        return twice.view(len(x), 2, -1).sum(1)


def test_a_graph_that_a_part_cannot_run_is_left_as_it_was(fake_ranks):
    program = Block(OfSaidLength, torch.bfloat16)
    plain, *_ = verdicts(program, drawn(), batch_parts=1)
    gm, skipped, _ = verdicts(program, drawn())
    assert skipped == [Reason.BATCH_LOST]
    assert len(gm.graph.nodes) == len(plain.graph.nodes)


def by_position(x):
    """Put tokens in the order of positions, sequences one after another at each."""
    return x.view(4, POSITIONS, -1).transpose(0, 1).flatten(0, 1)


class OntoOthers(OntoZeros):
    def zeros(self, x):
        return by_position(x)


class WeighedByOthers(InOrderWeighted):
    def summed(self, by_token, scores):
        return super().summed(by_token, by_position(scores))


class ChosenByOthers(Around):
    def route(self, x):
        return super().route(by_position(x))


@pytest.mark.parametrize(
    "layer", slow_but([OntoOthers], [OntoOthers, WeighedByOthers, ChosenByOthers])
)
def test_what_is_of_other_tokens_is_refused(fake_ranks, layer):
    """A token of one part would be added to, weighted as, or sent like one of another."""
    _, skipped, compilation = verdicts(Block(layer, torch.bfloat16), drawn())
    assert len(skipped) == 1
    assert compilation.rewrites[0].startswith("split_batch: left alone the batch")


class Gathered(Block):
    """Sequences of all ranks are gathered: a rank's are others of the whole than of a part."""

    def attend(self, x):
        whole = all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        mine = dist.get_rank() * x.shape[0]
        return super().attend(whole[mine : mine + x.shape[0]])


class SentBySequence(Block):
    """Each rank is sent other sequences."""

    def forward(self, x):
        return super().forward(all_to_all_single_autograd(x, None, None, dist.group.WORLD))


@pytest.mark.parametrize("block", [Gathered, SentBySequence])
def test_collectives_that_are_not_followed_are_refused(fake_ranks, block):
    _, skipped, _ = verdicts(block(GroupedExperts, torch.bfloat16), drawn())
    assert len(skipped) == 1


def of_any_size(x, dim=0, **bounds):
    torch._dynamo.mark_dynamic(x, dim, **bounds)
    return x


def sizes_of_parts(gm):
    rows = [n for n in gm.graph.nodes if is_all_to_all(n) and not is_integer(n)]
    sent = [n.all_input_nodes[0].meta["example_value"].shape[0] for n in rows[:2]]
    return [str(expression_of(size)) for size in reversed(sent)]


@pytest.mark.parametrize("dims", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_a_batch_of_any_size_is_cut_by_its_size(fake_ranks, dims):
    """Of sequences of any length too; neither is a number of this compilation."""
    x = drawn(7)
    for dim in dims:
        of_any_size(x, dim)
    gm, skipped, compilation = verdicts(OfAnyLength(GroupedExperts, torch.bfloat16), x)
    assert skipped == []
    assert len(compilation.regions) == 2
    batch, *length = (str(n.target) for n in gm.graph.nodes if n.target in ("s77", "s27"))
    rows = "*".join(["2", *length]) if length else str(2 * POSITIONS)
    assert sizes_of_parts(gm) == [f"{rows}*((({batch} + 1)//2))", f"{rows}*(({batch}//2))"]


class OfAnyLength(Block):
    """A block without rotary positions, of which a buffer has as many as one compilation."""

    def rotated(self, x):
        return x


SAID = [
    (3, {}, "the batch size is marked as dynamic, and 2 parts need at least 4"),
    (8, {"min": 3, "max": 9}, "the batch size may be less than 4, but 2 parts need at least 4"),
]


@pytest.mark.parametrize(
    ("size", "bounds", "detail"),
    slow_but(SAID[:1], SAID),
)
def test_what_a_program_says_of_a_size_is_kept(fake_ranks, size, bounds, detail):
    """A guard that breaks what the program says of its sizes would be an error of torch's."""
    x = of_any_size(drawn(size), **bounds)
    _, skipped, compilation = verdicts(Block(GroupedExperts, torch.bfloat16), x)
    assert skipped == [Reason.BATCH_TOO_SMALL]
    assert detail in compilation.rewrites[0]
    bounded = of_any_size(drawn(8), min=4, max=9)
    assert verdicts(Block(GroupedExperts, torch.bfloat16), bounded)[1] == []


class ByHalves(Block):
    """Sequences of the first half, and of the second, side by side: an even number of them."""

    def forward(self, x):
        halves = x.view(2, -1, POSITIONS, WIDTH).transpose(0, 1).reshape(x.shape)
        return super().forward(halves)


class TimesSize(Block):
    def forward(self, x):
        return super().forward(x) * len(x)


class BySizeOfWhole(Block):
    """Reads a size off what runs in parts, for a constant that is made for all of them."""

    def attend(self, x):
        return super().attend(x) * torch.full((x * 2).shape, 2.0, dtype=x.dtype)


class RecomputedAttention(Block):
    """A checkpoint without experts: its function stays one node."""

    def attend(self, x):
        return checkpoint(super().attend, x, use_reentrant=False)


def test_a_function_that_is_not_followed_is_named_not_its_first_reader(fake_ranks):
    program = RecomputedAttention(GroupedExperts, torch.bfloat16)
    _, skipped, compilation = verdicts(program, drawn())
    assert skipped == [Reason.BATCH_LOST]
    assert "`tag_activation_checkpoint` at test_split_batch.py:" in compilation.rewrites[0]
    assert "in attend calls a function, through which megamoe" in compilation.rewrites[0]


OF_SIZES = [
    (ByHalves, "known at compile time"),
    (TimesSize, "known at compile time"),
    (BySizeOfWhole, "a size of the whole"),
]


@pytest.mark.parametrize(
    ("block", "detail"),
    slow_but(OF_SIZES[1:], OF_SIZES),
)
def test_what_is_computed_of_the_size_of_a_batch_is_refused(fake_ranks, block, detail):
    plain = verdicts(block(GroupedExperts, torch.bfloat16), of_any_size(drawn(8)), batch_parts=1)
    x = of_any_size(drawn(8))
    gm, skipped, compilation = verdicts(block(GroupedExperts, torch.bfloat16), x)
    assert skipped == [Reason.BATCH_LOST]
    assert detail in compilation.rewrites[0]
    assert len(gm.graph.nodes) == len(plain[0].graph.nodes)


def test_experts_with_a_capacity_drop_what_is_too_much_of_the_whole_batch(fake_ranks):
    _, skipped, compilation = verdicts(OfCapacity(), drawn())
    assert skipped == [Reason.BATCH_CAPACITY]
    assert len(compilation.regions) == 1
    with pytest.raises(RegionRefused, match="batch_parts"):
        verdicts(OfCapacity(), drawn(), strict=True)


def test_experts_that_need_all_their_rows_have_those_of_one_part_alone(fake_ranks):
    """In chunks of experts an expert has all its rows, and such a layer runs in them."""
    _, skipped, compilation = verdicts(Block(CenteredExperts, torch.bfloat16), drawn(), chunks=2)
    assert skipped == [Reason.ROWS_MIXED]
    assert [region.num_chunks for region in compilation.regions] == [2]


def test_graphs_without_experts_are_not_spoken_of(fake_ranks):
    _, skipped, _ = verdicts(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), drawn())
    assert skipped == []


class LeftOff(Block):
    """Gradients are off once it has run."""

    def forward(self, x):
        y = super().forward(x)
        torch.set_grad_enabled(False)
        return y


def test_parts_do_not_run_in_a_mode_that_is_left_on(fake_ranks):
    try:
        _, skipped, _ = verdicts(LeftOff(GroupedExperts, torch.bfloat16), drawn())
    finally:
        torch.set_grad_enabled(True)
    assert skipped == [Reason.STATE_CHANGES]


class UnderAutocast(Block):
    """Attention, not the experts, runs under autocast."""

    def attend(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().attend(x)


def test_modes_that_other_parts_switch_leave_a_region_what_it_is(fake_ranks):
    _, skipped, compilation = verdicts(UnderAutocast(GroupedExperts, torch.bfloat16), drawn())
    assert skipped == []
    assert len(compilation.regions) == 2


def test_nodes_of_parts_have_the_types_that_autocast_makes(fake_ranks):
    x = drawn().detach().float().requires_grad_()
    gm, skipped, _ = verdicts(UnderAutocast(LoopExperts), x)
    attention = [n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert skipped == []
    assert [tensor_of(node).dtype for node in attention] == [torch.bfloat16] * 2


def test_every_part_is_dispatched_before_the_first_part_is_combined(fake_ranks):
    gm, skipped, compilation = verdicts(Block(Counted, torch.bfloat16), drawn(3), batch_parts=3)
    assert skipped == []
    rows = [n for n in gm.graph.nodes if is_all_to_all(n) and not is_integer(n)]
    widths = [n.all_input_nodes[0].meta["example_value"].shape for n in rows]
    assert len(widths) == 6
    assert [type(rows) is int for rows, _ in widths] == [True] * 3 + [False] * 3
    (applied,) = compilation.rewrites
    assert applied.startswith("split_batch: applied to the batch, in 3 parts (bounded: ")


@pytest.mark.parametrize("layer", [GroupedExperts, SegmentStarts])
def test_what_is_checkpointed_runs_in_parts(fake_ranks, layer):
    """Also where the counts that travel are a view of those that are read."""
    _, skipped, compilation = verdicts(Recomputed(layer, torch.bfloat16), drawn())
    assert skipped == []
    assert len(compilation.regions) == 2


@pytest.mark.parametrize(("parts", "has_room"), [(1, False), (2, True)])
def test_what_the_whole_batch_would_hold_is_room_for_the_schedule(fake_ranks, parts, has_room):
    (gm, *_) = dynamo_graphs(Block(GroupedExperts, torch.bfloat16), drawn())
    state, _ = rewrite(gm, MegaMoEConfig(hardware="cpu", chunks=1, batch_parts=parts))
    assert state.is_chunked == has_room


@pytest.mark.parametrize("layer", [GroupedExperts, Transposed])
@pytest.mark.parametrize("parts", slow_but([2], [2, 3]))
def test_regions_of_parts_that_share_weights_run_in_chunks(fake_ranks, layer, parts):
    """Experts of one part then run behind those of the next: each has its weights by a name."""
    _, _, compilation = verdicts(Block(layer, torch.bfloat16), drawn(), batch_parts=parts, chunks=2)
    assert [region.num_chunks for region in compilation.regions] == [2] * parts


def test_what_leaves_the_graph_is_written_anew_by_the_kernel_that_wrote_it(fake_ranks, monkeypatch):
    """torchtitan's layer keeps the indices of its rows, which a kernel writes on a GPU."""
    titan_layer = pytest.importorskip("tests.proof.titan_layer", reason="needs torchtitan")
    indices = "torchtitan.models.moe.utils.generate_permute_indices"
    monkeypatch.setattr(indices, titan_layer.permute_indices_by_kernel)
    layer = titan_layer.TitanExperts(WIDTH, 32, 8, 2, fake_ranks, True).to(torch.bfloat16)
    gm, skipped, _ = verdicts(layer, torch.randn(32, WIDTH, dtype=torch.bfloat16))
    assert skipped == []
    written = [n.args[2] for n in gm.graph.nodes if "fill_indices" in str(n.target)]
    (output,) = gm.graph.find_nodes(op="output")
    assert sorted(n in output.all_input_nodes for n in written) == [False, False, True]
