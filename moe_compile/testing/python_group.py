"""A process group written in Python, with the names torch asks of every group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist


class PythonGroup(dist.ProcessGroup):
    """Base class; `backend_name` is what the subclass is registered under."""

    backend_name = ""

    def __init__(self, rank: int, size: int) -> None:
        """Make a group without a name; torch gives it one."""
        super().__init__(rank, size)
        self._name = ""

    def getBackendName(self) -> str:
        """Return the name torch knows this group's backend by."""
        return self.backend_name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name functional collectives find this group by."""
        return self._name


Kind = TypeVar("Kind", bound=PythonGroup)


def new_group_of(
    kind: type[Kind], make: Callable[[Any, int, int, Any], Kind], devices: Sequence[str]
) -> Kind:
    """Return a group of all ranks, what `make(store, rank, size, timeout)` returns.

    The default group must exist; a kind is registered once per process.
    """
    (made,) = new_groups_of(kind, make, devices, [None])
    return made


def new_groups_of(
    kind: type[Kind],
    make: Callable[[Any, int, int, Any], Kind],
    devices: Sequence[str],
    groups: Sequence[Sequence[int] | None],
) -> list[Kind]:
    """Return, of new groups of these ranks each (None for all), those that this rank is in.

    As `new_group_of` makes one; every rank must call with the same groups.
    """
    made: list[Kind] = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> Kind:
        made.append(make(store, rank, size, timeout))
        return made[-1]

    dist.Backend.register_backend(kind.backend_name, create, devices=list(devices))
    for ranks in groups:
        dist.new_group(None if ranks is None else list(ranks), backend=kind.backend_name)
    return made
