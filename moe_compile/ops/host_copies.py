"""torch's operators that copy tensors to pinned host memory and back, on a stream of their own.

Contract
    A launch and a wait: `ao::offload` or `ao::reload`, then `ao::wait_tensor`.
    torch's version is never read: the operators are there, with a kernel for a device, or not.
    No tensor's storage is freed by a wait of ours. `ao::wait_tensor` frees the storage that it is
    given as `keepalive`: that of the source may be used again by generated code, and that of the
    copy on the host is read again where a graph goes back twice. It is given the source as
    `last_use_of_storage`, which keeps it alive until the wait and does nothing else.
"""

from __future__ import annotations

import importlib
from typing import Final

import torch

MODULE: Final = "torch._functorch._activation_offloading.offload_ops"
NAMES: Final = ("offload", "reload", "wait_tensor")


def why_no_copies(device: torch.device) -> str:
    """Return what keeps tensors of `device` from being copied beside compute, "" for nothing."""
    try:
        importlib.import_module(MODULE)
    except ImportError:
        return f"this torch has no {MODULE}"
    missing = [name for name in NAMES if not hasattr(torch.ops.ao, name)]
    if missing:
        return f"this torch has no operator ao::{missing[0]}"
    if device.type in ("cpu", "meta") and not all(map(_has_kernel_for_cpu, NAMES)):
        return f"tensors of the device {device.type} are in host memory, or nowhere"
    return ""


def _has_kernel_for_cpu(name: str) -> bool:
    """Whether somebody has registered a copy within host memory: tests do."""
    operator = getattr(torch.ops.ao, name).default
    return bool(operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU))
