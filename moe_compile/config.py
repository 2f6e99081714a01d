"""What the user may set: one frozen dataclass, from `options=`, a TOML table, the environment.

Contract
    A `MegaMoEConfig` that exists is valid; every field is one of the documented options.
    Precedence: `options=` over the TOML table over `MEGAMOE_*` variables over the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from moe_compile.allowed_values import (
    AMOUNTS,
    PARTS,
    PRODUCTS,
    WITHOUT_READS,
    check_amount,
    check_apply_scores,
    check_budget,
    check_choice,
    check_chunk_by,
    check_fp8_products,
    check_list,
    check_number,
    check_without_reads,
)
from moe_compile.errors import InvalidConfig, nearest

PREFIX: Final = "megamoe."
OF_REGION: Final = ":"
"""Between a pass and the region that `disable_passes` leaves it out of."""
ENVIRONMENT_PREFIX: Final = "MEGAMOE_"

OFF: Final[Mapping[str, tuple[object, ...]]] = {
    "chunks": (1,),
    "chunk_edges": ("even", "auto"),
    "batch_parts": (1, "auto"),
    "dispatch": ("all_to_all", "auto"),
    "dispatch_wire": ("same", "auto"),
    "combine_wire": ("same", "auto"),
    "attention_chunks": (1,),
    "transport": ("functional",),
    "nodes": ("off", "auto"),
    "host_reads": ("needed",),
    "apply_scores": ("model",),
    "expert_compute": ("same",),
}
"""Values of options that ask for no rewrite, the one that leaves the model as it is first."""

ROOMS: Final = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
"""Values of `row_room` that "auto" chooses from: few, since each new one compiles graphs again."""
ROOM_AT_FIRST: Final = 1.5
"""The value that "auto" begins with where no step was counted yet."""

TABLE_ONLY: Final[Mapping[str, tuple[str, ...]]] = {"attention": ("auto", "tensor", "ulysses")}
"""How attention is divided over ranks. This option works only in the `[megamoe]` table of a TOML
job. "tensor": by heads, so that each rank computes its heads for the whole sequence (tensor
parallelism). "ulysses": by sequence; exchanges around attention trade parts of the sequence for
heads (context parallelism). "auto": as the job's degrees of parallelism say."""

KINDS: Final[Mapping[object, tuple[type, str]]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number of at least {least}"),
    str: (str, "a string"),
    tuple[str, ...]: (tuple, "a list of {of}"),
}
"""Types of the open options, and what to write."""

LEAST: Final[Mapping[str, int]] = {"blocks_per_graph": 1, "node_ranks": 0, "step_peak_bytes": 0}
"""The least value of each whole number."""

