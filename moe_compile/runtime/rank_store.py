"""The store through which ranks exchange records of their compiled programs.

Contract
    No call here waits for another rank. Main thread and watcher have a connection each: calls on
    one connection wait for one another, and torch's own code uses the one it has.
    A process group that is made anew starts anew: keys of the one before are not read.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist

UNCOMPARED: Final = frozenset({"fake", "threaded", "mirrored"})
"""Backends whose ranks are no processes of their own."""
STORE_ERRORS: Final = (RuntimeError, ValueError, dist.DistError)
"""Errors of a store that is gone."""
ROOT: Final = "megamoe"
LEFT: Final = "left"
"""List of the ranks whose program has ended, or that left the process group."""


class RankStore:
    """One connection to the store of the default process group."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        """Open a new connection to `store`, under keys that begin with `prefix`."""
        clone = getattr(store, "clone", None)  # not in every torch: then they share one
        self._store = dist.PrefixStore(prefix, store if clone is None else clone())

    def first(self, key: str, value: Any) -> Any:
        """Return the value of `key`: the one set before, or `value` from now on."""
        return json.loads(self._store.compare_set(key, "", json.dumps(value)))

    def put(self, key: str, value: Any) -> None:
        """Set `key` to `value`."""
        self._store.set(key, json.dumps(value))

    def append(self, key: str, value: Any) -> None:
        """Put `value` at the end of the list `key`, which all ranks add to."""
        place = self._store.add(f"{key}/num", 1)
        self._store.set(f"{key}/{place}", json.dumps(value))

    def length(self, key: str) -> int:
        """Return the length of the list `key`; the newest value may not be readable yet."""
        return int(self._store.add(f"{key}/num", 0))

    def read(self, key: str, places: Sequence[int]) -> list[Any] | None:
        """Return the values at `places` of the list `key`, the first being 1; None if not there."""
        keys = [f"{key}/{place}" for place in places]
        if not self._store.check(keys):
            return None
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def peek(self, key: str) -> Any:
        """Return the value of `key`, None if there is none."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


class NewEntries:
    """New values of lists that ranks append to, each read once; for one thread."""

    def __init__(self, store: RankStore) -> None:
        """Read through `store`."""
        self._store = store
        self._read: dict[str, int] = {}

    def of(self, key: str) -> list[Any]:
        """Return the values appended to the list `key` since the last call."""
        found: list[Any] = []
        for place in range(self._read.get(key, 0) + 1, self._store.length(key) + 1):
            values = self._store.read(key, [place])
            if values is None:
                break  # its writer is about to
            self._read[key] = place
            found += values
        return found


def default_store() -> dist.Store | None:
    """Return the store of the default process group; None without one."""
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def is_served(store: dist.Store) -> bool:
    """Whether the server of `store` listens; asked without output of torch's on stderr."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return True
    try:
        with socket.create_connection((store.host, store.port), timeout=1.0):
            return True
    except OSError:
        return False


def open_prefix(store: dist.Store, rank: int) -> str:
    """Return the prefix of this process group's keys, with the number of groups before it."""
    return f"{ROOT}/{store.add(f'{ROOT}/opened/{rank}', 1)}"


def ranks_to_compare(group: str) -> list[int]:
    """Return the global ranks of `group`; [] where there is no other rank to compare with."""
    if not dist.is_initialized() or dist.get_backend() in UNCOMPARED:
        return []
    process_group = dist.distributed_c10d._resolve_process_group(group)
    if dist.get_backend(process_group) in UNCOMPARED:
        return []
    ranks = sorted(dist.get_process_group_ranks(process_group))
    return ranks if len(ranks) > 1 else []


def timeout_s(group: str) -> float:
    """Return the seconds that collectives of `group` wait before the process group gives up."""
    process_group = dist.distributed_c10d._resolve_process_group(group)
    timeouts = [
        options._timeout.total_seconds()
        for device in process_group._device_types
        if (options := getattr(process_group._get_backend(device), "options", None)) is not None
    ]
    return max(timeouts, default=dist.constants.default_pg_timeout.total_seconds())
