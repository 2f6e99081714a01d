"""Proofs that were made before, for regions that differ from another in names only.

Contract
    A proof found is the one that proving would give: see region_form.py for why. Refusals are not
    kept, since they name the nodes and the lines of their own region.
    No entry holds a graph, a tensor or a tracer; the latest `MOST` are kept.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch.fx as fx

from moe_compile.proof.kernel_bits import KernelBits, bits
from moe_compile.proof.region_form import RegionForm
from moe_compile.regions.regions import RowProof

MOST: Final = 64

_KEPT: Final[OrderedDict[tuple[object, bool, KernelBits], RowProof]] = OrderedDict()
"""Key of a form, whether sums round differently, and the model of last bits in use -> the proof, of
places in place of names."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the node at a place."""

    number: int


def kept_proof(form: RegionForm, *, may_round: bool) -> RowProof | None:
    """Return the proof of the region that has this form, None where no like region was proven.

    A proof that needs no sums that round differently serves `may_round` too.
    """
    for rounds in (False, True)[: 1 + may_round]:
        proof = _KEPT.get((form.key, rounds, bits()))
        if proof is not None:
            _KEPT.move_to_end((form.key, rounds, bits()))
            nodes = {_Place(number): node for number, node in enumerate(form.nodes)}
            return _renamed(proof, nodes, {there: here for here, there in form.symbols.items()})
    return None


def keep_proof(form: RegionForm, proof: RowProof, *, may_round: bool) -> None:
    """Keep the proof of the region that has this form, unless it names others."""
    places = {node: _Place(number) for number, node in enumerate(form.nodes)}
    with suppress(KeyError):
        _KEPT[form.key, may_round, bits()] = _renamed(proof, places, form.symbols)
    while len(_KEPT) > MOST:
        _KEPT.popitem(last=False)


def forget() -> None:
    """Forget all proofs kept."""
    _KEPT.clear()


def _renamed(proof: RowProof, nodes: Mapping[Any, Any], symbols: Mapping[Any, Any]) -> RowProof:
    fields = {f.name: getattr(proof, f.name) for f in dataclasses.fields(proof)}
    facts = fields.pop("facts")
    said = {name: _with_nodes(value, nodes) for name, value in fields.items()}
    return RowProof(**said, facts=facts and facts.renamed(symbols))


def _with_nodes(value: Any, nodes: Mapping[Any, Any]) -> Any:
    if isinstance(value, fx.Node | _Place):
        return nodes[value]
    if isinstance(value, tuple):
        return tuple(_with_nodes(part, nodes) for part in value)
    if isinstance(value, dict):
        return {nodes[node]: part for node, part in value.items()}
    return value
