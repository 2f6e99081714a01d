"""The part of a job that decides its model's layout, by keys of torchtitan's TOML, and refusals.

Contract
    The command line and the ranks read a layout by the same keys and defaults.
    A layout that would train wrongly, or fail late, is refused by the name of its TOML key before
    training starts. The command line, the ranks and `docs/layouts.md` read the same `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from moe_compile.errors import InvalidConfig

BACKEND: Final = "megamoe"
"""Value of `compile.backend` that asks for this recipe."""
MODEL: Final = "model"
"""Component of `compile.components` that has the exchanges."""


def _key(key: str, default: int | str | bool | tuple[str, ...]) -> Any:
    return field(default=default, metadata={"key": key})


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The part of a job that decides its model's layout; a field per key of torchtitan's TOML."""

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
    converters: tuple[str, ...] = _key("model.converters", ())
    seq_len: int = _key("training.seq_len", 2048)
    checkpointing: str = _key("activation_checkpoint.mode", "selective")
    """Activation checkpointing."""
    selective: str = _key("activation_checkpoint.selective_ac_option", "2")
    """For "selective": "op", or every n-th layer."""
    recompute: str = _key("megamoe.recompute", "save_exchanges")
    """What the backward pass computes again, as megamoe's option says."""
    recompute_modules: tuple[str, ...] = _key("megamoe.recompute_modules", ())
    """Parts of the model that the backward pass computes again."""
    reduce_dtype: str = _key("training.mixed_precision_reduce", "float32")
    """Type in which FSDP2 reduces gradients."""
    gradient_wire: str = _key("megamoe.gradient_wire", "same")
    """Type in which gradients travel."""
    batch: int = _key("training.local_batch_size", 8)
    """Sequences of a rank's batch."""
    microbatch: int = _key("parallelism.pipeline_parallel_microbatch_size", 1)
    """Sequences that go through a pipeline at once."""
    validates: bool = _key("validation.enable", False)
    validation_seq_len: int = _key("validation.seq_len", 2048)
    validation_batch: int = _key("validation.local_batch_size", 8)
    validation_steps: int = _key("validation.steps", -1)
    """Steps of a validation; -1 for all data."""
    attention: str = _key("megamoe.attention", "auto")
    """Way in which attention is divided over ranks."""
    query_heads: int = 0
    """Query heads of the flavor; 0 where only the job's file is known, as for the next two."""
    kv_heads: int = 0
    kernel: str = ""
    """Kernel of attention: "sdpa", "flex", "varlen"."""

    @property
    def is_ulysses(self) -> bool:
        """Whether attention is divided by Ulysses; "auto" takes it where there is CP."""
        return self.attention == "ulysses" or (self.attention == "auto" and self.cp > 1)

    @property
    def knows_shards(self) -> bool:
        """Whether the shard degree is a number, not "all ranks that are left" (-1)."""
        return self.dp_shard > 0

    @property
    def dense_shards(self) -> int:
        """Ranks over which torchtitan shards all but experts: its mesh axis `fsdp`."""
        return self.dp_shard * self.cp


KEYS: Final = {f.name: str(f.metadata["key"]) for f in fields(Layout) if f.metadata}
"""TOML key of each field that has one."""
DEFAULTS: Final = {f.name: f.default for f in fields(Layout) if f.metadata}
"""torchtitan's value when the key is absent."""
DEGREES: Final = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
"""Fields whose product is the number of ranks; EP and ETP share the ranks of these."""


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
    """Return `layout` with the attention of torchtitan's arguments of a model, `args`."""
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
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _as(kind: type, value: Any, key: str) -> Any:
    if kind is bool:
        return str(value).lower() == "true"
    if kind is tuple:
        names = value.split(",") if isinstance(value, str) else value
        return tuple(str(name).strip() for name in names if str(name).strip())
    if kind is str:
        return str(value)
    try:
        return int(str(value))
    except ValueError:
        raise InvalidConfig(f"{key} is {value!r}; write a whole number") from None


