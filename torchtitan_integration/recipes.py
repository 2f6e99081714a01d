"""Jobs that come with megamoe, by name: `megamoe train deepseek_v3_debug_cpu`.

Contract
    A path that exists is that file, whatever recipes are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from moe_compile.errors import InvalidConfig, listed

FOLDER: Final = Path(__file__).parent / "configs"


def recipes() -> tuple[str, ...]:
    """Return the names of all recipes."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def find_job(said: str) -> Path:
    """Return the file that `said` names, a path or a recipe. Raises InvalidConfig for neither."""
    path = Path(said)
    if path.exists():
        return path
    name = path.name.removesuffix(".toml")
    if len(path.parts) == 1 and name in recipes():
        return FOLDER / f"{name}.toml"
    raise InvalidConfig(f"{said}: No such file, nor a recipe; these are {listed(name, recipes())}")
