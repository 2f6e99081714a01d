"""Layers and blocks on a CUDA device that is not there, laid out as training lays them out.

Contract
    Tensors are fake, their sizes those of the real model; the process group answers for ranks that
    do not exist. For processes whose device is that of `fake_h100`.
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from torchtitan.models.attention import get_causal_mask_mod, get_document_mask_mod

import torchtitan_integration
from benchmarks.cuda.cases import RANKS_OF_A_NODE, Program
from benchmarks.cuda.fake_h100 import DEVICE
from benchmarks.link.cases import Case
from benchmarks.link.layer import MoELayer
from moe_compile.runtime.node_groups import NodeGroups, node_groups_of, register_node_groups
from torchtitan_integration.dry_run.world import (
    FakeRank,
    call_of_graph,
    fake_rank,
    first_with_experts,
    model_of_blocks,
)
from torchtitan_integration.job_file import JobFile
from torchtitan_integration.meshes import expert_mesh
from torchtitan_integration.parallelize import apply_model_parallelism

RECIPE: Final = (
    Path(torchtitan_integration.__file__).parent / "configs" / "deepseek_v3_16b_8gpu.toml"
)
"""What a block's job has besides its model and layout."""
TOKENS: Final = 4096

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled callable and what to call it with."""

    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    nodes: NodeGroups | None
    top_k: int

    def compile(self) -> None:
        """Compile it; nothing runs."""
        self.run(*self.inputs)

    def hop_rows(self, program: Program, chunks: int) -> dict[str, float]:
        """Return what each all-to-all of a hop sends of one part, experts chosen evenly, by groups.

        A token crosses to a node once, if one of its experts is there; inside it goes to each.
        """
        if (nodes := self.nodes) is None:
            return {}
        tokens, num_nodes = TOKENS / program.tp / program.hop_slices, nodes.num_nodes
        reached = num_nodes * (1 - (1 - 1 / num_nodes) ** self.top_k)
        return {nodes.cross: tokens * reached, nodes.node: tokens * self.top_k / chunks}


@contextlib.contextmanager
def built(program: Program, backend: Backend) -> Iterator[Built]:
    """Enter the world of `program`, which `backend` is to compile."""
    make = _layer if program.block == "layer" else _block
    with make(program, backend) as one:
        yield one


@contextlib.contextmanager
def _layer(program: Program, backend: Backend) -> Iterator[Built]:
    dist.init_process_group("fake", rank=0, world_size=program.ep, store=FakeStore())
    case = Case(
        name=program.name,
        num_ranks=program.ep,
        tokens=TOKENS,
        experts=program.experts,
        width=2048,
        hidden=1024,
        top_k=4,
        shared_expert=True,
    )
    try:
        if program.is_in_hops:
            _register_nodes(program)
        with FakeTensorMode() as mode:
            layer = _on_device(MoELayer(case, dist.group.WORLD), mode)
            x = torch.empty(
                TOKENS, case.width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True
            )

            def recomputed(rows: torch.Tensor) -> Any:
                return checkpoint(layer, rows, use_reentrant=False)

            forward = recomputed if program.is_checkpointed else layer
            compiled = torch.compile(forward, backend=backend, fullgraph=True)
            nodes = node_groups_of(dist.group.WORLD.group_name)
            yield Built(compiled, (x,), nodes, case.top_k)
    finally:
        dist.destroy_process_group()


def _register_nodes(program: Program) -> None:
    """Register nodes of all ranks, as the recipe does in a block's job."""
    shape = (program.ep // RANKS_OF_A_NODE, RANKS_OF_A_NODE)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "place"))
    groups = {"node": mesh.get_group("place"), "cross": mesh.get_group("node")}
    register_node_groups(dist.group.WORLD, **groups)


@contextlib.contextmanager
def _block(program: Program, backend: Backend) -> Iterator[Built]:
    content = tomllib.loads(RECIPE.read_text())
    file = JobFile(path=RECIPE, content=content, overrides=_overrides(program))
    with fake_rank(file, world=program.ep, rank=0) as rank:
        rank.job.compile.backend = backend
        model = model_of_blocks(rank, [first_with_experts(rank)])
        apply_model_parallelism(model, rank.dims, rank.job)
        yield _moe_block(model, rank, program.parts)


def _overrides(program: Program) -> tuple[str, ...]:
    """Return the flags that make the recipe's job this program's."""
    settings = {
        "model.name": program.model,
        "model.flavor": program.flavor,
        "training.local_batch_size": program.parts,
        "training.seq_len": TOKENS,
        "parallelism.data_parallel_shard_degree": program.ep // program.tp,
        "parallelism.tensor_parallel_degree": program.tp,
        "parallelism.expert_parallel_degree": program.ep,
        "parallelism.expert_tensor_parallel_degree": 1,
        "activation_checkpoint.mode": "full" if program.is_checkpointed else "none",
        "megamoe.nodes": program.options.get("nodes", "off"),
        "megamoe.node_ranks": RANKS_OF_A_NODE,
    }
    return tuple(f"--{key}={value}" for key, value in settings.items())


def _moe_block(model: nn.Module, rank: FakeRank, sequences: int) -> Built:
    mode = FakeTensorMode()
    with mode:
        masks = _document_mask(sequences)
    block, arguments = call_of_graph(model, rank, masks)
    with mode:
        _on_device(block, mode)
        inputs = pytree.tree_map_only(torch.Tensor, _fake, arguments)
        inputs[0].requires_grad_()
    experts = expert_mesh(rank.dims, ["ep"])
    assert experts is not None
    nodes = node_groups_of(experts.get_group().group_name)
    return Built(block.compiled, inputs, nodes, rank.model_args.moe_args.top_k)


def _document_mask(sequences: int) -> BlockMask:
    """Return the mask that torchtitan makes of so many sequences of several documents."""
    tokens = torch.zeros(sequences, TOKENS, dtype=torch.int64, device=DEVICE)
    mask = and_masks(get_causal_mask_mod(), get_document_mask_mod(tokens, eos_id=0))
    return create_block_mask(mask, sequences, None, TOKENS, TOKENS, device=DEVICE)


def _on_device(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Put a module's parameters and buffers on the device, as fake tensors."""
    with mode:
        for part in module.modules():
            for name, old in list(part._parameters.items()):
                if old is not None:
                    part._parameters[name] = nn.Parameter(_fake(old))
            for name, old in list(part._buffers.items()):
                if old is not None:
                    part._buffers[name] = _fake(old)
    return module


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same size, type and placement on the device."""
    if isinstance(tensor, DTensor):
        local = _fake(tensor._local_tensor)  # `to_local` would compute on it
        return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
