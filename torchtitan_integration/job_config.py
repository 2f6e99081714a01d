"""The `[megamoe]` table as torchtitan sees it: `job.custom_config_module` names this module.

Contract
    One field per option of `moe_compile.config.MegaMoEConfig`, with its name, type and default;
    but for `max_memory_increase`, which is tighter in a training job that knows its whole step,
    `equal_tokens`: torchtitan gives every rank batches of one size, and `measure_waits`, which its
    logger shows.
    Annotations here are types, not strings: torchtitan builds its own class from them.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Final

from moe_compile.config import (
    CHOICES,
    ENVIRONMENT_PREFIX,
    HINTS,
    PREFIX,
    TABLE_ONLY,
    MegaMoEConfig,
    from_sources,
)
from torchtitan_integration.layout import BACKEND, MODEL

RECIPE_DEFAULTS: Final[Mapping[str, Any]] = {
    "max_memory_increase": 0.05,
    "equal_tokens": True,
    "measure_waits": True,
}
"""Defaults of the recipe that differ from those of torch.compile."""

OUTSIDE_GRAPHS: Final = ("blocks_per_graph", "gradient_wire", "node_ranks")
"""Options the recipe acts on itself: FSDP2 reduces gradients outside of compiled graphs, and what
these reduce inside belongs to tensor parallelism; groups of nodes are made before any graph, and
so is the choice of what a graph has in it."""


REPORT_FILE: Final = "report.json"
"""Report file in the job's folder, where `megamoe.report` names no other."""


def _field(name: str, default: Any) -> tuple[str, Any, Any]:
    default = RECIPE_DEFAULTS.get(name, default)
    if isinstance(default, tuple):  # TOML has lists
        return name, list[str], field(default_factory=lambda: list(default))
    return name, str if name in CHOICES else HINTS.get(name, str), field(default=default)


MegaMoE = make_dataclass(
    "MegaMoE",
    [_field(f.name, f.default) for f in fields(MegaMoEConfig)]
    + [_field(name, choices[0]) for name, choices in TABLE_ONLY.items()],
)
"""The table `[megamoe]`."""


@dataclass
class JobConfig:
    """Fields that torchtitan merges into its own JobConfig."""

    megamoe: MegaMoE = field(default_factory=MegaMoE)  # type: ignore[valid-type]


def asks_for_megamoe(job: Any) -> bool:
    """Whether a torchtitan job asks for this recipe: it compiles, and names our backend."""
    return bool(job.compile.enable and job.compile.backend == BACKEND)


def with_model_compiled(job: Any) -> Any:
    """Return a torchtitan job that compiles the model too, where it names our backend.

    Some of torchtitan's own files for MoE models compile the loss alone.
    """
    components = job.compile.components
    if job.compile.backend != BACKEND or MODEL in components:
        return job
    return replace(job, compile=replace(job.compile, components=[MODEL, *components]))


def compile_options(table: Any, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the `options=` of torch.compile for the table of a job.

    `table` is None where the job has none. A key the TOML leaves at its default may still come
    from a `MEGAMOE_*` variable. Raises InvalidConfig for a wrong value.
    """
    written = _written(table)
    from_sources(table=written, environment=environment)
    recipe = {
        name: value
        for name, value in RECIPE_DEFAULTS.items()
        if ENVIRONMENT_PREFIX + name.upper() not in environment
    }
    inside = {k: v for k, v in written.items() if k not in (*TABLE_ONLY, *OUTSIDE_GRAPHS)}
    outside = {name: getattr(MegaMoEConfig(), name) for name in OUTSIDE_GRAPHS}
    chosen = {**recipe, **inside, **outside}
    return {PREFIX + name: value for name, value in chosen.items()}


def options_of(job: Any, environment: Mapping[str, str] = os.environ) -> MegaMoEConfig:
    """Return all options of a torchtitan job, from its table, if it has one, and the environment.

    Raises InvalidConfig for a wrong value.
    """
    table = getattr(job, PREFIX.rstrip("."), None)  # absent from a TOML without our config module
    return from_sources(table=_written(table), environment=environment)


def report_path(job: Any) -> str:
    """Return the path of the report of a torchtitan job."""
    return options_of(job).report or str(Path(job.job.dump_folder, REPORT_FILE))


def option_of(job: Any, name: str) -> Any:
    """Return one option of a torchtitan job, also one that only the table has."""
    if name in TABLE_ONLY:
        return getattr(getattr(job, PREFIX.rstrip("."), None), name, TABLE_ONLY[name][0])
    return getattr(options_of(job), name)


def _written(table: Any) -> dict[str, Any]:
    standard = asdict(MegaMoE())
    return {k: v for k, v in asdict(table or MegaMoE()).items() if v != standard[k]}
