"""The rewrites and transports that other distributions add by entry points.

Contract
    Each has the interface of `passes/rewrite.py` or `passes/transport.py`, under a name of its own,
    or an error says why not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Final

from moe_compile.config import CHOICES
from moe_compile.entry_points import TRANSPORTS, installed, load, unusable
from moe_compile.errors import InvalidConfig, nearest
from passes.rewrite import Rewrite
from passes.transport import FUNCTIONAL, Functional, Transport

WRITE: Final = "a subclass of {} that needs no arguments, or an instance of one"


def load_rewrites(
    entries: Sequence[EntryPoint], taken: Collection[str]
) -> tuple[Rewrite[Any], ...]:
    """Return the rewrite of each entry; raise InvalidConfig for one that cannot be used.

    `taken` are the names of our own passes.
    """
    for entry in entries:
        if entry.name in taken:
            raise unusable(
                entry,
                "must have a name that no pass of megamoe has, but has the name of one",
                "another name",
            )
    found = tuple(_made(entry, Rewrite) for entry in entries)
    for entry, rewrite in zip(entries, found, strict=True):
        if rewrite.is_decided:
            raise unusable(entry, "has is_decided = True", "is_decided = False")
    return found


def load_transports(entries: Sequence[EntryPoint]) -> dict[str, Transport]:
    """Return all transports by name; raise InvalidConfig for one that cannot be used."""
    ours = Functional()
    for entry in entries:
        if entry.name == ours.name:
            raise unusable(
                entry,
                "must have a name that differs from that of torch's own transport",
                "another name",
            )
    return {ours.name: ours, **{entry.name: _made(entry, Transport) for entry in entries}}


@functools.cache
def find_transport(name: str) -> Transport:
    """Return the transport that the option `transport` names; raise InvalidConfig if none is."""
    if name == FUNCTIONAL:
        return Functional()
    known = load_transports(installed(TRANSPORTS))
    if name not in known:
        raise InvalidConfig(f"megamoe.transport: no transport {name!r}.{nearest(name, known)}")
    return known[name]


def _made(entry: EntryPoint, kind: type) -> Any:
    """Return the object of an entry point, an instance of `kind`."""
    write = WRITE.format(f"{kind.__module__}.{kind.__name__}")
    named = load(entry)
    if inspect.isclass(named) and issubclass(named, kind):
        try:
            named = named()
        except TypeError as error:
            raise unusable(entry, f"cannot be made ({error})", write) from None
    if not isinstance(named, kind):
        raise unusable(entry, f"gives {named!r}, which is not a {kind.__name__}", write)
    made: Any = named
    for attribute, wrong, to_write in _mistakes(entry.name, made):
        if wrong:
            value = getattr(made, attribute, None)
            raise unusable(entry, f"has {attribute} = {value!r}", f"{attribute} = {to_write}")
    return made


def _mistakes(name: str, made: Rewrite[Any] | Transport) -> Iterable[tuple[str, bool, str]]:
    """Return (attribute, whether it is wrong, the value to write) for each attribute checked."""
    known = CHOICES["numerics"]
    has_bound = isinstance(made.bound, str) and bool(made.bound)
    return (
        ("name", getattr(made, "name", None) != name, f"{name!r}, as its entry point"),
        ("numerics", made.numerics not in known, f"one of {', '.join(known)}"),
        ("bound", has_bound == (made.numerics == "exact"), '"" if exact, else what it loses'),
    )
