"""Options written into a table of a TOML file; comments, order and all other lines stay."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from moe_compile.errors import InvalidConfig
from torchtitan_integration.layout import toml


def with_options(text: str, table: str, options: Mapping[str, Any]) -> str:
    """Return a TOML file's text with `options` in `[table]`, which is added where there is none.

    Raises InvalidConfig where the table is written in a way that cannot be edited line by line.
    """
    lines = text.splitlines()
    heads = [place for place, line in enumerate(lines) if line.lstrip().startswith("[")]
    begin = next((p for p in heads if re.match(rf"\s*\[\s*{table}\s*\]", lines[p])), None)
    if begin is None:
        lines += ["", f"[{table}]"]
        begin = len(lines) - 1
    end = next((place for place in heads if place > begin), len(lines))
    body = lines[begin + 1 : end]
    for name, value in options.items():
        _set(body, name, toml(value))
    changed = "\n".join([*lines[: begin + 1], *body, *lines[end:]]) + "\n"
    _check(text, changed, table, options)
    return changed


def _set(body: list[str], name: str, value: str) -> None:
    """Set one option in the lines of a table: in its own line, else in a new first one."""
    pattern = re.compile(rf"(\s*{name}\s*=\s*)(\"[^\"]*\"|'[^']*'|[^\s#]+)(.*)")
    for place, line in enumerate(body):
        if found := pattern.fullmatch(line):
            body[place] = f"{found[1]}{value}{found[3]}"
            return
    body.insert(0, f"{name} = {value}")


def _check(text: str, changed: str, table: str, options: Mapping[str, Any]) -> None:
    wanted = tomllib.loads(text)
    wanted[table] = {**wanted.get(table, {}), **options}
    try:
        is_so = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        is_so = False
    if not is_so:
        said = ", ".join(f"{name} = {toml(value)}" for name, value in options.items())
        raise InvalidConfig(f"the table [{table}] cannot be edited here; write into it: {said}")
