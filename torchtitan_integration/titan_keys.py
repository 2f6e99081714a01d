"""Keys of a torchtitan job, their kinds, and known names, read off torchtitan's sources.

Contract
    Imports neither torch nor torchtitan, which takes ten seconds: sources are parsed. A key or name
    not found there is unknown, and then nothing is refused for it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moe_compile.errors import InvalidConfig

WORDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "list": "a list of strings, with commas in a flag",
}
"""Text on what to write for a kind of value."""
Kinds = tuple[str, ...]
"""Alternative kinds of a key's value: "int", "Literal['a', 'b']", "None"."""


BUILT_ON: Final = ("config/job_config.py", "protocols/train_spec.py", "models/moe/moe.py")
"""Files of torchtitan 0.2.2 that the recipe reads or extends; 0.3 has none of them."""


def check_torchtitan() -> None:
    """Raise InvalidConfig unless a torchtitan that the recipe supports is installed."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None:
        raise InvalidConfig(
            "torchtitan is not installed; pip install 'megamoe[titan]' installs the supported "
            "version"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    lacks = [name for name in BUILT_ON if not any((f / name).is_file() for f in folders)]
    if lacks:
        raise InvalidConfig(
            f"torchtitan {_version()} is installed, and it has no torchtitan/{lacks[0]}; the "
            "recipe extends the train specs of torchtitan 0.2.2 and reads its TOML files. To do: "
            "pip install 'torchtitan==0.2.2', or compile the blocks of a newer one yourself: "
            "docs/torchtitan.md, torchtitan 0.3"
        )


def _version() -> str:
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"


def keys_of_jobs(custom_module: str) -> Mapping[str, Kinds]:
    """Return the dotted keys of a job's configuration, {} where torchtitan is not as expected.

    `custom_module` is the job's own `job.custom_config_module`, "" for none. Raises InvalidConfig
    where it cannot be imported.
    """
    keys = _keys_of_titan()
    if not keys or not custom_module:
        return keys
    sys.path.append(str(Path.cwd()))  # as `python -m`, by which ranks are started, has it
    try:
        config = importlib.import_module(custom_module).JobConfig
    except (ImportError, AttributeError) as error:
        raise InvalidConfig(f"job.custom_config_module = {custom_module!r}: {error}") from None
    finally:
        sys.path.pop()
    return {**keys, **dict(_of_class(config))}


@functools.cache
def names_in(path: str, table: str) -> tuple[str, ...]:
    """Return the keys of the dictionaries at the top of a file of torchtitan, () for none.

    `table` is the end of the dictionary's name: `_args`, `DATASETS`.
    """
    return tuple(
        key.value
        for node in _parsed(path).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if any(isinstance(t, ast.Name) and t.id.endswith(table) for t in node.targets)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


@functools.cache
def own_flavors(model: str) -> tuple[str, ...]:
    """Return the names of the flavors of a model that the recipe adds."""
    body = ast.parse((Path(__file__).parent / "flavors.py").read_text()).body
    tables = (n.value for n in body if isinstance(n, ast.AnnAssign) and "FLAVORS" in ast.unparse(n))
    return tuple(
        ast.literal_eval(flavor)
        for table in tables
        if isinstance(table, ast.Dict)
        for key, flavors in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == model and isinstance(flavors, ast.Dict)
        for flavor in flavors.keys
        if flavor is not None
    )


@functools.cache
def _keys_of_titan() -> dict[str, Kinds]:
    classes = {
        node.name: {
            field.target.id: ast.unparse(field.annotation)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for node in _parsed("config/job_config.py").body
        if isinstance(node, ast.ClassDef)
    }

    def walk(name: str, prefix: str) -> Iterator[tuple[str, Kinds]]:
        for field, annotation in classes.get(name, {}).items():
            if annotation in classes:
                yield from walk(annotation, f"{prefix}{field}.")
            else:
                yield f"{prefix}{field}", kinds_of(annotation)

    return dict(walk("JobConfig", ""))


def _of_class(config: type[Any], prefix: str = "") -> Iterator[tuple[str, Kinds]]:
    for field in dataclasses.fields(config):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from _of_class(field.type, f"{prefix}{field.name}.")
        else:
            kind = field.type.__name__ if type(field.type) is type else str(field.type)
            yield f"{prefix}{field.name}", kinds_of(kind)


def _parsed(path: str) -> ast.Module:
    """Return a source of torchtitan, parsed; an empty one where there is none."""
    spec = importlib.util.find_spec("torchtitan")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    found = [file for folder in folders if (file := Path(folder) / path).is_file()]
    return ast.parse(found[0].read_text() if found else "")


def kinds_of(annotation: str) -> Kinds:
    """Return the alternatives of an annotation: `int | None` is `("int", "None")`."""

    def split(node: ast.expr) -> Iterator[str]:
        if isinstance(node, ast.BinOp):
            yield from split(node.left)
            yield from split(node.right)
        else:
            yield ast.unparse(node).removeprefix("typing.")

    return tuple(split(ast.parse(annotation, mode="eval").body))


def admits(kinds: Kinds, value: object) -> bool:
    """Whether a value of TOML is of one of `kinds`."""
    return any(_admits(kind, value) for kind in kinds)


def _admits(kind: str, value: object) -> bool:
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    types = {"int": int, "bool": bool, "str": str, "None": type(None)}
    if kind in types:
        return type(value) is types[kind]
    if kind.startswith("Literal["):
        return value in _choices(kind)
    return isinstance(value, list) if kind.startswith("list") else True


def reads(kinds: Kinds, text: str) -> bool:
    """Whether the text of a flag is a value of one of `kinds`."""
    return any(_reads(kind, text) for kind in kinds)


def _reads(kind: str, text: str) -> bool:
    if kind in ("int", "float"):
        try:
            return bool({"int": int, "float": float}[kind](text) is not None)
        except ValueError:
            return False
    if kind == "None":
        return text == "None"
    return text in _choices(kind) if kind.startswith("Literal[") else True


def _choices(kind: str) -> tuple[object, ...]:
    node = ast.parse(kind, mode="eval").body
    value = ast.literal_eval(node.slice) if isinstance(node, ast.Subscript) else ()
    return value if isinstance(value, tuple) else (value,)


def said(kinds: Kinds) -> str:
    """Return the text on what to write for `kinds`."""
    words = []
    for kind in kinds:
        if kind.startswith("Literal["):
            words.append("one of " + ", ".join(map(str, _choices(kind))))
        elif kind != "None":
            words.append(WORDS.get(kind.partition("[")[0], kind))
    return " or ".join(words)
