"""TOML files in which every number stands beside its origin.

Contract
    A number, or a list of them, is `{ value = ..., origin = "kind: text" }`; strings and tables
    are as ever. Reading strips origins off and gathers them by dotted path.
    A number of a profile without an origin is refused.

An origin is `kind: text`. A measurement names its day and its machine, a fit the data it fits.
"""

from __future__ import annotations

import enum
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcedFile:
    """A file read: plain values, and the origin of each number."""

    path: Path
    values: Mapping[str, Any]
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted path of a number, `compute.num_sms` or `link.0.gb_per_s` -> its origin."""


def read_sourced(path: Path) -> SourcedFile:
    """Return the file's values and origins.

    Raises FileNotFoundError, and InvalidConfig when it is not TOML or a number has no origin.
    """
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"megamoe.hardware: {path} is not TOML: {error}") from None
    origins: dict[str, str] = {}
    try:
        values = {key: _plain(value, key, origins) for key, value in table.items()}
    except InvalidConfig as error:
        raise InvalidConfig(f"megamoe.hardware: {path}: {error}") from None
    return SourcedFile(path=path, values=values, origins=origins)


def sourced_lines(numbers: Mapping[str, float], origins: Mapping[str, str]) -> list[str]:
    """Return one TOML line per number; raise InvalidConfig when one has no origin."""
    lines = []
    for name, value in numbers.items():
        origin = origins.get(name)
        check_origin(name, origin)
        lines.append(f'{name} = {{ value = {value:.2g}, origin = "{_escaped(str(origin))}" }}')
    return lines


def put_number(table: Mapping[str, Any], path: str, value: Any, origin: str) -> None:
    """Put a number and its origin into a raw table, at a dotted path whose tables are there."""
    *tables, key = path.split(".")
    inner: Any = table
    for name in tables:
        inner = inner[int(name)] if isinstance(inner, list) else inner[name]
    inner[key] = {"value": value, "origin": origin}


def dump_sourced(table: Mapping[str, Any]) -> str:
    """Return TOML for a raw table in which numbers are `{ value, origin }`, subtables last."""
    return "\n".join(_lines(table, "")) + "\n"


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    later: list[tuple[str, Mapping[str, Any]]] = []
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, str):
            yield f'{key} = "{_escaped(value)}"'
        elif isinstance(value, list):
            later.extend((f"[[{where}]]", inner) for inner in value)
        elif "value" in value:
            check_origin(where, value.get("origin"))
            number, origin = value["value"], _escaped(value["origin"])
            yield f'{key} = {{ value = {number}, origin = "{origin}" }}'
        else:
            later.append((f"[{where}]", value))
    for heading, inner in later:
        yield f"\n{heading}"
        yield from _lines(inner, heading.strip("[]"))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _plain(value: Any, path: str, origins: dict[str, str]) -> Any:
    if isinstance(value, dict) and "value" in value:
        if extra := sorted(set(value) - {"value", "origin"}):
            raise InvalidConfig(
                f"{path} must have a value and an origin alone, and has {extra} too"
            )
        check_origin(path, value.get("origin"))
        origins[path] = value["origin"]
        return value["value"]
    if isinstance(value, dict):
        return {key: _plain(inner, f"{path}.{key}", origins) for key, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_plain(inner, f"{path}.{i}", origins) for i, inner in enumerate(value)]
    if isinstance(value, str):
        return value
    raise InvalidConfig(
        f"{path} = {value!r} has no origin; write "
        f'{path.rpartition(".")[2]} = {{ value = {value!r}, origin = "measured: DAY on MACHINE" }}'
    )


class Provenance(enum.Enum):
    """The origin of a number, from the most to the least reliable."""

    MEASURED = "measured"
    DATASHEET = "datasheet"
    LITERATURE = "literature"
    FITTED = "fitted"
    COMPUTED = "computed"
    ASSUMED = "assumed"


MUST_SAY: Final = {
    Provenance.MEASURED: (
        r"\d{4}-\d{2}-\d{2}.* on ",
        "the day and the machine: measured: 2026-01-31 on",
    ),
    Provenance.FITTED: (r"\bon ", "what it was fitted on: fitted: on"),
}
"""Kind -> a pattern that its text must match, and how to ask for it."""


def check_origin(number: str, origin: object) -> Provenance:
    """Return the kind of `origin`; raise InvalidConfig when it says too little for `number`."""
    if not isinstance(origin, str) or not origin.partition(":")[2].strip():
        kinds = ", ".join(kind.value for kind in Provenance)
        raise InvalidConfig(f"{number}: origin is {origin!r}; write one of {kinds}, `: `, and why")
    word, _, text = origin.partition(":")
    if word not in {kind.value for kind in Provenance}:
        known = nearest(word, [kind.value for kind in Provenance])
        raise InvalidConfig(
            f"{number}: {word!r} is not a kind of origin that megamoe knows.{known}"
        )
    kind = Provenance(word)
    pattern, wanted = MUST_SAY.get(kind, ("", ""))
    if not re.search(pattern, text):
        raise InvalidConfig(f"{number}: origin {origin!r} must say {wanted} ...")
    return kind
