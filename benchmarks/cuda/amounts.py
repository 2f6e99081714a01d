"""Bytes that generated code reads and writes where routing is balanced.

Contract
    Of every kernel each tensor counts once, and no more of it than the kernel has elements: caches
    are taken to serve what one kernel reads again, and nothing that another has read.
    Sizes that only a run knows are those of balanced routing: the solution of least norm of what
    the code asserts of them, each rank receiving as many rows as it sends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import sympy

from benchmarks.cuda.calls import Call, Kind, Tensor, Wrapper, names_in

Sizes = Mapping[str, int]


@dataclass(kw_only=True, slots=True)
class Bytes:
    """What one pass of the code moves."""

    weights: float = 0.0
    """Parameters read and their gradients written, copies of them included."""
    activations: float = 0.0
    collectives: float = 0.0
    """Handed to collectives."""


def balanced_sizes(
    forward: Wrapper, rows: Mapping[str, float] = MappingProxyType({})
) -> dict[str, int]:
    """Return the value of each size that only a run knows; the backward has the same ones.

    `rows` has what each all-to-all of a group sends, where code asserts nothing of it: of hops.
    """
    symbols = sorted({name for call in forward.calls for name in call.integers})
    sides = [*forward.equations]
    for call in forward.calls:
        if call.splits is not None:
            sides += zip(*call.splits, strict=True)
            if call.group in rows:
                sides.append((" + ".join(call.splits[1]), str(rows[call.group])))
    rows, right = [], []
    for pair in sides:
        terms = _difference(*pair).as_coefficients_dict()
        constant = float(terms.pop(sympy.S.One, 0))
        if terms and {str(term) for term in terms} <= set(symbols):
            rows.append([float(terms.get(sympy.Symbol(name), 0)) for name in symbols])
            right.append(-constant)
    if not rows:
        return dict.fromkeys(symbols, 0)
    solution, *_ = np.linalg.lstsq(np.array(rows), np.array(right), rcond=None)
    return {name: round(float(value)) for name, value in zip(symbols, solution, strict=True)}


def with_named(wrapper: Wrapper, sizes: Sizes) -> Sizes:
    """Return the same sizes, and those that the code itself names."""
    return {**sizes, **{n: evaluated(size, sizes) for n, size in wrapper.named_sizes.items()}}


def _difference(left: str, right: str) -> sympy.Expr:
    return sympy.expand(sympy.sympify(f"({left}) - ({right})".replace("//", "/")))


def bytes_of(wrapper: Wrapper, sizes: Sizes, weights: Container[str]) -> Bytes:
    """Return what the code moves; `weights` are the buffers of weights and of their gradients."""
    found = Bytes()
    for call in wrapper.calls:
        if call.kind is Kind.LAUNCH:
            found.collectives += sum(nbytes_of(t, sizes) for t in call.reads)
        elif call.kind in (Kind.TRITON, Kind.EXTERN):
            for tensor in (*call.reads, *call.writes):
                nbytes = bytes_in(call, tensor, sizes)
                if tensor.buffer in weights:
                    found.weights += nbytes
                else:
                    found.activations += nbytes
    return found


def copied_by_parts(
    wrapper: Wrapper, sizes: Sizes, weights: Container[str], kept: Iterable[str] = ()
) -> Bytes:
    """Return what replays of captured parts copy: all that they are given but what parts made.

    Of the inputs parts of the forward made `kept`. Weights are among what is copied, though those
    of one address are not.
    """
    found, made = Bytes(), set(kept)
    for call in wrapper.calls:
        if call.kind is Kind.PART:
            for tensor in (t for t in call.reads if t.storage not in made):
                if tensor.buffer in weights:
                    found.weights += nbytes_of(tensor, sizes)
                else:
                    found.activations += nbytes_of(tensor, sizes)
            made |= {t.storage for t in call.reads}
        elif call.part is not None:
            made |= {t.storage for t in call.writes}
    return found


def kept_by_parts(forward: Wrapper, backward: Wrapper) -> set[str]:
    """Return the inputs of the backward that captured parts of the forward made."""
    made = {t.buffer for call in forward.calls if call.part is not None for t in call.writes}
    return {name for name, buffer in kept_for_backward(forward, backward) if buffer in made}


def kept_for_backward(forward: Wrapper, backward: Wrapper) -> list[tuple[str, str]]:
    """Return inputs of the backward, each with the buffer of the forward, in one order."""
    given = [i for i in backward.inputs if i in backward.tensors and not i.startswith("tangents")]
    kept = [buffer for buffer in forward.results if buffer][-len(given) :]
    return list(zip(given, kept, strict=True))


def elements_of(call: Call, sizes: Sizes) -> float:
    """Return the elements a Triton kernel is run for; without limit where it is not said."""
    return math.prod(evaluated(n, sizes) for n in call.numels) if call.numels else math.inf


def evaluated(expression: str, sizes: Sizes) -> int:
    """Return the value of a size; one that is none of the routing, a generator's, counts as 0."""
    known = {"__builtins__": {}, "max": max, "min": min}
    return int(
        eval(expression, known, {**dict.fromkeys(names_in(expression) - {*known}, 0), **sizes})
    )


def bytes_in(call: Call, tensor: Tensor, sizes: Sizes) -> float:
    """Return the bytes that a kernel reads, or writes, of one of its tensors."""
    return min(nbytes_of(tensor, sizes), elements_of(call, sizes) * tensor.itemsize)


def nbytes_of(tensor: Tensor, sizes: Sizes) -> float:
    """Return the bytes of a tensor; of one element where its size is not said."""
    shape = tensor.shape or ()
    return tensor.itemsize * math.prod(evaluated(size, sizes) for size in shape)


def places_of_weights(forward: Wrapper, weights: Iterable[int]) -> list[int]:
    """Return the places among the inputs of tensors given by their places among the tensors.

    AOTAutograd gives a sharded tensor as its own shard and what is known of its mesh.
    """
    places = [n for n, name in enumerate(forward.inputs) if name in forward.tensors]
    return [places[weight] for weight in weights]


def weights_of_forward(forward: Wrapper, parameters: Iterable[int]) -> set[str]:
    """Return the buffers of parameters, given by their places among the inputs, and of copies."""
    named = {f"primals_{number + 1}" for number in parameters}
    found = named & set(forward.inputs)
    for call in forward.calls:
        if call.kind is Kind.TRITON and call.reads and {t.buffer for t in call.reads} <= found:
            found |= {t.buffer for t in call.writes}
    return found


def weights_of_backward(
    forward: Wrapper, backward: Wrapper, sizes: Sizes, parameters: Collection[int]
) -> set[str]:
    """Return the buffers of parameters, of their gradients, and of parts of these.

    What the forward keeps the backward is given, in one order; gradients stand among its results
    in the order of the forward's inputs. A part of a gradient is what a kernel that writes the
    gradient reads, if it is of known size and not larger.
    """
    weights = weights_of_forward(forward, parameters)
    found = {name for name, buffer in kept_for_backward(forward, backward) if buffer in weights}
    found |= {b for number, b in enumerate(backward.results) if b and number in parameters}
    for call in reversed(backward.calls):
        written = [t for t in call.writes if t.buffer in found]
        if call.kind is Kind.TRITON and written:
            most = max(nbytes_of(t, sizes) for t in written)
            found |= {
                t.buffer
                for t in call.reads
                if t.buffer not in backward.inputs
                and not any(names_in(size) for size in t.shape or ())
                and nbytes_of(t, sizes) <= most
            }
    return found