LISTS: Final[Mapping[str, str]] = {
    "disable_passes": "pass names",
    "fp8_products": ", ".join(PRODUCTS),
    "recompute_modules": ", ".join(PARTS),
}
"""What each list holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaMoEConfig:
    """All options; `megamoe options > docs/options.md` makes the reference of what is below."""

    chunks: int | str = "auto"
    """Number of chunks each MoE region runs in; by experts, at most the number of local experts.
    "auto" takes the number that is predicted to be fastest (docs/planner.md) if `equal_tokens` is
    set and sizes are static, else min(2, local experts)."""
    chunk_by: Literal["auto", "experts", "tokens"] = "auto"
    """What a region is divided by. "experts" is exact. "tokens" gives every chunk a share of each
    expert's rows, for ranks with few local experts: weight gradients are then summed over chunks,
    and in float32 and float64 outputs round differently too (docs/wire.md#chunks-of-tokens).
    "auto": by experts; if `chunks` is "auto" and `numerics` is "bounded" or "lossy", the faster of
    the two by predicted time."""
    chunk_edges: Literal["even", "load", "auto"] = "even"
    """Where chunks of experts begin and end. "even": every chunk has the same number of experts.
    "load": every chunk has about the same number of rows, by the counts of every step; no bit
    changes, and one small all-gather of counts is added. "auto": by predicted time under
    `routing_skew` (docs/planner.md#uneven-routing-and-chunks-by-load)."""
    routing_skew: float = 0.0
    """The routing imbalance that prices of chunks assume (docs/planner.md#a-stated-skew): the
    exponent s of a Zipf law, by which the i-th most popular expert gets rows in proportion to i **
    -s. 0: even routing. A dry run also counts the memory of the busiest rank by it
    (docs/memory.md#before-there-is-a-gpu)."""
    batch_parts: int | str = 1
    """Number of parts of the batch that a graph runs in (docs/batch.md): attention and experts of
    one part run while rows of another travel. A parameter's gradient is the sum over parts, as in
    gradient accumulation over the parts. The value is at most the number of sequences. "auto": 1, 2
    or 4 by predicted time, chosen together with the number of chunks, if `numerics` is "bounded" or
    "lossy" (docs/batch.md#what-auto-does)."""
    blocks_per_graph: int = 1
    """In torchtitan jobs: how many consecutive transformer blocks are compiled as one graph, so
    that `batch_parts` has more compute to run while rows travel
    (docs/torchtitan.md#several-blocks-in-a-graph). Blocks left over at the end of a pipeline stage
    form a shorter graph."""
    attention_chunks: int | str = 1
    """Number of groups of heads that attention between exchanges runs in (docs/attention.md); it
    must divide the local KV heads. "auto": by predicted time if `equal_tokens` is set, else 2 if 2
    divides the local KV heads, else 1. If groups may round differently
    (docs/attention.md#groups-of-heads), "auto" takes 1 unless `numerics` is "lossy". The default is
    1, since no measurement on several GPUs shows yet that more groups are faster."""
    dispatch_wire: Literal["same", "fp8", "fp8_forward", "auto"] = "same"
    """Communication dtype of the dispatch (docs/wire.md). "same": the dtype of the model. "fp8":
    e4m3 with scales, for rows and their gradients. "fp8_forward": e4m3 for rows only; gradients
    keep the dtype of the model. "auto": "fp8" if it is predicted to be faster, `equal_tokens` is
    set and `numerics` is "lossy"."""
    combine_wire: Literal["same", "fp8", "fp8_forward", "auto"] = "same"
    """Communication dtype of the combine, with the values of `dispatch_wire`."""
    expert_compute: Literal["same", "fp8_rowwise", "fp8_blockwise", "fp8_blockwise_e5m2"] = "same"
    """Number format of the experts' grouped products (docs/products.md). "same": that of the model.
    "fp8_rowwise" and "fp8_blockwise": both factors of a product are quantised to e4m3 with scales,
    then multiplied. A scale is of a row of the rows and a column of the weight, or, as in
    DeepSeek-V3, of 128 columns of a row and 128 x 128 numbers of a weight. "fp8_blockwise_e5m2":
    the same, with gradients quantised to e5m2. `fp8_products` says which products these are."""
    fp8_products: tuple[str, ...] = ("gate", "up", "down", "grad_input")
    """Which products `expert_compute` has in eight bits (docs/products.md#which-products). "gate",
    "up", "down": the forward products by these weights. "grad_input": in the backward pass, the
    products that make gradients of rows, for all three weights. "grad_weight": those that make
    gradients of weights, not for "fp8_rowwise". All others are computed as in the model."""
    numerics: Literal["exact", "bounded", "lossy"] = "exact"
    """Which rewrites "auto" may choose. "exact": only rewrites that run the same operators on the
    same rows in the same order. Some kernels round a row differently depending on its address in
    memory, so that last bits may differ: on CPUs these are kernels on rows that do not fill vectors
    (docs/numerics.md). "bounded": also rewrites that sum in another order, with a bound that the
    report states. "lossy": all rewrites. An option with a value other than "auto" is applied
    whatever `numerics` says. There is one exception: chunks of experts that share a parameter, or
    that sort rows by a sort that is not stable, need "bounded" (docs/limits.md). With "bounded",
    one kernel computes the sums per token (docs/wire.md#sums-per-token)."""
    dispatch: Literal["all_to_all", "all_gather", "auto"] = "all_to_all"
    """The collectives that move tokens to experts and back (docs/dispatch.md). "all_gather" sends
    tokens in place of rows, and a reduce-scatter brings their sums back: sums of more than two rows
    round differently, and so do weighted sums with their gradients. "all_gather" needs
    `equal_tokens`. "auto": by predicted time among the values that `numerics` allows, if sizes are
    static; else "all_gather" if a token has more than 0.75 n rows on n ranks and no bit changes."""
    nodes: Literal["off", "exact", "rounded", "auto"] = "off"
    """Whether a token is sent to each node only once, instead of once for each of its experts on
    that node (docs/nodes.md). "exact": exchanges that only copy tokens (the dispatch, and the
    gradients of the combine) go in two hops; no bit changes. "rounded": exchanges whose rows are
    summed per token go in two hops too; their rows are summed first on each node and then on the
    token's own rank, with a bound that the report states. Both values need `register_node_groups`,
    which the torchtitan recipe calls. `chunks` splits hop 2 and the experts; with `chunk_by` =
    "tokens" a number of chunks splits hop 1 only. Neither split changes a bit. "auto": "off",
    "exact" or "rounded" by predicted time, as `numerics` allows, chosen together with wire options
    that are "auto"."""
    hop_slices: int | str = "auto"
    """For two hops only: hop 1 is sent in this many slices of tokens, while `chunks` splits hop 2,
    the experts and the way back (docs/nodes.md); no bit changes. "auto" chooses by predicted time
    under the conditions of `chunks`, else it takes one slice. It cannot be set with `chunk_by` =
    "tokens", where `chunks` is the number of slices."""
    node_ranks: int = 0
    """In torchtitan jobs: how many ranks share a node, for the option `nodes`. 0: all ranks of a
    machine."""
    host_reads: Literal["needed", "none"] = "needed"
    """In torchtitan jobs: whether the host reads how many rows travel
    (docs/no_reads.md). "needed": one read in each region. "none": none; rows travel in buffers with
    room for `row_room` times an even share. Where a step's rows have no room on some rank, all
    ranks run that step again with reads, before any weight moves, so that no bit changes. It needs
    `equal_tokens` and experts that find their rows on the device, as torchtitan's grouped GEMMs do;
    a region that is none of these has its read, and the report says why. Rows travel by plain
    all-to-alls, and chunks are of tokens (`chunk_by`)."""
    row_room: float | str = ROOM_AT_FIRST
    """For `host_reads` = "none": the room for the rows from one rank to one rank, as a factor of
    an even share of a rank's rows. Every exchange sends that many, padding included. "auto": by
    predicted time and the counts of past steps (docs/no_reads.md#room-by-price); each new room
    compiles the graphs again."""
    apply_scores: Literal["model", "before_down"] = "model"
    """Where rows are multiplied by the router's scores
    (docs/wire.md#scores-before-the-down-projection). "model": where the model does it.
    "before_down": before the last product of the experts, if the model does it after the combine.
    Then scores are exchanged beside the rows, and the rows that come back are not kept for the
    backward pass; results round differently, with a bound that the report states. It cannot be set
    together with `dispatch` = "all_gather", or with `nodes` = "exact" or "rounded"."""
    equal_tokens: bool = False
    """You assert that all ranks have the same number of tokens in every step. If ranks differ when
    code with static shapes first runs, all ranks run that code unchanged. If one rank differs
    later, the job ends with the reason. With symbolic shapes, collectives fail or hang if ranks
    differ. Without `equal_tokens` no tokens are all-gathered, nothing is chosen by predicted time,
    and only consecutive exchanges of one region may be reordered."""
    schedule: bool = True
    """Reorder launches, waits and compute so that collectives run under compute."""
    recompute: Literal["model", "save_exchanges", "recompute_exchanges", "price"] = "save_exchanges"
    """What activation checkpointing does with exchanges: follow the model's own policy, save what
    they received, or exchange again in the backward pass. Without `equal_tokens` the received rows
    are always saved: a rank without tokens may recompute fewer exchanges than other ranks wait
    for. "price" saves them too. It also chooses by predicted time which other tensors the backward
    pass computes again, within `activation_budget` (docs/memory.md#recomputation-by-price); it
    needs `equal_tokens` and static sizes, and is "save_exchanges" without them."""
    activation_budget: int | float = 1.0
    """For `recompute` = "price": what the forward pass of each compiled graph may keep for its
    backward pass. A number of at most 1 is a share of the bytes that torch's partitioner keeps
    without a budget; the graph's inputs and results do not count. A whole number above 1 is bytes.
    1.0 keeps all of it."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of the model that the backward pass computes again, in place of keeping their results
    (docs/memory.md#parts-by-name): "layernorm", "moe_act", "core_attn", "mla_up_proj",
    "shared_experts", "mlp", "moe" and "megascale_moe". No bit changes. Functions inside activation
    checkpointing keep their own policy. With `recompute` = "price" the budget decides about all
    else; with other values nothing else is computed again. Exchanges run again for "moe" alone, and
    only with `equal_tokens`."""
    transport: str = "functional"
    """What carries the rows of dispatch and combine: "functional" (torch's collectives) or the name
    of a transport that another package adds (docs/extend.md)."""
    gradient_wire: Literal["same", "bf16_fp32_sum"] = "same"
    """Communication dtype of float32 gradients when they are reduced over ranks. "bf16_fp32_sum":
    each rank's part is rounded once to bfloat16, exchanged, and summed in float32, which sends half
    the bytes (docs/torchtitan.md#gradients-in-half-the-bytes)."""
    max_memory_increase: float = 0.30
    """How much scheduling may raise the peak of a graph's live bytes, as a fraction of
    `step_peak_bytes`, or of the graph's own peak if that is larger."""
    step_peak_bytes: int = 0
    """Peak memory of a whole training step in bytes (parameters, gradients, optimizer, saved
    activations, NCCL's buffers); 0 if it is not known. The torchtitan recipe sets it to the sum of
    all of these except saved activations."""
    offload_budget: float | int = 0
    """How much of the activations that a graph keeps for its backward pass may be copied to pinned
    host memory, and back before the backward reads them
    (docs/memory.md#activations-in-host-memory). 0: none. Up to 1: that share of their bytes. Above
    1: so many bytes per graph. Only tensors whose copies are predicted to run beside compute, in
    both directions, are taken; no bit changes. It needs `equal_tokens`, a GPU, and a torch with the
    operators `ao::offload` and `ao::reload`."""
    hardware: str = "detect"
    """The profile that time estimates use. "detect" asks NVML which GPU this is, and warns if it
    uses the profile of another GPU (docs/cluster.md#profiles). Other values are the name of a
    profile (h100, h200, h800, h20, b200, gb200, a100, cpu, or one that a package adds) or the path
    of a TOML file."""
    measure_waits: bool = False
    """Measure how long each collective is waited for (docs/waits.md). `megamoe train` shows
    measured and predicted times side by side; elsewhere `moe_compile.measured_waits()` returns the
    measured times. No bit, no order and no memory use changes."""
    codegen: Literal["inductor", "fx"] = "inductor"
    """What runs the graph. "inductor": code that Inductor generates. "fx": the graph's operators
    one by one in megamoe's order, for tests."""
    strict: bool = False
    """Raise an error where an option asks for a rewrite (`chunks`, `batch_parts`, `dispatch`,
    `nodes`, `host_reads`, `dispatch_wire`, `combine_wire`, `expert_compute`, `attention_chunks`,
    `apply_scores`) and the rewrite applies but is not proven to be safe, and where a pass fails."""
    disable_passes: tuple[str, ...] = ()
    """Names of passes to leave out (docs/architecture.md lists them). "PASS:REGION" leaves a pass
    out of one region only, by the region's name in the report (docs/check.md#one-region)."""
    report: str = ""
    """Path of a JSON report: regions, compiled graphs, and what every pass did, with reasons; ""
    for none, and in torchtitan jobs for `report.json` in the job's folder. A path that ends in
    ".html" is written as a page, with the JSON beside it and the text of every graph before and
    after each pass (docs/visible.md#as-a-page)."""

    def __post_init__(self) -> None:
        """Raise InvalidConfig for a value no documented option takes."""
        check_number("chunks", self.chunks)
        check_number("attention_chunks", self.attention_chunks)
        check_number("batch_parts", self.batch_parts)
        check_apply_scores(self.apply_scores, self.dispatch, self.nodes)
        check_chunk_by(self.chunk_by, self.hop_slices, self.chunk_edges)
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        others = {name: getattr(self, name) for name in WITHOUT_READS}
        check_without_reads(self.host_reads, self.chunks, self.chunk_by, others)
        for name in AMOUNTS:
            if (name, getattr(self, name)) != ("row_room", "auto"):
                check_amount(name, getattr(self, name))
        check_budget(self.activation_budget, self.recompute)
        for name, hint in HINTS.items():
            if hint in KINDS and not _is_of_kind(name, value := getattr(self, name)):
                raise InvalidConfig(f"megamoe.{name} is {value!r}; write {what_to_write(name)}")
        check_list("fp8_products", self.fp8_products, PRODUCTS)
        check_list("recompute_modules", self.recompute_modules, PARTS)
        check_fp8_products(self.expert_compute, self.fp8_products)

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


def _is_of_kind(name: str, value: Any) -> bool:
    is_kind = type(value) is KINDS[HINTS[name]][0]
    if is_kind and name in LISTS:
        return all(isinstance(one, str) for one in value)
    return is_kind and not (name in LEAST and value < LEAST[name])


def what_to_write(name: str) -> str:
    """Return what the open option `name` takes."""
    return KINDS[HINTS[name]][1].format(least=LEAST.get(name), of=LISTS.get(name))


OPTION_NAMES: Final = tuple(f.name for f in fields(MegaMoEConfig))
HINTS: Final[Mapping[str, Any]] = get_type_hints(MegaMoEConfig)
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    name: get_args(hint) for name, hint in HINTS.items() if get_origin(hint) is Literal
}
"""Values each closed option takes."""
RETIRED: Final[Mapping[str, str]] = {
    "attention_split": "leave the option out: megamoe computes each projection as a whole, while "
    "the exchanges of attention_chunks run",
    "async_tp": "leave the option out. For Inductor's async TP set "
    "torch._inductor.config._micro_pipeline_tp, but only if the graphs have no experts, because "
    "async TP reorders collectives",
    "dispatch_padding": "leave the option out: after an all-gather dispatch, tensors always have "
    'room for exactly the rows that came, as "exact" said; padding ("worst") could make '
    "gradients NaN",
    "expert_gradients": 'for gradients in e5m2 write expert_compute = "fp8_blockwise_e5m2"; for '
    'gradients of rows in the number format of the model leave "grad_input" out of fp8_products',
}
"""Options of earlier versions, and what to write instead."""


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `options=` of torch.compile into (megamoe's, without the prefix; Inductor's).

    Raises InvalidConfig for an unknown `megamoe.` name.
    """
    ours = {k.removeprefix(PREFIX): v for k, v in options.items() if k.startswith(PREFIX)}
    for name in ours:
        check_name(name, where="options=")
    return ours, {k: v for k, v in options.items() if not k.startswith(PREFIX)}


def pass_in_region(name: str, region: str) -> str:
    """Return the entry of `disable_passes` that leaves pass `name` out of `region` only."""
    return f"{name}{OF_REGION}{region}"


def check_name(name: str, *, where: str) -> None:
    """Raise InvalidConfig unless `name` is a documented option; `where` says who wrote it."""
    if name not in OPTION_NAMES:
        raise InvalidConfig(no_option(name, where=where))


def no_option(name: str, *, where: str, known: tuple[str, ...] = OPTION_NAMES) -> str:
    """Return what to write in place of an option that there is not."""
    if name in RETIRED:
        return f"{where}: megamoe has no option {name!r} any more; {RETIRED[name]}"
    return f"{where}: megamoe has no option {name!r}.{nearest(name, known)}"


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
    whole = re.fullmatch(r"-?[0-9]+", text)
    kinds = (HINTS[name], *get_args(HINTS[name]))
    if int in kinds and (float not in kinds or whole):
        return int(text) if whole else text
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            if str in kinds:
                return text
            raise InvalidConfig(f"{variable} is {text!r}; write a number") from None
    return text


def _check_table_only(name: str, value: object) -> None:
    if value not in TABLE_ONLY[name]:
        raise InvalidConfig(
            f"[megamoe] {name} = {value!r} is not available in this version; "
            f"write one of {', '.join(TABLE_ONLY[name])}"
        )


def what_to_lower(config: MegaMoEConfig) -> str:
    """Return which options make a program hold more memory than as written, and what to write.

    "" where none does.
    """
    told = []
    if config.schedule and config.max_memory_increase > 0:
        told.append(
            f"max_memory_increase = {config.max_memory_increase} lets the schedule use that share "
            "more memory than the program as written (write 0)"
        )
    if config.recompute == "save_exchanges":
        told.append(
            "recompute = 'save_exchanges' keeps received rows, which the model as written computes "
            "again (write 'model', together with equal_tokens = true)"
        )
    if config.recompute == "price":
        told.append(
            f"activation_budget = {config.activation_budget} limits what recompute = 'price' keeps "
            "for the backward pass (write a smaller budget)"
        )
    if config.dispatch != "all_to_all":
        told.append(
            f"dispatch = {config.dispatch!r}: in an all-gather, a rank holds the tokens of all "
            "ranks (write 'all_to_all')"
        )
    if config.nodes != "off":
        told.append(
            f"nodes = {config.nodes!r}: in two hops, a rank holds tokens that reach its node, "
            "besides its rows (write 'off')"
        )
    if config.host_reads == "none":
        told.append(
            f"row_room = {config.row_room}: with host_reads = 'none', buffers have room for that "
            "many times an even share of the rows (write a smaller row_room, or host_reads = "
            "'needed')"
        )
    return "; ".join(told)