MODELS: Final = ("deepseek_v3", "gpt_oss", "llama4", "qwen3")
SCHEDULES: Final = ("1F1B", "Interleaved1F1B")
IN_FP8: Final = "quantize.grouped_mm.float8"
"""torchtitan's converter of the products of experts, by torchao."""
BY_BUDGET: Final = "memory_budget"
"""Mode of activation checkpointing that megamoe answers with `recompute` = "price"."""
PRICED: Final = ("price", "save_exchanges")
"""Values of `recompute` beside it: the one that it stands for, and the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A layout that is refused."""

    holds: Callable[[Layout], bool]
    """Whether a layout is of this kind."""
    what: str
    """The kind, for the table in the docs."""
    field: str
    """Field of `Layout` to change."""
    instead: Callable[[Layout], Any]
    """Nearest value that works."""
    why: str

    def message(self, layout: Layout) -> str:
        """Return the message for the user."""
        key = KEYS[self.field]
        value, better = getattr(layout, self.field), self.instead(layout)
        left_out = f"{self.what} ({self.why})"
        return f"{key} = {toml(value)} is not available: {left_out}; write {key} = {toml(better)}"


RULES: Final = (
    Rule(
        holds=lambda x: x.model not in MODELS,
        what="models other than " + ", ".join(MODELS),
        field="model",
        instead=lambda _: MODELS[0],
        why="the recipe is for torchtitan's MoE models; a model without experts has no exchange to "
        "hide",
    ),
    Rule(
        holds=lambda x: x.ep > 1 and _has_one_shard(x),
        what="EP without data shards (data_parallel_shard_degree x context_parallel_degree = 1)",
        field="dp_shard",
        instead=lambda x: max(2, x.dp_replicate),
        why="torchtitan shards experts over a mesh that it makes only for two or more shards",
    ),
    Rule(
        holds=lambda x: x.ep > 1 and x.etp not in (1, x.tp),
        what="an ETP degree other than 1 or the TP degree",
        field="etp",
        instead=lambda _: 1,
        why="torchtitan keeps experts whole (1) or splits them like all other weights (the TP "
        "degree)",
    ),
    Rule(
        holds=lambda x: x.knows_shards and _expert_ranks(x) % x.ep > 0,
        what="an EP degree that does not divide shards x CP x TP / ETP",
        field="ep",
        instead=lambda x: max(d for d in range(1, x.ep) if _expert_ranks(x) % d == 0),
        why="experts are distributed over the ranks of these axes",
    ),
    Rule(
        holds=lambda x: x.dp_replicate > 1 and _has_one_shard(x) and x.tp * x.pp > 1,
        what="replicas without data shards, with TP or PP",
        field="dp_shard",
        instead=lambda x: x.dp_replicate,
        why="whole replicas use DDP, and torchtitan supports DDP only without TP and PP: with TP "
        "no gradient of a TP parameter would be reduced, and with PP not all gradients would be",
    ),
    Rule(
        holds=lambda x: x.pp > 1 and x.pp_schedule not in SCHEDULES,
        what="pipeline schedules other than " + ", ".join(SCHEDULES),
        field="pp_schedule",
        instead=lambda _: SCHEDULES[-1],
        why="equal results with torchtitan are not tested (a schedule that splits the backward "
        "pass needs it in two graphs, and megamoe schedules it as one graph)",
    ),
    Rule(
        holds=lambda x: x.pp > 1 and x.pp_schedule == "1F1B" and x.batch < x.pp * x.microbatch,
        what="1F1B with fewer microbatches than PP ranks",
        field="batch",
        instead=lambda x: x.pp * x.microbatch,
        why="torch's schedule fills every stage before it runs a backward pass",
    ),
    Rule(
        holds=lambda x: x.pp > 1 and x.model == "gpt_oss",
        what="gpt_oss with PP",
        field="pp",
        instead=lambda _: 1,
        why="torchtitan's gpt_oss has no function that splits it into stages, and embeds tokens on "
        "every stage",
    ),
    Rule(
        holds=lambda x: x.cp > 1 and x.attention == "tensor",
        what="CP other than Ulysses",
        field="attention",
        instead=lambda _: "ulysses",
        why="torch's ring attention has kernels for CUDA only, so equal results with torchtitan "
        "could not be tested",
    ),
    Rule(
        holds=lambda x: x.cp == 1 and x.is_ulysses,
        what="Ulysses without CP",
        field="attention",
        instead=lambda _: "auto",
        why="Ulysses divides the sequence over parallelism.context_parallel_degree ranks, here 1",
    ),
    Rule(
        holds=lambda x: x.cp > 1 and x.tp > 1,
        what="CP with TP",
        field="tp",
        instead=lambda _: 1,
        why="with Ulysses each CP rank computes heads of its own, with TP each TP rank does, and "
        "both together are not tested",
    ),
    Rule(
        holds=lambda x: x.cp > 1 and x.pp > 1,
        what="CP with PP",
        field="pp",
        instead=lambda _: 1,
        why="equal results with torchtitan's FSDP are not tested",
    ),
    Rule(
        holds=lambda x: x.cp > 1 and not _heads_fit(x, x.cp),
        what="a CP degree that does not divide the query heads, or neither divides the KV heads "
        "nor is divided by them",
        field="cp",
        instead=lambda x: _nearest_cp(x),
        why="with Ulysses each CP rank computes an equal share of the model's heads",
    ),
    Rule(
        holds=lambda x: x.cp > 1 and x.kernel not in ("", "sdpa"),
        what="CP with FlexAttention or variable lengths",
        field="cp",
        instead=lambda _: 1,
        why="torchtitan gives each rank the block mask of its own part of the sequence, but with "
        "Ulysses a rank computes attention over the whole sequence",
    ),
    Rule(
        holds=lambda x: x.exchange != "standard",
        what="DeepEP",
        field="exchange",
        instead=lambda _: "standard",
        why="DeepEP's dispatch is one fused kernel, which a compiler cannot split",
    ),
    Rule(
        holds=lambda x: x.seq_len % (2 * x.cp * x.tp) > 0,
        what="a sequence that does not divide by 2 x CP x TP",
        field="seq_len",
        instead=lambda x: max(1, x.seq_len // (2 * x.cp * x.tp)) * 2 * x.cp * x.tp,
        why="torchtitan gives each rank of a TP group an equal slice of the sequence",
    ),
    Rule(
        holds=lambda x: x.tp > 1 and x.async_tp,
        what="asynchronous TP",
        field="async_tp",
        instead=lambda _: False,
        why="Inductor's pass for asynchronous TP moves collectives that megamoe has put in order",
    ),
    Rule(
        holds=lambda x: x.checkpointing == BY_BUDGET and x.recompute not in PRICED,
        what='activation checkpointing by memory budget, with a `recompute` other than "price"',
        field="recompute",
        instead=lambda _: PRICED[0],
        why='only recompute = "price" keeps to a memory budget',
    ),
    Rule(
        holds=lambda x: bool(x.recompute_modules) and _checkpoints_every_operator(x),
        what='`recompute_modules` with activation checkpointing "full", or "selective" by operator',
        field="checkpointing",
        instead=lambda _: "none",
        why="checkpointed functions keep their own policy, so the names would have no effect",
    ),
    Rule(
        holds=lambda x: x.ep > 1 and IN_FP8 in x.converters,
        what=f"{IN_FP8} with EP",
        field="converters",
        instead=lambda x: tuple(name for name in x.converters if name != IN_FP8),
        why="its backward pass asserts on the strides of the received rows, and torch cannot trace "
        "this assert if the number of rows is known at run time only (torchao 0.15 and 0.16)",
    ),
    Rule(
        holds=lambda x: x.gradient_wire != "same" and x.reduce_dtype != "float32",
        what="`gradient_wire` with gradients that are not reduced in float32",
        field="reduce_dtype",
        instead=lambda _: "float32",
        why="gradient_wire rounds float32 gradients once and sums in float32; other gradients are "
        "rounded before gradient_wire gets them",
    ),
    Rule(
        holds=lambda x: x.gradient_wire != "same" and _has_one_shard(x),
        what="`gradient_wire` without FSDP",
        field="gradient_wire",
        instead=lambda _: "same",
        why="gradient_wire replaces FSDP2's reduce-scatter, and with one data shard there is none "
        "(DDP all-reduces)",
    ),
    Rule(
        holds=lambda x: x.validates and x.validation_steps == -1 and _data_ranks(x) != 1,
        what="validation on the whole data set, with several data ranks",
        field="validation_steps",
        instead=lambda _: 10,
        why="ranks have different numbers of batches, and a rank with more batches would wait for "
        "the other ranks without end",
    ),
    Rule(
        holds=lambda x: x.validates and x.validation_seq_len % (2 * x.cp * x.tp) > 0,
        what="a sequence of validation that does not divide by 2 x CP x TP",
        field="validation_seq_len",
        instead=lambda x: max(1, x.validation_seq_len // (2 * x.cp * x.tp)) * 2 * x.cp * x.tp,
        why="torchtitan gives each rank of a TP group an equal slice of the sequence",
    ),
    Rule(
        holds=lambda x: x.validates and x.pp > 1 and x.validation_seq_len != x.seq_len,
        what="PP with a sequence length in validation that differs from that in training",
        field="validation_seq_len",
        instead=lambda x: x.seq_len,
        why="a pipeline stage receives tensors of one shape only",
    ),
    Rule(
        holds=lambda x: x.validates and x.pp > 1 and x.validation_batch != x.batch,
        what="PP with a batch in validation that differs from that in training",
        field="validation_batch",
        instead=lambda x: x.batch,
        why="a pipeline stage receives tensors of one shape only, in as many microbatches",
    ),
)
"""All refused layouts."""


def _data_ranks(layout: Layout) -> int:
    """Return the ranks with data of their own; 0 where it is not known."""
    return layout.dp_replicate * layout.dp_shard if layout.knows_shards else 0


def _checkpoints_every_operator(layout: Layout) -> bool:
    """Whether activation checkpointing decides about every operator of every layer."""
    of_all = ("op", "1")
    is_selective = layout.checkpointing == "selective" and layout.selective in of_all
    return layout.checkpointing == "full" or is_selective


def _has_one_shard(layout: Layout) -> bool:
    return layout.knows_shards and layout.dense_shards < 2


def _expert_ranks(layout: Layout) -> int:
    return layout.dense_shards * layout.tp // (layout.etp if layout.ep > 1 else 1)


def _heads_fit(layout: Layout, ranks: int) -> bool:
    """Return whether `ranks` can divide the query heads, each with the KV heads of its own."""
    if not layout.query_heads:
        return True
    shared = layout.kv_heads % ranks == 0 or ranks % layout.kv_heads == 0
    return shared and layout.query_heads % ranks == 0


def _nearest_cp(layout: Layout) -> int:
    """Return the largest smaller CP degree that fits heads and sequence; 1, if none does."""
    fits = (
        d for d in range(2, layout.cp) if _heads_fit(layout, d) and not layout.seq_len % (2 * d)
    )
    return max(fits, default=1)


def check_layout(layout: Layout) -> None:
    """Raise InvalidConfig with every reason for which the recipe does not have this layout."""
    if refused := [rule.message(layout) for rule in RULES if rule.holds(layout)]:
        raise InvalidConfig("\n  ".join(refused))
