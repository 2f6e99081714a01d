"""A torchtitan TOML file, a recipe or one's own, with the overrides of the command line.

Contract
    A path that exists is that file, whatever recipes are called.
    The job is checked before a rank starts: every error names the file or the flag, the key, and
    the remedy, and all faults are reported at once. Only megamoe's keys are checked here;
    `job_checks` has the rest.
    `with_options` writes options into a table of a file; comments, order and all other lines stay.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moe_compile.config import (
    ENVIRONMENT_PREFIX,
    OPTION_NAMES,
    TABLE_ONLY,
    MegaMoEConfig,
    from_sources,
    no_option,
)
from moe_compile.errors import InvalidConfig, listed
from torchtitan_integration.layout import BACKEND, DEGREES, KEYS, check_layout, read_layout, toml

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
    raise InvalidConfig(
        f"{said}: there is no such file, and no such recipe; the recipes are "
        f"{listed(name, recipes())}"
    )


KNOWN: Final = (*OPTION_NAMES, *TABLE_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFile:
    """A TOML file, and the `--section.key value` flags that win over it."""

    path: Path
    content: Mapping[str, Any]
    overrides: tuple[str, ...] = ()

    def read(self, key: str, default: Any = None) -> Any:
        """Return the value of `section.key` by the flags, else the file; else `default`.

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

    def is_true(self, key: str, *, default: bool = False) -> bool:
        """Return whether `section.key` is true, as TOML or a flag writes it."""
        return str(self.read(key, default)).lower() == "true"


def read_job(path: Path, overrides: list[str]) -> JobFile:
    """Return the job of a TOML file. Raises InvalidConfig where it is none."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not TOML: {error}") from None
    for section, table in content.items():
        if not isinstance(table, dict):
            raise InvalidConfig(f"{path}: {section} must be a table, [{section}]")
    return JobFile(path=path, content=content, overrides=tuple(overrides))


def refuse(job: JobFile, faults: Sequence[str]) -> None:
    """Raise InvalidConfig with all faults of a job, one a line; do nothing without faults."""
    different = list(dict.fromkeys(faults))
    if len(different) == 1:
        raise InvalidConfig(f"{job.path}: {different[0]}")
    if different:
        lines = "".join(f"\n  {fault}" for fault in different)
        raise InvalidConfig(f"{job.path}: {len(different)} things are wrong:{lines}")


def layout_faults(job: JobFile) -> Iterator[str]:
    """Yield why the recipe does not have the layout of a job."""
    if uses_megamoe(job):
        try:
            check_layout(read_layout(job.read))
        except InvalidConfig as error:
            yield from str(error).split("\n  ")


def uses_megamoe(job: JobFile) -> bool:
    """Return whether the job asks for this recipe by `compile.backend`."""
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


def option_faults(job: JobFile) -> Iterator[str]:
    """Yield faults of our options in file, flags and environment: names, then values."""
    table = dict(job.content.get(BACKEND, {}))
    unknown = [name for name in table if name not in KNOWN]
    flags = list(_overridden(job))
    yield from (no_option(name, where="[megamoe]", known=KNOWN) for name in unknown)
    unknown = [name for name in flags if name not in KNOWN]
    yield from (no_option(n, where=f"--megamoe.{n}", known=KNOWN) for n in unknown)
    yield from _value_faults(*_given(job))


def options_in(job: JobFile) -> MegaMoEConfig:
    """Return our options in file, flags and environment; raise InvalidConfig for a wrong value."""
    table, environment = _given(job)
    return from_sources(table=table, environment=environment)


def _given(job: JobFile) -> tuple[dict[str, Any], dict[str, str]]:
    """Return our options of the table, and those of flags and environment, as variables."""
    table, flags = job.content.get(BACKEND, {}), _overridden(job)
    values: dict[str, Any] = {k: v for k, v in table.items() if k in KNOWN and k not in flags}
    environment = dict(os.environ)
    for name in flags:
        value = job.read(f"{BACKEND}.{name}", "")
        is_read = isinstance(getattr(MegaMoEConfig(), name, None), int | float | str | tuple)
        if name in TABLE_ONLY:
            values[name] = value
        elif is_read and value not in ("", True):
            environment[ENVIRONMENT_PREFIX + name.upper()] = value  # text, as a variable is
    return values, {k: v for k, v in environment.items() if k.startswith(ENVIRONMENT_PREFIX)}


def _value_faults(table: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield faults of options' values, leaving out each faulty option in turn."""
    while why := _why_not(table, environment):
        yield why
        without = [
            *(({k: v for k, v in table.items() if k != name}, environment) for name in table),
            *((table, {k: v for k, v in environment.items() if k != n}) for n in environment),
        ]
        better = [pair for pair in without if _why_not(*pair) != why]
        if not better:
            return
        table, environment = better[0]


def _why_not(table: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    try:
        from_sources(table=table, environment=environment)
    except InvalidConfig as error:
        return str(error)
    return ""


def names_in_list(said: Any) -> list[str]:
    """Return the names of a list, as a flag has them, with commas, or as the file has."""
    return [n for n in said.split(",") if n] if isinstance(said, str) else list(said)


def _overridden(job: JobFile) -> list[str]:
    """Return the names of the options that flags set with a value."""
    names = []
    for word in job.overrides:
        if not word.startswith("--megamoe."):
            continue
        name = word.removeprefix("--megamoe.").partition("=")[0].replace("-", "_")
        is_switch = isinstance(getattr(MegaMoEConfig(), name.removeprefix("no_"), None), bool)
        if not is_switch:  # torchtitan's --megamoe.strict and --megamoe.no-strict take no value
            names.append(name)
    return names


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
        raise InvalidConfig(
            f"megamoe cannot edit the table [{table}] of this file; write into it yourself: {said}"
        )
