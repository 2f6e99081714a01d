"""The memory behind tensors: behind views, inside of `vmap`, and in the parts of subclasses.

Contract
    Two tensors share memory when they have a storage in common. A subclass that wraps tensors, such
    as DTensor, has theirs: a write to it writes them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(values: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among `values`, with the parts of wrappers in place of these."""
    for leaf in pytree.tree_leaves(values):
        if not isinstance(leaf, torch.Tensor):
            continue
        if is_functorch_wrapped_tensor(leaf):
            yield from plain_tensors(get_unwrapped(leaf))
        elif is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from plain_tensors([getattr(leaf, name) for name in names])
        else:
            yield leaf


def tensors_in(values: object) -> list[torch.Tensor]:
    """Return the tensors among `values`, lists and dicts flattened, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storages_of(values: object) -> frozenset[int]:
    """Return the identities of the storages of the tensors among `values`."""
    return frozenset(int(t.untyped_storage()._cdata) for t in plain_tensors(values))
