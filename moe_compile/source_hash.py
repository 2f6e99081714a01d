"""Version of megamoe: a hash of every file whose change may change compiled code.

The folders of `BESIDE` take no part in a compilation: code compiled before they changed is found
again.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
BESIDE: Final = tuple(
    f"moe_compile/{room}" for room in ("check/", "cli.py", "commands/", "simulator/", "testing/")
)
"""Files that no compiling code imports."""
EVERY_SOURCE: Final = tuple(
    path
    for folder in ("moe_compile", "passes")
    for pattern in ("*.py", "*.toml")
    for path in sorted((ROOT / folder).rglob(pattern))
)
SOURCES: Final = tuple(
    path for path in EVERY_SOURCE if not path.relative_to(ROOT).as_posix().startswith(BESIDE)
)
"""Files of compiling code."""


@functools.cache
def hash_of_sources(paths: tuple[Path, ...] = SOURCES) -> str:
    """Hash names and contents, not where they are installed: machines may share a cache."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def installed_version() -> str:
    """Return the installed version of megamoe, or a text that it is not installed."""
    try:
        return metadata.version("megamoe")
    except metadata.PackageNotFoundError:
        return "not installed"
