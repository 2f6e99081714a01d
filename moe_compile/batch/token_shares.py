"""Tokens that ranks have in common and divide: each routes as many, and results are summed.

Contract
    A `TokenShare` is proven: of T tokens that all of n ranks have, this rank sends the rows of its
    n-th part, in the order of ranks. Their results are added up over the ranks, after nothing but
    sums, views and casts. Whichever rank sends a token's rows, the sums are the same except for
    the order of terms: a part of the batch is divided by the same rule, as the program does with a
    smaller batch.
    All of the ranks are assumed to have the same parameters and buffers, and to run the same
    program, as `DTensor` assumes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch.distributed as dist
import torch.fx as fx

from moe_compile.batch.batch_split import SplitRegion, TokenShare
from moe_compile.batch.sharded_rules import same_on, summed_over, takes_own_part
from moe_compile.dims.arguments import CASTS
from moe_compile.dims.factors import Dims, Factor, Lost, flat
from moe_compile.dims.tracker import Tracker, is_movement
from moe_compile.graph.query import is_launch, known_rows, operator_at
from moe_compile.graph.torch_calls import torch_name
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.token_index import TokenIndex
from moe_compile.regions.token_regions import TokenRows


def find_share(region: MoERegion, found: TokenRows) -> TokenShare | None:
    """Return the share of tokens whose rows a region has, None where it has rows of all.

    Raises Left where the rows are those of other tokens, or their sums are not added up over the
    ranks that have the others.
    """
    if found.part is None:
        return None
    first, chosen = found.part.first, found.chosen
    num_tokens, of_mine = (_rows(node) for node in (found.tokens, chosen))
    if chosen is not None and not (num_tokens and of_mine):
        raise Lost(
            f"{operator_at(found.tokens)} is divided over ranks, so its size must be known at "
            "compile time"
        )
    if type(first) is not int or not of_mine or num_tokens % of_mine or first % of_mine:
        raise Left(Reason.BATCH_MIXED, operator_at(found.index))
    known, orders = TokenIndex(frozenset()), [found.sums.index] if found.sums.is_order else []
    orders += filter(None, map(known.order_of, (found.index, found.sums.index)))
    shifted = (node for node in map(known.origin, orders) if known.unshifted(node)[0] is not node)
    return TokenShare(
        ranks=_summing_ranks(region, found, num_tokens // of_mine, first // of_mine),
        number=first // of_mine,
        factor=Factor(of_mine),
        rows_per_token=found.part.rows_per_token,
        slices=frozenset(
            node
            for node in found.tokens.graph.nodes
            if _is_slice(node, (first, first + of_mine, 1), num_tokens)
        ),
        shifted={node: known.unshifted(node)[0] for node in shifted},
    )


def _rows(node: fx.Node | None) -> int:
    """Return the number of rows of a matrix; 0 where it is not known."""
    return 0 if node is None else known_rows(node)


def _is_slice(node: fx.Node, bounds: tuple[int, int, int], num_tokens: int) -> bool:
    """Whether the node is `x[first:last]` of a tensor with a row for every token."""
    given = node.args[1] if node.target is operator.getitem else None
    if not isinstance(given, slice) or known_rows(node.all_input_nodes[0]) != num_tokens:
        return False
    ends = (given.start, given.stop, given.step)
    is_known = all(end is None or type(end) is int for end in ends)
    return is_known and given.indices(num_tokens) == bounds


def _summing_ranks(region: MoERegion, found: TokenRows, size: int, number: int) -> tuple[int, ...]:
    """Return the ranks over which the sums of the rows are added up; raise Left without them."""
    summing, total = set[tuple[int, ...]](), found.sums.total
    for node in region.facts.dependence.below([total], stops=_Summing()) - {total}:
        if ranks := summed_over(node):
            summing.add(ranks)
        elif not _may_be_done_to_sums(node):
            raise Left(Reason.BATCH_MIXED, f"{operator_at(node)} has only some of the tokens")
    for ranks in summing:
        if len(ranks) != size or ranks.index(dist.get_rank()) != number or len(summing) > 1:
            raise Left(
                Reason.BATCH_MIXED,
                f"{operator_at(found.index)} must be this rank's share of {len(ranks)} equal "
                "shares, and is not",
            )
    if not summing:
        raise Left(
            Reason.BATCH_MIXED, f"{operator_at(found.sums.total)} has only some of the tokens"
        )
    return summing.pop()


def _may_be_done_to_sums(node: fx.Node) -> bool:
    """Whether `node` may be applied to a sum instead of its terms."""
    is_move = is_movement(node) and not is_launch(node)
    return is_move or torch_name(node) in CASTS or torch_name(node) == "add"


class _Summing:
    """The set of nodes that add up terms over ranks."""

    def __contains__(self, node: object) -> bool:
        return isinstance(node, fx.Node) and bool(summed_over(node))


def dims_of_slice(tracker: Tracker, node: fx.Node, split: SplitRegion) -> Dims | None:
    """Return the factors of a slice by a share; None where it is a slice of other rows."""
    tokens, source = (tracker.dims(n) for n in (split.found.tokens, node.all_input_nodes[0]))
    if split.share is None or flat(tokens[0]) != flat(source[0]):
        return None
    tracker.closed.append((node, source[0]))
    return [[split.share.factor], *source[1:]]


def check_share(
    split: SplitRegion,
    share: TokenShare,
    tracker: Tracker,
    given: Collection[fx.Node],
) -> None:
    """Refuse unless all of the ranks have the tokens, with their experts and scores.

    `given` are inputs of the graph that have the batch: these may differ by rank.
    """
    found, ranks = split.found, {*share.ranks}
    assert found.chosen is not None
    if flat(tracker.dims(found.chosen)[0]) != flat([share.factor]):
        raise Lost(
            f"it could not be proven which rows of {operator_at(found.chosen)} belong to which "
            f"tokens of {split.region.name}"
        )
    todo, seen = [found.tokens, found.chosen, *found.factors], set[fx.Node]()
    todo += [found.sums.weights] if found.sums.weights is not None else []
    while todo:
        node = todo.pop()
        if node in seen or ranks <= {*same_on(node)}:
            continue
        seen.add(node)
        if node in given or is_launch(node) or takes_own_part(node):
            raise Left(
                Reason.BATCH_MIXED,
                (
                    f"{operator_at(node)} must have the same values on all ranks that share "
                    "tokens, and may differ"
                ),
            )
        todo += split.region.facts.dependence.needs(node)
