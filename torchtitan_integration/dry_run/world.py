"""One rank of a job whose other ranks do not exist, its model without storage, and its blocks.

Contract
    The job, the layout and the model code are those of training: torchtitan's configuration, our
    train specs, a process group that answers for any number of ranks without sending anything.
    Leaving the context ends the group. Needs the CPU work-arounds in place where there is no GPU.
    Tensors are on the meta device. Attention is FlexAttention, or one fused operator forward and
    one backward, as a GPU runs it: plain SDPA on the meta device would be matrix products that keep
    every score, and count as such.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import os
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools.utils import set_default_dtype

from moe_compile.errors import InvalidConfig, listed
from moe_compile.runtime.node_groups import node_groups_of
from torchtitan_integration.block_groups import block_groups
from torchtitan_integration.job_config import with_model_compiled
from torchtitan_integration.job_file import JobFile
from torchtitan_integration.layout import Layout, check_layout, of_model, read_layout
from torchtitan_integration.meshes import expert_mesh, sequence_mesh

AXES: Final = ("cp", "tp", "ep", "etp", "efsdp", "fsdp", "dp_replicate", "pp")
"""Mesh axes a collective may run on, the most specific first."""
RANKS_OF_A_MACHINE: Final = 8
"""Default machine size of the simulated cluster, for `nodes`; `node_ranks` overrides it."""


@dataclass(frozen=True, slots=True)
class FakeRank:
    """A job as one of its ranks sees it."""

    job: JobConfig
    dims: ParallelDims
    spec: TrainSpec
    model_args: Any
    """The flavor's arguments after the job's settings, for a GPU: grouped GEMMs as written."""

    def build_model(self) -> nn.Module:
        """Return the whole model on the meta device."""
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[self.job.training.dtype]):
            return self.spec.model_cls(self.model_args)

    @property
    def batch(self) -> int:
        """Sequences that go through the model at once."""
        if self.dims.pp_enabled:
            return int(self.job.parallelism.pipeline_parallel_microbatch_size)
        return int(self.job.training.local_batch_size)

    def axis_of_groups(self) -> dict[str, str]:
        """Return the mesh axis of each process group, by the group's name.

        Groups of nodes, and across them, are called after the axis that was divided so.
        """
        names: dict[str, str] = {}
        for axis in AXES:
            if (mesh := _mesh_of(self.dims, axis)) is not None and mesh.size() > 1:
                group = mesh.get_group().group_name
                names.setdefault(group, axis)
                if (nodes := node_groups_of(group)) is not None:
                    names.setdefault(nodes.cross, f"{axis}, from node to node")
                    names.setdefault(nodes.node, f"{axis}, inside a node")
        return names


def _mesh_of(dims: ParallelDims, axis: str) -> DeviceMesh | None:
    if axis == "cp":
        return sequence_mesh(dims) if dims.cp_enabled else None
    find = expert_mesh if axis in ("ep", "etp", "efsdp") else ParallelDims.get_optional_mesh
    return find(dims, [axis])


@contextlib.contextmanager
def fake_rank(file: JobFile, world: int, rank: int) -> Iterator[FakeRank]:
    """Enter the job of `file` as `rank` of `world` ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(min(world, RANKS_OF_A_MACHINE)))
    job = ConfigManager().parse_args([f"--job.config_file={file.path}", *file.overrides])
    if job.experimental.custom_import:
        importlib.import_module(job.experimental.custom_import)
    job = with_model_compiled(job)
    spec = get_train_spec(job.model.name)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        dims = _dims(job, world)
        dims.build_mesh()
        yield FakeRank(job, dims, spec, _model_args(spec, job, read_layout(file.read)))
    finally:
        dist.destroy_process_group()


def _dims(job: JobConfig, world: int) -> ParallelDims:
    degrees = job.parallelism
    try:
        return ParallelDims(
            dp_replicate=degrees.data_parallel_replicate_degree,
            dp_shard=degrees.data_parallel_shard_degree,
            cp=degrees.context_parallel_degree,
            tp=degrees.tensor_parallel_degree,
            pp=degrees.pipeline_parallel_degree,
            ep=degrees.expert_parallel_degree,
            etp=degrees.expert_tensor_parallel_degree,
            world_size=world,
        )
    except AssertionError as error:
        raise InvalidConfig(f"[parallelism] on {world} ranks: {error}") from None


def _model_args(spec: TrainSpec, job: JobConfig, layout: Layout) -> Any:
    name = job.model.flavor
    if name not in spec.model_args:
        raise InvalidConfig(
            f"model.flavor = {name!r}: {job.model.name} has {listed(name, spec.model_args)}"
        )
    args = copy.deepcopy(spec.model_args[name])
    check_layout(of_model(layout, args))
    grouped = args.moe_args.use_grouped_mm
    args.update_from_config(job)
    args.moe_args.use_grouped_mm = grouped  # torchtitan turns it off where there is no SM90
    return args


Parallelize = Callable[..., nn.Module]


