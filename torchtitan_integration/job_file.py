"""A torchtitan TOML file and what the command line overrides in it, checked before a rank starts.

Contract
    Every error names the file or the flag, the key, and what to write. Only what concerns megamoe
    is checked; the rest is torchtitan's to say.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moe_compile.config import (
    ENVIRONMENT_PREFIX,
    OPTION_NAMES,
    TABLE_ONLY,
    MegaMoEConfig,
    check_name,
    from_sources,
)
from moe_compile.errors import InvalidConfig
from torchtitan_integration.layout import BACKEND, DEGREES, KEYS, read_layout
from torchtitan_integration.layout_rules import check_layout

KNOWN: Final = (*OPTION_NAMES, *TABLE_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """A TOML file, and the `--section.key value` flags that win over it."""

    path: Path
    content: Mapping[str, Any]
    overrides: tuple[str, ...] = ()

    def read(self, key: str, default: Any = None) -> Any:
        """Return what the flags, else the file, say of `section.key`; else `default`.

        An option of ours may come from the environment instead.
        """
        section, _, name = key.partition(".")
        if section == BACKEND:
            default = os.environ.get(ENVIRONMENT_PREFIX + name.upper(), default)
        said = self.content.get(section, {}).get(name, default)
        for i, word in enumerate(self.overrides):
            flag, equals, value = word.partition("=")
            written = flag.replace("-", "_")
            if written == f"__{section}.no_{name}":
                said = False
            elif written == f"__{key}":
                following = next(iter(self.overrides[i + 1 : i + 2]), "--")
                is_switch = not equals and following.startswith("--")  # it takes no value
                said = True if is_switch else value if equals else following
        return said


def load_job(path: Path, overrides: list[str]) -> JobFile:
    """Return the job of a TOML file.

    Raises InvalidConfig when the file, its `[megamoe]` table, or the layout is wrong.
    """
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not TOML: {error}") from None
    for section, table in content.items():
        if not isinstance(table, dict):
            raise InvalidConfig(f"{path}: {section} must be a table, [{section}]")
    job = JobFile(path=path, content=content, overrides=tuple(overrides))
    try:
        _check_options(job)
        if uses_megamoe(job):
            check_layout(read_layout(job.read))
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from None
    return job


def uses_megamoe(job: JobFile) -> bool:
    """Return whether the job asks for this recipe: `compile.backend` says so."""
    return str(job.read("compile.backend", "inductor")) == BACKEND


def num_ranks(job: JobFile) -> int:
    """Return the number of ranks the job's degrees multiply to.

    Raises InvalidConfig when a degree is left to torchtitan (-1).
    """
    layout = read_layout(job.read)
    degrees = {name: int(getattr(layout, name)) for name in DEGREES}
    if unknown := [KEYS[name] for name, value in degrees.items() if value < 1]:
        raise InvalidConfig(
            f"{job.path}: {unknown[0]} is -1 (all ranks); say how many with --nproc N, in a dry "
            "run with --world N"
        )
    return math.prod(degrees.values())


def first_ranks_of_stages(job: JobFile, ranks: int) -> range:
    """Return the first rank of each place in the pipeline."""
    return range(0, ranks, max(1, ranks // max(1, read_layout(job.read).pp)))


def rank_with_loss(job: JobFile, ranks: int) -> int:
    """Return the first rank of the last pipeline stage, which prints the loss."""
    return first_ranks_of_stages(job, ranks)[-1]


def _check_options(job: JobFile) -> None:
    """Raise InvalidConfig for an unknown option or an impossible value, in file or flags."""
    table = dict(job.content.get("megamoe", {}))
    for name in table:
        check_name(name, where="[megamoe]", known=KNOWN)
    environment = dict(os.environ)
    for name in _overridden(job):
        table.pop(name, None)
        value = job.read(f"megamoe.{name}", "")
        is_read = isinstance(getattr(MegaMoEConfig(), name, None), int | float | str)
        if name in TABLE_ONLY:
            table[name] = value
        elif is_read and value not in ("", True):
            environment[ENVIRONMENT_PREFIX + name.upper()] = value  # text, as a variable is
    from_sources(table=table, environment=environment)


def _overridden(job: JobFile) -> list[str]:
    """Return the names of the options that flags set with a value."""
    names = []
    for word in job.overrides:
        if not word.startswith("--megamoe."):
            continue
        name = word.removeprefix("--megamoe.").partition("=")[0].replace("-", "_")
        is_switch = isinstance(getattr(MegaMoEConfig(), name.removeprefix("no_"), None), bool)
        if not is_switch:  # torchtitan's --megamoe.strict and --megamoe.no-strict take no value
            check_name(name, where=f"--megamoe.{name}", known=KNOWN)
            names.append(name)
    return names
