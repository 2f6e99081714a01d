"""Timelines of compiled graphs, by name.

Contract
    A graph carries the name alone: every call hands over the text of its record, so that has to be
    short. The timeline is known in the process that compiled the graph, and where Inductor keeps
    code it lies beside it, for processes that find the code there.
    What is found neither here nor there is "": a cache may have come without it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from moe_compile.torch_quirks.cache_files import keep, kept_path

MOST: Final = 256
"""Timelines that a process knows: the latest."""
_KNOWN: Final[OrderedDict[str, str]] = OrderedDict()


def keep_timeline(packed: str, *, is_cached: bool) -> str:
    """Keep a packed timeline, in a file where code of its graph `is_cached`; return its name."""
    if not packed:
        return ""
    name = hashlib.sha256(packed.encode()).hexdigest()[:32]
    _KNOWN[name] = packed
    _KNOWN.move_to_end(name)
    while len(_KNOWN) > MOST:
        _KNOWN.popitem(last=False)
    path = kept_path(f"timelines/{name}") if is_cached else None
    if path is not None and not path.exists():
        keep(path, packed)
    return name


def kept_timeline(name: str) -> str:
    """Return the packed timeline of that name, "" where it is not known."""
    if not name or name in _KNOWN:
        return _KNOWN.get(name, "")
    path = kept_path(f"timelines/{name}")
    try:
        return path.read_text() if path is not None else ""
    except OSError:
        return ""