def kind_of(block: nn.Module) -> str:
    """Return the kind of a block: with or without experts, and a sliding window if any."""
    has_window = getattr(block, "use_sliding_attention", False)
    experts = "with experts" if block.moe_enabled else "without experts"
    return f"{experts} and a sliding window" if has_window else experts


def kind_of_graph(blocks: Sequence[nn.Module]) -> str:
    """Return a name for the blocks of one graph: "block with experts", "graph of blocks: ..."."""
    if len(blocks) == 1:
        return f"block {kind_of(blocks[0])}"
    runs = itertools.groupby(kind_of(block) for block in blocks)
    return "graph of blocks: " + ", ".join(f"{len(list(run))} {kind}" for kind, run in runs)


def stages_of(rank: FakeRank, job: Any, parallelize: Parallelize) -> list[nn.Module]:
    """Return the model, or the stages of it that are on this rank, laid out by `parallelize`."""
    model = rank.build_model()
    if not rank.dims.pp_enabled:
        return [parallelize(model, rank.dims, job)]
    split = rank.spec.pipelining_fn
    assert split is not None
    device = torch.device("cpu")
    _, parts, _, _ = split(
        model, rank.dims, job, device, rank.model_args, parallelize, lambda *_: None
    )
    return list(parts)


def graphs_of(parts: Sequence[nn.Module], job: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of the blocks of the first graph of each kind in a rank's stages."""
    found: dict[str, tuple[str, ...]] = {}
    for part in parts:
        names = {block: name for name, block in part.layers.items()}
        for blocks in block_groups(part, job):
            found.setdefault(kind_of_graph(blocks), tuple(names[block] for block in blocks))
    return found


def smaller_kinds(rank: FakeRank, graphs: Mapping[str, Collection[str]]) -> set[str]:
    """Return the kinds of graphs whose kinds of blocks are those of a graph with more blocks.

    `graphs` maps each kind to the names of its blocks.
    """
    layers = rank.build_model().layers
    kinds = {one: {kind_of(layers[name]) for name in names} for one, names in graphs.items()}
    return {
        one
        for one in graphs
        for other in graphs
        if kinds[one] == kinds[other] and len(graphs[one]) < len(graphs[other])
    }


def first_with_experts(rank: FakeRank) -> str:
    """Return the name of the model's first block with experts."""
    layers = rank.build_model().layers
    return next(name for name, block in layers.items() if block.moe_enabled)


def model_of_blocks(rank: FakeRank, names: Collection[str]) -> nn.Module:
    """Return the model with the blocks of these names alone, in the type the GPUs compute in."""
    model = rank.build_model()
    for name, block in list(model.layers.items()):
        if name not in names:
            del model.layers[name]
        elif rank.model_args.attn_type == "sdpa":
            block.attention.inner_attention.forward = fused_attention
    dtype = TORCH_DTYPE_MAP[rank.job.training.mixed_precision_param]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def call_of_graph(
    model: nn.Module, rank: FakeRank, masks: Any = None
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the first block of a model that is one graph, and the arguments of its call.

    The `compiled` of the block is its forward as it was laid out, which runs all blocks; their own
    forwards are disabled. `masks` take the place of the block masks that the model would make for
    FlexAttention on the meta device.
    """
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> Any:
        calls.append(arguments)
        return arguments[0]

    def hand_on(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
        return hidden

    ((first, *others),) = block_groups(model, rank.job)
    first.compiled, first.forward = first.forward, record
    for block in others:
        block.forward = hand_on
    part = (rank.batch, rank.job.training.seq_len // rank.dims.cp)
    tokens = torch.zeros(part, dtype=torch.int64, device="meta")
    positions = torch.zeros(part, dtype=torch.int32, device="meta")
    given: dict[str, Any] = {"positions": positions} if rank.dims.cp_enabled else {}
    if rank.model_args.attn_type == "flex":
        given["attention_masks"] = masks or _masks(model, tokens)
    model(tokens, **given)
    (arguments,) = calls
    return first, arguments


def _masks(model: nn.Module, tokens: torch.Tensor) -> Any:
    """Return the block masks of FlexAttention as the model makes them of a batch of `tokens`."""
    tokenizer = types.SimpleNamespace(eos_id=0)  # all that a model asks of it
    with torch.device(tokens.device):
        return model.get_attention_masks(tokens, tokenizer)


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool = True,
) -> torch.Tensor:
    """Return attention of `q` `[B, H, S, D]` over `k` `[B, G, S, D]` and `v` `[B, G, S, E]`.

    Only with `enable_gqa` may G be less than H. Called as torchtitan calls its own attention.
    """
    if isinstance(q, DTensor):  # heads are sharded: each rank does its own
        local = (x.to_local() for x in (q, k, v))
        heads = fused_attention(*local, scale=scale, enable_gqa=enable_gqa, is_causal=is_causal)
        return DTensor.from_local(heads, q.device_mesh, q.placements)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[0]
