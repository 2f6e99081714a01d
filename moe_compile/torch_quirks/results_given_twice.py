"""Results of an `autograd.Function` that its graph returns twice: once is enough for the gradient.

Fault
    Dynamo has the forward body of an `autograd.Function` return every value that it makes, behind
    the results. A result that is written in place is among them as what the write returned. It is
    the same tensor, so autograd takes the last of them for the result, and the gradient of the
    first is lost: it is zero, by every backend, and nothing says so.
Seen in
    torch 2.11; torch 2.12 and later return results alone.
Noticed by
    `test_a_result_that_is_written_in_place_has_no_gradient` in test_still_there.py.
Contract
    A value that nothing outside of the body reads is not returned if it is a result. All other
    graphs stay as they came.

Functions that exchange rows are of this kind: `all_to_all_single` writes into empty memory.
"""

from __future__ import annotations

import operator

import torch.fx as fx

from moe_compile.graph.edit import erase_unused
from moe_compile.graph.inner_graphs import bodies, is_autograd_function
from moe_compile.graph.query import value_of


def give_results_once(gm: fx.GraphModule) -> None:
    """Have the functions in `gm`, and in its bodies, return each of their results once."""
    graphs = [module for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for one in graphs:
        changed = [_give_once(node) for node in filter(is_autograd_function, one.graph.nodes)]
        if any(changed):
            one.recompile()


def _give_once(function: fx.Node) -> bool:
    forward, *_ = bodies(function)
    (output,) = forward.graph.find_nodes(op="output")
    (returned,) = output.args
    if any(user.target is not operator.getitem for user in function.users):
        return False
    if not isinstance(returned, tuple) or not isinstance(returned[0], tuple):
        return False
    results, *saved = returned
    read = {user.args[1] for user in function.users if user.users}
    values = [value_of(results[place]) for place in read]
    once = tuple(
        None if place not in read and _is_one_of(node, values) else node
        for place, node in enumerate(results)
    )
    if once == results:
        return False
    output.args = ((once, *saved),)
    forward.recompile()
    erase_unused([user for user in function.users if once[user.args[1]] is None])
    return True


def _is_one_of(node: object, values: list[object]) -> bool:
    return isinstance(node, fx.Node) and any(value_of(node) is value for value in values)
