"""Files of ours beside Inductor's caches, which a later process finds as it finds compiled code.

No fault: torch has no public place in its caches for files of others, so the folder is found by
torch._inductor.runtime.cache_dir_utils.cache_dir.

Contract
    Nothing is kept where Inductor keeps nothing. A file is written whole or not at all; a file that
    cannot be written, on a full or read-only disk, is not there later.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import torch._inductor.config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir


def kept_path(name: str) -> Path | None:
    """Return the path where the file `name` is kept, None where Inductor keeps nothing."""
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return None
    return Path(cache_dir()) / "megamoe" / name


def keep(path: Path, text: str) -> None:
    """Write a file."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
