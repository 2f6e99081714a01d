"""Nodes of expert-parallel groups, registered once, where process groups are made.

Contract
    `register_node_groups` is a collective call on the group. All ranks judge the same records, so
    all of them store the same, or all of them raise the same InvalidConfig.
    The nodes are stored for the current process groups: new groups are registered anew. Passes read
    them and make no group.

Worked example: eight ranks, nodes of four. Rank `node * 4 + place` of the group is rank `place` of
its `node` group and rank `node` of its `cross` group, which joins equal places:

    node groups    [0 1 2 3] [4 5 6 7]          cross groups    [0 4] [1 5] [2 6] [3 7]
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from moe_compile.errors import InvalidConfig
from moe_compile.runtime.rank_store import UNCOMPARED, default_store


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroups:
    """The nodes of one expert-parallel group, as one of its ranks sees them."""

    num_nodes: int
    num_local: int
    """Ranks of each node."""
    place: int
    """Place of this rank on its node."""
    node: str
    """Name of the process group of this rank's node."""
    cross: str
    """Name of the process group of the ranks with this rank's place, in the order of nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Record of one rank on its groups, in global ranks."""

    rank: int
    host: str
    node: tuple[int, ...]
    cross: tuple[int, ...]


class _Registered:
    """Registered groups of the current default process group."""

    store: Any = None
    """Store of that process group: another one has another."""
    groups: dict[str, NodeGroups] = {}  # noqa: RUF012  (replaced with the store)


def register_node_groups(
    group: dist.ProcessGroup,
    node: dist.ProcessGroup,
    cross: dist.ProcessGroup,
    *,
    host: str | None = None,
) -> None:
    """Register which ranks of `group` share a node, on all of its ranks at once.

    `node` has the ranks of this rank's node, `cross` those of equal place on all nodes, both in
    the order of `group`, as `init_device_mesh("cuda", (nodes, local))` makes them. `host` names the
    unit that exactly the ranks of a node share: the machine, unless links between machines are as
    fast, as in racks joined by NVLink.
    Raises InvalidConfig, on all ranks, where groups and hosts do not fit together.
    """
    ranks = dist.get_process_group_ranks(group)
    own = Seat(
        rank=dist.get_rank(),
        host=host or socket.gethostname(),
        node=tuple(dist.get_process_group_ranks(node)),
        cross=tuple(dist.get_process_group_ranks(cross)),
    )
    seats = [own]
    if dist.get_backend(group) not in UNCOMPARED:
        found: list[Any] = [None] * len(ranks)
        dist.all_gather_object(found, own, group=group)
        seats = found
    num_local = check_seats(ranks, seats)
    if _Registered.store is not default_store():
        _Registered.store, _Registered.groups = default_store(), {}
    _Registered.groups[group.group_name] = NodeGroups(
        num_nodes=len(ranks) // num_local,
        num_local=num_local,
        place=ranks.index(own.rank) % num_local,
        node=node.group_name,
        cross=cross.group_name,
    )


def node_groups_of(group: str) -> NodeGroups | None:
    """Return the nodes registered for the process group of that name; None for none."""
    return _known().get(group)


def _known() -> Mapping[str, NodeGroups]:
    """Return the registered groups of the current default process group, by name."""
    store = default_store()
    is_theirs = store is not None and store is _Registered.store
    return _Registered.groups if is_theirs else {}


def ranks_of_a_node(group: str) -> int:
    """Return the number of ranks of that process group on each node: of a registered group, or of
    one of its node or cross groups; 0 where it is not registered."""
    if (nodes := node_groups_of(group)) is not None:
        return nodes.num_local
    for nodes in _known().values():
        if group in (nodes.node, nodes.cross):
            return nodes.num_local if group == nodes.node else 1
    return 0


def link_of_group(group: str) -> str:
    """Return the name of the group whose link the process group of that name takes: ranks of equal
    place leave their nodes as the registered group does, which they are of; others by their own."""
    return next((whole for whole, nodes in _known().items() if group == nodes.cross), group)


def check_seats(ranks: Sequence[int], seats: Sequence[Seat]) -> int:
    """Return the number of ranks of each node, for the `ranks` of a group in order.

    Raises InvalidConfig where their seats do not divide them into nodes.
    """
    num_local = len(seats[0].node)
    if odd := next((s for s in seats if len(s.node) != num_local), None):
        raise _misfit(
            f"the node of rank {seats[0].rank} has {num_local} ranks, and the node of rank "
            f"{odd.rank} has {len(odd.node)}: all nodes must have the same number of ranks"
        )
    if len(ranks) % num_local:
        raise _misfit(
            f"a group of {len(ranks)} ranks must divide into nodes of {num_local} ranks each, "
            "and does not"
        )
    for seat in seats:
        if seat.rank not in ranks:
            raise _misfit(
                f"every rank that registers must be in the group {list(ranks)}, and rank "
                f"{seat.rank} is not"
            )
        node, place = divmod(list(ranks).index(seat.rank), num_local)
        first = node * num_local
        for name, said, wanted in (
            ("node", seat.node, ranks[first : first + num_local]),
            ("cross", seat.cross, ranks[place::num_local]),
        ):
            if said != tuple(wanted):
                raise _misfit(
                    f"the {name} group of rank {seat.rank} is {list(said)}, but by the order of "
                    f"the whole group, {list(ranks)}, it must be {list(wanted)}"
                )
    _check_hosts(seats)
    return num_local


def _check_hosts(seats: Sequence[Seat]) -> None:
    """Raise InvalidConfig unless nodes and hosts are the same parts of the group."""
    for first in seats:
        for other in seats:
            together = first.node == other.node
            if together is not (first.host == other.host):
                where = "share a node" if together else "are on two nodes"
                raise _misfit(
                    f"ranks {first.rank} and {other.rank} {where}, on the hosts {first.host!r} "
                    f"and {other.host!r}; if your nodes are not machines, pass `host`, a name "
                    "that all ranks of a node share"
                )


def _misfit(why: str) -> InvalidConfig:
    return InvalidConfig(f"register_node_groups: {why}")
