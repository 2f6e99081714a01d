"""A script's function, `script.py:make_step`, as `megamoe check` and `megamoe bisect` take it.

Contract
    The script is read here, not run: a function is there where the script's text defines, assigns
    or imports its name at the top.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moe_compile.config import ENVIRONMENT_PREFIX, PREFIX, check_name, from_sources
from moe_compile.errors import InvalidConfig, listed

SUFFIX: Final = ".py"
EXAMPLE: Final = "make_step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A function of a script."""

    path: Path
    function: str


def is_script(said: str) -> bool:
    """Whether a command's argument names a script, with its function or without."""
    return said.partition(":")[0].endswith(SUFFIX)


def find_script(said: str) -> Script:
    """Return the script and function that `said` names. Raises InvalidConfig where one is not."""
    name, _, function = said.partition(":")
    path = Path(name)
    if not path.is_file():
        raise InvalidConfig(f"{name}: No such file")
    if not function:
        raise InvalidConfig(
            f"{name} names a script but no function: write {name}:FUNCTION, for example "
            f"{name}:{EXAMPLE}, where FUNCTION returns the parts of a training step (docs/check.md)"
        )
    try:
        tree = ast.parse(path.read_text(), filename=name)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{name} is not Python: {error}") from None
    names = [*_names(tree.body)]
    if function not in names and "*" not in names:
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        there = f"its functions are {(listed(function, defined) if defined else 'none')}"
        raise InvalidConfig(f"{name} has no function {function!r}; {there}")
    return Script(path=path.resolve(), function=function)


def _names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements define; "*" where only a run could tell."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = (one for target in targets for one in ast.walk(target))
            yield from (one.id for one in parts if isinstance(one, ast.Name))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield "*"


def flags_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the options of `--megamoe.name value` flags. Raises InvalidConfig for other words."""
    variables, words, start = dict[str, str](), list(overrides), f"--{PREFIX}"
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith(start):
            raise InvalidConfig(
                f"{flag}: a script takes only flags that begin with {start}, for example "
                f"{start}chunks 4"
            )
        if not equals:
            if not words:
                raise InvalidConfig(f"{flag}: write a value after this flag")
            value = words.pop(0)
        name = flag.removeprefix(start).replace("-", "_")
        check_name(name, where=flag)
        variables[ENVIRONMENT_PREFIX + name.upper()] = value
    own = {k: v for k, v in os.environ.items() if k.startswith(ENVIRONMENT_PREFIX)}
    config = from_sources(environment=own | variables)
    names = [variable.removeprefix(ENVIRONMENT_PREFIX).lower() for variable in variables]
    return {name: getattr(config, name) for name in names}
