"""What of a job decides how its model is laid out, by the keys of torchtitan's TOML.

Contract
    The command line and the ranks read a layout by the same keys and defaults. Which layouts there
    are is said in `layout_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from moe_compile.errors import InvalidConfig

BACKEND: Final = "megamoe"
"""Value of `compile.backend` that asks for this recipe."""
MODEL: Final = "model"
"""Of `compile.components`: the part that has the exchanges."""


def _key(key: str, default: int | str | bool) -> Any:
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What of a job decides how its model is laid out; a field per key of torchtitan's TOML."""

    model: str = _key("model.name", "deepseek_v3")
    dp_replicate: int = _key("parallelism.data_parallel_replicate_degree", 1)
    dp_shard: int = _key("parallelism.data_parallel_shard_degree", -1)
    cp: int = _key("parallelism.context_parallel_degree", 1)
    tp: int = _key("parallelism.tensor_parallel_degree", 1)
    pp: int = _key("parallelism.pipeline_parallel_degree", 1)
    ep: int = _key("parallelism.expert_parallel_degree", 1)
    etp: int = _key("parallelism.expert_tensor_parallel_degree", 1)
    pp_schedule: str = _key("parallelism.pipeline_parallel_schedule", "1F1B")
    exchange: str = _key("parallelism.expert_parallel_comm_backend", "standard")
    async_tp: bool = _key("parallelism.enable_async_tensor_parallel", False)
    seq_len: int = _key("training.seq_len", 2048)
    checkpointing: str = _key("activation_checkpoint.mode", "selective")
    """Activation checkpointing."""
    selective: str = _key("activation_checkpoint.selective_ac_option", "2")
    """For "selective": "op", or every n-th layer."""
    reduce_dtype: str = _key("training.mixed_precision_reduce", "float32")
    """Type in which FSDP2 reduces gradients."""
    gradient_wire: str = _key("megamoe.gradient_wire", "same")
    """Type in which gradients travel."""
    batch: int = _key("training.local_batch_size", 8)
    """Sequences of a rank's batch."""
    microbatch: int = _key("parallelism.pipeline_parallel_microbatch_size", 1)
    """Those that go through a pipeline at once."""
    validates: bool = _key("validation.enable", False)
    validation_seq_len: int = _key("validation.seq_len", 2048)
    validation_batch: int = _key("validation.local_batch_size", 8)
    validation_steps: int = _key("validation.steps", -1)
    """-1 for all there is."""
    attention: str = _key("megamoe.attention", "auto")
    """How attention is divided over ranks."""
    query_heads: int = 0
    """Of the flavor; 0 where only the job's file is known, as for the two that follow."""
    kv_heads: int = 0
    kernel: str = ""
    """What computes attention: "sdpa", "flex", "varlen"."""

    @property
    def is_ulysses(self) -> bool:
        """Whether attention is divided by Ulysses; "auto" takes it where there is CP."""
        return self.attention == "ulysses" or (self.attention == "auto" and self.cp > 1)

    @property
    def has_mended_gradients(self) -> bool:
        """Whether torchtitan 0.2.2 gets gradients of it wrong that this recipe gets right."""
        return self.tp > 1 or self.pp > 1 or (self.dp_replicate > 1 and self.dense_shards == 1)

    @property
    def knows_shards(self) -> bool:
        """Whether the shard degree is a number, not "all ranks that are left" (-1)."""
        return self.dp_shard > 0

    @property
    def dense_shards(self) -> int:
        """Ranks over which torchtitan shards what is no expert: its mesh axis `fsdp`."""
        return self.dp_shard * self.cp


KEYS: Final = {f.name: str(f.metadata["key"]) for f in fields(Layout) if f.metadata}
"""TOML key of each field that has one."""
DEFAULTS: Final = {f.name: f.default for f in fields(Layout) if f.metadata}
"""What torchtitan takes when the key is absent."""
DEGREES: Final = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""Fields whose product is the number of ranks; EP and ETP borrow theirs from these."""


def read_layout(read: Callable[[str, Any], Any]) -> Layout:
    """Return the layout of a job; `read(key, default)` gives the value of a TOML key.

    Raises InvalidConfig for a degree that is no whole number.
    """
    values: dict[str, Any] = {}
    for name, key in KEYS.items():
        value, default = read(key, DEFAULTS[name]), DEFAULTS[name]
        values[name] = _as(type(default), value, key)
    return Layout(**values)


def of_model(layout: Layout, args: Any) -> Layout:
    """Return `layout` with what torchtitan's arguments of a model, `args`, say of its attention."""
    return replace(
        layout,
        query_heads=args.n_heads,
        kv_heads=getattr(args, "n_kv_heads", None) or args.n_heads,
        kernel=args.attn_type,
    )


def toml(value: Any) -> str:
    """Return `value` as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _as(kind: type, value: Any, key: str) -> Any:
    if kind is bool:
        return str(value).lower() == "true"
    if kind is str:
        return str(value)
    try:
        return int(str(value))
    except ValueError:
        raise InvalidConfig(f"{key} is {value!r}; write a whole number") from None
