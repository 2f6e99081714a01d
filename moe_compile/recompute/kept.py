"""What a partition of the joint graph keeps for the backward, and what it computes again.

Contract
    Bytes are of storages, at nominal sizes: two views of one tensor count once. Inputs of the graph
    and results of the program count nothing, since their callers hold them, and nor do views of
    them, a transposed weight say.
"""

from __future__ import annotations

import torch.fx as fx

from moe_compile.cost.amounts import is_free
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.aliases import AliasClasses
from moe_compile.graph.query import value_of


def kept_storages(
    forward: fx.Graph, backward: fx.Graph, num_results: int, sizes: NominalSizes
) -> dict[fx.Node, int]:
    """Return the forward nodes whose tensors are kept for the backward alone, with their bytes.

    A node is the first that makes its storage. The first `num_results` values that the forward
    returns are the program's.
    """
    nodes = list(forward.nodes)
    classes = AliasClasses(nodes)
    inputs = [n for n in nodes if n.op in ("placeholder", "get_attr")]
    held = classes.of(*inputs, *results_of(forward, num_results))
    taken = {node.name for node in backward.find_nodes(op="placeholder")}
    kept = classes.of(*(n for n in nodes if n.op == "call_function" and n.name in taken)) - held
    maker: dict[int, fx.Node] = {}
    nbytes = dict.fromkeys(kept, 0)
    for node in nodes:
        made = classes.of(node) & kept
        for storage in made:
            maker.setdefault(storage, node)
        if made and len(classes.of(node)) == 1:
            (storage,) = made
            nbytes[storage] = max(nbytes[storage], sizes.nbytes(value_of(node)))
    found: dict[fx.Node, int] = {}
    for storage, node in maker.items():
        found[node] = found.get(node, 0) + nbytes[storage]
    return found


def results_of(graph: fx.Graph, number: int) -> list[fx.Node]:
    """Return the first `number` values that a graph returns, without constants."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    assert isinstance(returned, list | tuple)
    return [value for value in returned[:number] if isinstance(value, fx.Node)]


def computed_again(forward: fx.Graph, backward: fx.Graph) -> frozenset[str]:
    """Return the names of the nodes with work on the device that both graphs run."""
    ran = {node.name for node in forward.nodes if not is_free(node)}
    return frozenset(n.name for n in backward.nodes if n.name in ran and not is_free(n))
