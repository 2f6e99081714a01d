"""Copies to host memory and back on a machine without a GPU: within its memory, and late.

Contract
    torch's operators `ao::offload`, `ao::reload` and `ao::wait_tensor` get kernels for CPU tensors
    as long as `copies_on_cpu` is open. They copy as late as the real ones may: at the wait. Until
    then the result holds garbage, so that a reader in front of the wait shows, and so does a write
    to the source. A source that nothing keeps alive until the wait is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from moe_compile.ops.host_copies import MODULE

GARBAGE = 119
"""Every byte of a result whose copy has not ended."""


@dataclass(slots=True)
class Copies:
    """What was copied since the operators got their kernels."""

    offloaded: list[torch.Tensor] = field(default_factory=list)
    """Copies on the host, in the order in which they began: the tensors themselves."""
    num_reloads: int = 0
    in_flight: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    """Address of a result -> the tensor that it is to be a copy of."""

    def begin(self, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return `result`, which is a copy of `source` from its wait on."""
        result.view(-1).view(torch.uint8).fill_(GARBAGE)
        self.in_flight[result.data_ptr()] = weakref.ref(source)
        return result

    def offload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stand for `ao::offload`."""
        result = self.begin(tensor, torch.empty(tensor.shape, dtype=tensor.dtype))
        self.offloaded.append(result)
        return result

    def reload(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        original_size: list[int] | None = None,
        original_stride: list[int] | None = None,
    ) -> torch.Tensor:
        """Stand for `ao::reload`."""
        size, stride = original_size or tensor.shape, original_stride or tensor.stride()
        self.num_reloads += 1
        result = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
        return self.begin(tensor, result)

    def wait(
        self,
        tensor: torch.Tensor,
        keepalive: torch.Tensor | None = None,
        last_use_of_storage: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stand for `ao::wait_tensor`: the copy is made here."""
        source = self.in_flight.pop(tensor.data_ptr())()
        if source is None or not source.untyped_storage().nbytes():
            raise AssertionError(
                "the source of a copy must stay alive until its wait, and was freed before"
            )
        tensor.copy_(source)
        if keepalive is not None:
            keepalive.untyped_storage().resize_(0)
        del last_use_of_storage
        return tensor


@contextlib.contextmanager
def copies_on_cpu() -> Iterator[Copies]:
    """Give the operators kernels for CPU tensors; yield what they copy."""
    importlib.import_module(MODULE)
    copies = Copies()
    with torch.library._scoped_library("ao", "IMPL") as library:
        library.impl("offload", copies.offload, "CPU")
        library.impl("reload", copies.reload, "CPU")
        library.impl("wait_tensor", copies.wait, "CPU")
        yield copies
