"""What the user may set: one frozen dataclass, from `options=`, a TOML table, the environment.

Contract
    A `MegaMoEConfig` that exists is valid; every field is one of the documented options.
    Precedence: `options=` over the TOML table over `MEGAMOE_*` variables over the defaults.
    A value whose pass is not built yet is refused, never ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest

PREFIX: Final = "megamoe."
ENVIRONMENT_PREFIX: Final = "MEGAMOE_"

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "chunk_by": ("auto", "experts", "tokens", "batch"),
    "dispatch_wire": ("same", "fp8", "fp8_forward", "auto"),
    "combine_wire": ("same", "fp8", "fp8_forward", "auto"),
    "dispatch": ("all_to_all", "all_gather", "auto"),
    "dispatch_padding": ("exact", "worst"),
    "recompute": ("model", "save_exchanges", "recompute_exchanges"),
    "gradient_wire": ("same", "bf16_fp32_sum"),
    "attention_split": ("none", "qkv", "out", "both"),
    "numerics": ("exact", "bounded", "lossy"),
    "codegen": ("inductor", "fx"),
}
"""Values each closed option takes."""

NOT_BUILT: Final[Mapping[str, tuple[str, ...]]] = {
    "chunk_by": ("batch",),
}
"""Documented values whose pass this version does not have."""

OFF: Final[Mapping[str, tuple[object, ...]]] = {
    "chunks": (1,),
    "dispatch": ("all_to_all", "auto"),
    "dispatch_wire": ("same", "auto"),
    "combine_wire": ("same", "auto"),
    "attention_chunks": (1,),
    "attention_split": ("none",),
}
"""Values of options that ask for no rewrite, the one that leaves the model as it is first."""

TABLE_ONLY: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("auto", "tensor", "ulysses"),
}
"""Options of the TOML table that a recipe acts on, and the values this version has, the default
first. `attention`: each rank its heads of the whole sequence ("tensor", by tensor parallelism), or
its part of the sequence, exchanged for heads around attention ("ulysses", by context parallelism);
"auto" follows the job's degrees."""


