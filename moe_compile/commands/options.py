"""`megamoe options` prints `docs/options.md`, made from the fields of `MegaMoEConfig`."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import textwrap
from dataclasses import fields
from typing import Any, Final

from moe_compile import config
from moe_compile.config import CHOICES, HINTS, KINDS, TABLE_ONLY, MegaMoEConfig, what_to_write
from torchtitan_integration.job_config import RECIPE_DEFAULTS

HEAD: Final = """\
# Options

Made from `MegaMoEConfig` in `moe_compile/config.py` by `megamoe options > docs/options.md`.

An option may be written in several places. If several of them have it, the
first in this table wins:

| where | how |
| --- | --- |
| `torch.compile` | `options={"megamoe.chunks": 4}` |
| flags of `megamoe train` | `--megamoe.chunks 4` |
| TOML of a torchtitan job | `chunks = 4` in the table `[megamoe]` |
| environment | `MEGAMOE_CHUNKS=4`; true and false as 1 and 0, lists with commas |

An unknown name or value is an error (`InvalidConfig`). It is raised when the compiled model is
first called, because torch passes options to a backend only then. All other keys of `options=`, and
`mode=`, go to Inductor. torch takes only one of the two ("Either mode or options can be
specified"). So with options of megamoe, write the settings of a mode as options too:
`torch._inductor.list_mode_options("max-autotune-no-cudagraphs")` returns them. Which of these are
off in graphs with regions is in [limits.md](limits.md#compilation).
"""
OPEN: Final[dict[object, str]] = {
    float: "a number of at least 0",
    int | float: "a share of at most 1, such as 0.5, or a whole number of bytes per graph, such as "
    "2_000_000_000",
    float | str: '"auto" or a number above 0',
    int | str: '"auto" or a whole number of at least 1',
}


def add_options(commands: Any) -> None:
    """Add the subcommand."""
    commands.add_parser("options", help="print what every option means").set_defaults(run=_print)


def _print(_: object) -> int:
    print(page(), end="")  # noqa: T201  (what was asked for)
    return 0


def page() -> str:
    """Return `docs/options.md`."""
    module = ast.parse(inspect.getsource(config))
    (own,) = (node for node in module.body if isinstance(node, ast.ClassDef))
    texts, about = _texts(own.body), _texts(module.body)["TABLE_ONLY"]
    options = [(f.name, f.default, texts[f.name]) for f in fields(MegaMoEConfig)]
    options += [(name, values[0], about) for name, values in TABLE_ONLY.items()]
    return HEAD + "".join(_section(*option) for option in options)


def _texts(body: list[ast.stmt]) -> dict[str, str]:
    return {
        ast.unparse(named.target): ast.literal_eval(text.value)
        for named, text in itertools.pairwise(body)
        if isinstance(named, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _values(name: str) -> str:
    known = {**CHOICES, **TABLE_ONLY}.get(name, ())
    built = map(json.dumps, known)
    if HINTS.get(name) in KINDS:
        return what_to_write(name)
    return ", ".join(built) or OPEN[HINTS[name]]


def _section(name: str, default: object, text: str) -> str:
    in_jobs = RECIPE_DEFAULTS.get(name, default)
    other = "" if in_jobs == default else f"; {json.dumps(in_jobs)} in torchtitan jobs"
    linked = re.sub(r"docs/([\w.]+\.md)(#[\w-]+)?", r"[\1](\1\2)", " ".join(text.split()))
    prose = textwrap.fill(linked, 118, break_long_words=False, break_on_hyphens=False)
    values = f"Values: {_values(name)}. Default: {json.dumps(default)}{other}."
    return f"\n## `{name}`\n\n{values}\n\n{prose}\n"
