"""Extensions of megamoe by other distributions, found by entry points (docs/extend.md).

Contract
    The extensions found depend on the installed distributions alone. A faulty entry point is an
    error that names its distribution and says what to write.
    The identity of extensions covers name, version and every source file of each package that is
    run while a program is compiled.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

from moe_compile.errors import InvalidConfig

REWRITES: Final = "megamoe.rewrites"
PROFILES: Final = "megamoe.profiles"
TRANSPORTS: Final = "megamoe.transports"
NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
SUFFIXES: Final = (".py", ".toml")


def installed(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, by name; raise InvalidConfig for a bad name, or a pair.

    A distribution found twice on the path counts once, at the place it is imported from.
    """
    return checked(entry_points(group=group))


def checked(found: Iterable[EntryPoint]) -> tuple[EntryPoint, ...]:
    """Return `found` by name; raise InvalidConfig for an invalid or a repeated name."""
    by_name: dict[str, EntryPoint] = {}
    for entry in sorted(found, key=lambda e: (e.name, origin_of(e))):
        if not NAME.fullmatch(entry.name):
            raise unusable(
                entry,
                "has a name that cannot be written as an option's value",
                "a name in snake_case",
            )
        if (other := by_name.get(entry.name)) is not None:
            raise unusable(
                entry,
                f"has the name of another entry point, from {origin_of(other)}",
                "another name",
            )
        by_name[entry.name] = entry
    return tuple(by_name.values())


def origin_of(entry: EntryPoint) -> str:
    """Return `distribution version`."""
    return (
        f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "no distribution"
    )


def unusable(entry: EntryPoint, what: str, write: str) -> InvalidConfig:
    """Return the error for an entry point with the fault `what` and the remedy `write`."""
    return InvalidConfig(
        f"entry point {entry.name} = {entry.value!r} of group {entry.group!r}, from distribution "
        f"{origin_of(entry)}, {what}; write {write}, or uninstall the distribution"
    )


def load(entry: EntryPoint) -> Any:
    """Return the object an entry point names; raise InvalidConfig if it cannot be imported."""
    try:
        return entry.load()
    except Exception as error:  # another's module may raise anything
        what = f"cannot be imported ({type(error).__name__}: {error})"
        raise unusable(entry, what, 'name = "module:object"') from error


@functools.cache
def hash_of_packages() -> str:
    """Return a hash of the distributions that take part in a compilation; "" without any.

    Names and contents count, not where they are installed: machines may share a cache.
    """
    entries = [*entry_points(group=REWRITES), *entry_points(group=TRANSPORTS)]
    if not entries:
        return ""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda e: (e.group, e.name, e.value)):
        digest.update(f"{entry.group} {entry.name} {entry.value} {origin_of(entry)}".encode())
        for name, path in _sources(entry.module.partition(".")[0]):
            digest.update(name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources(package: str) -> Iterator[tuple[str, Path]]:
    """Return the files of a top-level package or module, with names within it."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return  # loading the entry point says so
    if spec.submodule_search_locations is None:
        yield package, Path(str(spec.origin))
        return
    for folder in map(Path, spec.submodule_search_locations):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES):
            yield str(path.relative_to(folder)), path
