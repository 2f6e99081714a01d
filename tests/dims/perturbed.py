"""What the table of operators says of a function, held against numbers.

One index of one factor of an input is changed. Only that index of that factor may change in what
the function makes, unless the rules say that the indices of the factor come together.
"""

import torch
from torch import fx
from torch.utils import _pytree as pytree

from moe_compile.dims.factors import Factor, SizeNumbers, flat, holds
from moe_compile.dims.flow import Flow, Followed, Notes
from moe_compile.dims.tracker import recorder_of


class Claims:
    """What is said of the results of `function` on `inputs`, of which it may write copies."""

    def __init__(self, function, inputs):
        self.function, self.inputs = function, inputs
        self.operators = set()
        node, self.notes = fx.Graph().placeholder("x"), Notes()
        self.flow = Flow(node, SizeNumbers(), self.notes)
        self.given = [x.clone() for x in inputs]
        self.dims = [[[Factor(size)] for size in x.shape] for x in self.given]
        for x, dims in zip(self.given, self.dims, strict=True):
            self.flow.give(Followed(x, dims))
        recorder = recorder_of(self.flow)
        follow = recorder._note

        def note(one):
            self.operators.add(one.func)
            follow(one)

        recorder._note = note
        with recorder:
            self.results = tensors(recorder.run(node, lambda: function(*self.given)))

    def wrong(self):
        """Yield what is claimed and is not so: an input, a dimension and a factor of it."""
        for number, (x, dims) in enumerate(zip(self.inputs, self.dims, strict=True)):
            if x.is_floating_point() or x.is_complex():
                for at, dim in enumerate(dims):
                    for factor in flat(dim):
                        if not self._is_closed(factor) and not self._holds(number, at, factor):
                            yield number, at, factor.size

    def _is_closed(self, factor):
        return any(holds(dim, factor) for _, dim in self.notes.closed)

    def _holds(self, number, at, factor):
        """Whether a change of the last index of a factor changes that index alone."""
        x, last = self.inputs[number], factor.size - 1
        own = self._where(self.dims[number][at], factor, last)
        mask = own.reshape([-1 if i == at else 1 for i in range(x.dim())]).expand_as(x)
        drawn = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) + 0.5
        inputs = [one.clone() for one in self.inputs]
        inputs[number] = torch.where(mask, drawn, x)
        now = tensors(self.function(*inputs))
        before = tensors(self.function(*[one.clone() for one in self.inputs]))
        pairs = zip(self.results, before, now, strict=True)
        return all(self._alike(result, a, b, factor, last) for result, a, b in pairs)

    def _alike(self, result, before, now, factor, last):
        known = self.flow.of(result)
        if known.dims is None:
            return True
        if before.shape != now.shape:
            return False
        changed = ~torch.isclose(before, now, 1e-12, 1e-12, equal_nan=True)
        picked = self.notes.settled(self.flow.node, known.picked).get(factor)
        if picked is not None:
            return picked == last or not changed.any()
        may = torch.zeros_like(changed)
        for i, dim in enumerate(known.dims):
            own = self._where(dim, factor, last)
            may |= own.reshape([-1 if i == j else 1 for j in range(may.dim())])
        return not (changed & ~may).any()

    def _where(self, dim, factor, last):
        """Return for each index of a dimension whether it has the last index of `factor`."""
        found = torch.zeros(1, dtype=torch.bool)
        for one in flat(dim):
            inner = torch.zeros(one.size, dtype=torch.bool)
            if one is factor:
                inner[last] = True
            elif one.pieces:
                inner = torch.cat([self._where(piece, factor, last) for piece in one.pieces])
            found = (found[:, None] | inner).flatten()
        return found


def tensors(values):
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