TYPES: Final[Mapping[str, tuple[type, str]]] = {
    "equal_tokens": (bool, "true or false"),
    "schedule": (bool, "true or false"),
    "async_tp": (bool, "true or false"),
    "strict": (bool, "true or false"),
    "step_peak_bytes": (int, "a number of bytes"),
    "hardware": (str, "a string"),
    "report": (str, "a string"),
    "disable_passes": (tuple, "a list of pass names"),
}
"""Types of the open options, and what to write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaMoEConfig:
    """The options of `torch.compile(..., backend="megamoe")`; names and defaults as documented."""

    chunks: int | str = "auto"
    """Chunks per MoE region, or "auto": what is predicted to be fastest (docs/planner.md) where
    `equal_tokens` is promised and sizes are static, else min(2, local experts)."""
    chunk_by: str = "auto"
    """The axis a region is chunked along: "auto" takes experts, which changes no bit; "tokens", a
    share of every expert's rows, is for few local experts, and sums weight gradients by chunk;
    products of four and eight bytes, whose rows a CPU rounds by their number, round otherwise."""
    attention_chunks: int | str = 1
    """Groups of heads that attention between exchanges runs in, a divisor of the local KV heads;
    "auto": as for `chunks`, else 2 where it divides them. 1: no figure on GPUs says more pay."""
    attention_split: str = "none"
    """Projections that run by groups of heads too, each under the other groups' exchanges: "qkv",
    "out", "both". Sums over groups round otherwise than whole ones: only for who asks for it."""
    async_tp: bool = False
    """Whether attention under tensor parallelism is handed to Inductor's async TP, where symmetric
    memory is enabled for its group; it sums over ranks in an order of its own."""
    dispatch_wire: str = "same"
    """Number format of the dispatch exchange: "same" as the model's; "fp8", e4m3 with scales, its
    gradient too; "fp8_forward", the gradient as the model has it; "auto", "fp8" where predicted to
    pay, which needs `equal_tokens` and `numerics` = "lossy"."""
    combine_wire: str = "same"
    """Number format of the combine exchange, in the same words."""
    numerics: str = "exact"
    """What "auto" may choose from: "exact", what changes no bit; "bounded", also what adds up in
    another order, by a bound that the report states; "lossy", all there is. An option that names
    what it wants is obeyed whatever this says."""
    dispatch: str = "all_to_all"
    """What moves tokens to experts: "all_to_all"; "all_gather", then a reduce-scatter back, which
    rounds sums of more than two rows otherwise, and weighted sums with their gradients; "auto":
    that where it is predicted to pay and `numerics` allows how it rounds, which needs static sizes;
    else where k > 0.75 n and no bit changes."""
    dispatch_padding: str = "exact"
    """Rows an all-gathered region has room for: "exact", those that came, read by the host once;
    "worst", all that may come, the rest zeros: static shapes, no host read, more memory."""
    equal_tokens: bool = False
    """The promise that in every step all ranks have the same number of tokens, which no rank can
    see: without it nothing is all-gathered. The torchtitan recipe, whose batches are, makes it."""
    schedule: bool = True
    """Whether to reorder launches, waits and compute so that exchanges run under compute."""
    recompute: str = "save_exchanges"
    """What activation checkpointing does with exchanges: obey the model, save, or recompute."""
    gradient_wire: str = "same"
    """How float32 gradients are summed over ranks: "same" as the model says, or each rank's part
    rounded once to bfloat16, exchanged, and summed in float32: half the bytes."""
    max_memory_increase: float = 0.30
    """Largest rise of a graph's peak of live bytes that scheduling may cause, as a fraction of
    `step_peak_bytes`, or of that peak where it is larger."""
    step_peak_bytes: int = 0
    """Peak of a whole training step (parameters, gradients, optimizer, saved activations), bytes;
    0 when unknown. The torchtitan recipe fills it in with what it knows of it."""
    hardware: str = "detect"
    """Rates for time estimates: "detect" asks NVML; else a profile's name or a TOML path."""
    codegen: str = "inductor"
    """Who runs the graph: Inductor, or "fx" to run it node by node in our order."""
    strict: bool = False
    """Raise when a pass fails or a matched region cannot be proven safe to transform."""
    disable_passes: tuple[str, ...] = ()
    """Names of passes to leave out."""
    report: str = ""
    """Path the JSON report is written to, "" for none."""

    def __post_init__(self) -> None:
        """Raise InvalidConfig for a value no documented option takes."""
        _check_chunks("chunks", self.chunks)
        _check_chunks("attention_chunks", self.attention_chunks)
        for name, choices in CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        if self.attention_split != "none" and self.attention_chunks == 1:
            raise InvalidConfig(
                f"megamoe.attention_split is {self.attention_split!r}, with one group of heads; "
                "write megamoe.attention_chunks = 2 or more as well"
            )
        _check_share(self.max_memory_increase)
        for name, (kind, what) in TYPES.items():
            value = getattr(self, name)
            if type(value) is not kind:
                raise InvalidConfig(f"megamoe.{name} is {value!r}; write {what}")
        if self.step_peak_bytes < 0:
            raise InvalidConfig(
                f"megamoe.step_peak_bytes is {self.step_peak_bytes}; write 0 or more bytes"
            )
        if not all(isinstance(name, str) for name in self.disable_passes):
            raise InvalidConfig(
                f"megamoe.disable_passes is {self.disable_passes!r}; write a list of pass names"
            )

    def allows(self, numerics: str) -> bool:
        """Whether "auto" may choose what is "bounded", or "lossy"."""
        known = CHOICES["numerics"]
        return known.index(numerics) <= known.index(self.numerics)

    def asks_for(self, option: str) -> bool:
        """Whether `option` asks for a rewrite, so that `strict` holds us to it."""
        return getattr(self, option) not in OFF.get(option, (getattr(self, option),))

    def digest_text(self) -> str:
        """Return what this configuration contributes to cache keys: all but the report's path."""
        return repr([(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "report"])


OPTION_NAMES: Final = tuple(f.name for f in fields(MegaMoEConfig))


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `options=` of torch.compile into (megamoe's, without the prefix; Inductor's).

    Raises InvalidConfig for an unknown `megamoe.` name.
    """
    ours = {k.removeprefix(PREFIX): v for k, v in options.items() if k.startswith(PREFIX)}
    for name in ours:
        check_name(name, where="options=")
    return ours, {k: v for k, v in options.items() if not k.startswith(PREFIX)}


def check_name(name: str, *, where: str, known: tuple[str, ...] = OPTION_NAMES) -> None:
    """Raise InvalidConfig unless `name` is a documented option; `where` says who wrote it."""
    if name not in known:
        raise InvalidConfig(f"{where}: megamoe has no option {name!r}.{nearest(name, known)}")


def from_sources(
    *,
    options: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> MegaMoEConfig:
    """Return the configuration of `options=` (no prefix), a TOML table and `MEGAMOE_*` variables.

    Raises InvalidConfig for an unknown name or an impossible value.
    """
    values = _from_environment(environment or {})
    for where, source in (("[megamoe]", table or {}), ("options=", options or {})):
        for name, value in source.items():
            if source is table and name in TABLE_ONLY:
                _check_table_only(name, value)
                continue
            check_name(name, where=where)
            values[name] = tuple(value) if isinstance(value, list) else value
    return MegaMoEConfig(**values)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        check_name(name, where=variable)
        values[name] = _parse(variable, name, environment[variable])
    return values


def _parse(variable: str, name: str, text: str) -> Any:
    default = MegaMoEConfig.__dataclass_fields__[name].default
    if isinstance(default, bool):
        words = {"1": True, "true": True, "0": False, "false": False}
        if text.lower() not in words:
            raise InvalidConfig(f"{variable} is {text!r}; write 1 or 0")
        return words[text.lower()]
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in ("chunks", "attention_chunks", "step_peak_bytes"):
        return int(text) if re.fullmatch(r"-?[0-9]+", text) else text
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise InvalidConfig(f"{variable} is {text!r}; write a number") from None
    return text


def _check_table_only(name: str, value: object) -> None:
    if value not in TABLE_ONLY[name]:
        raise InvalidConfig(
            f"[megamoe] {name} = {value!r} is not available in this version; "
            f"write one of {', '.join(TABLE_ONLY[name])}"
        )


def _check_chunks(name: str, chunks: object) -> None:
    whole = isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1
    if not whole and chunks != "auto":
        raise InvalidConfig(
            f'megamoe.{name} is {chunks!r}; write "auto" or a whole number of at least 1'
        )


def _check_share(share: Any) -> None:
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not math.isfinite(share) or share < 0:
        raise InvalidConfig(
            f"megamoe.max_memory_increase is {share!r}; write a fraction of at least 0, as 0.05"
        )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidConfig(
            f"megamoe.{name} is {value!r}; write one of {', '.join(choices)}."
            + (nearest(value, choices) if isinstance(value, str) else "")
        )
    if value in NOT_BUILT.get(name, ()):
        built = [c for c in choices if c not in NOT_BUILT[name]]
        raise InvalidConfig(
            f"megamoe.{name} = {value!r} is not available in this version; "
            f"write one of {', '.join(built)}"
        )
