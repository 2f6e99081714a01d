"""Experts' weights that FSDP2 gathers in eight bits, as products multiply them.

Contract
    A shard has whole experts. It is quantised before FSDP2 gathers it, as the compiled graph would
    quantise the gathered weight: in bfloat16, in blocks of 128 x 128. Payload and scales are those
    of a job that gathers in sixteen bits, bit for bit, and they serve both directions.
    Names, types and values of parameters stay for optimizers, checkpoints and gradients. An
    operator on a shard returns plain tensors, unless FSDP2 or `to_empty` makes a shard by it.
    Whoever reads a gathered weight is given its values. Products in eight bits read the payload in
    their place (`passes/feed_products.py`), so that nobody writes the values.
    Weights of which some product is in sixteen bits are gathered in sixteen bits.

FSDP2 asks a shard what to gather, and then for the parameter that it makes of it: these are its
hooks `fsdp_pre_all_gather` and `fsdp_post_all_gather`. All tensors of a unit travel together.

Shapes: a weight is `[E, N, K]`, as torchtitan has it; a shard has e of its E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from moe_compile.allowed_values import FORWARD_PRODUCTS
from moe_compile.config import OF_REGION
from moe_compile.ops.product_formats import blocks_along
from moe_compile.ops.scaled_products import DEQUANTIZE_WEIGHT, QUANTIZE_WEIGHT
from moe_compile.ops.wire_format import BLOCK, SCALE_BYTES
from torchtitan_integration.job_config import asks_for_megamoe, options_of
from torchtitan_integration.meshes import expert_shards

RECIPE: Final = "blockwise"
ATEN: Final = torch.ops.aten
READERS: Final = (*FORWARD_PRODUCTS, "grad_input")
"""Products that read a weight."""
OF_BLOCKS: Final = ("fp8_blockwise", "fp8_blockwise_e5m2")
"""Values of `expert_compute` whose scales are those of `RECIPE`."""
PASSES: Final = (
    "detect_regions",
    "plan_regions",
    "rewrite_regions",
    "quantize_products",
    "feed_products",
)
"""Passes without which products would not read the payload."""


class EightBitShard(torch.Tensor):
    """A rank's experts of a weight, `[e, N, K]`, which FSDP2 gathers in eight bits."""

    KEPT: Final = frozenset(
        {
            ATEN.detach.default,
            ATEN.empty_like.default,
            ATEN.new_zeros.default,
            ATEN.slice.Tensor,
        }
    )
    """Operators by which a shard is made of a weight, or of another shard."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> EightBitShard:
        """Return a shard of these values."""
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor) -> None:
        """Keep the values, which operators on the shard read and write."""
        self.values_in_full = values

    def __repr__(self) -> str:
        """Return the shard as text."""
        return f"EightBitShard({self.values_in_full!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the tensors that the shard is made of."""
        return ["values_in_full"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> EightBitShard:
        """Return the shard of these tensors."""
        return EightBitShard(inner["values_in_full"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the values."""
        del types
        plain_args, plain_kwargs = tree_map_only(
            cls, lambda shard: shard.values_in_full, (args, kwargs or {})
        )
        made = func(*plain_args, **plain_kwargs)
        # flattened it is still FSDP2's; viewed as it is, it is what `to_local` gives
        is_flat = func is ATEN.view.default and made.dim() == 1
        return tree_map_only(torch.Tensor, cls, made) if is_flat or func in cls.KEPT else made

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what FSDP2 gathers: payload and scales.

        On a mesh of one rank FSDP2 copies a shard in place of gathering it, as one tensor: there
        both are parts of one, and their shapes are returned too.
        """
        del outer_size, outer_stride, module, mp_policy
        values = self.values_in_full.bfloat16().transpose(1, 2)
        payload, scales = QUANTIZE_WEIGHT(values, RECIPE)
        parts = payload.transpose(1, 2), scales
        if mesh.size() > 1:
            return parts, None
        together = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        return (together,), tuple(part.shape for part in parts)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: Sequence[torch.Tensor],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the gathered weight, which FSDP2 then takes for a tensor of `param_dtype`.

        It lies in what was gathered, which FSDP2 frees and fills again: the next gather, with the
        weight as `out`, has nothing left to do.
        """
        if out is not None:
            return None
        parts = all_gather_outputs
        payload, scales = parts if metadata is None else _apart(*parts, *metadata)
        return GatheredWeight(payload, scales, param_dtype), ()


def _apart(
    together: torch.Tensor, of_payload: torch.Size, of_scales: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    payload, scales = together.split([of_payload.numel(), SCALE_BYTES * of_scales.numel()])
    return (
        payload.view(torch.float8_e4m3fn).view(of_payload),
        scales.view(torch.float32).view(of_scales),
    )


class GatheredWeight(torch.Tensor):
    """A weight `[E, N, K]` in eight bits: its payload, and scales `[E, K / 128, N / 128]`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
    ) -> GatheredWeight:
        """Return the weight that is read as a tensor of `dtype`."""
        del scales
        return torch.Tensor._make_wrapper_subclass(
            cls, payload.shape, strides=payload.stride(), dtype=dtype, device=payload.device
        )

    def __init__(self, payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep payload and scales."""
        del dtype
        self.payload, self.scales = payload, scales

    def __repr__(self) -> str:
        """Return the weight as text."""
        return f"GatheredWeight({self.payload!r}, {self.scales!r}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """Return the names of the tensors that the weight is made of, and its type."""
        return ["payload", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any
    ) -> GatheredWeight:
        """Return the weight of these tensors."""
        return GatheredWeight(inner["payload"], inner["scales"], dtype)

    def _stable_hash_for_caching(self) -> str:
        """Return what AOTAutograd's cache tells weights apart by."""
        sizes = [*self.payload.shape], [*self.scales.shape]
        return f"GatheredWeight {self.dtype} {self.device} {sizes} {self.requires_grad}"

    def in_full(self) -> torch.Tensor:
        """Return the values."""
        payload = self.payload.transpose(1, 2)
        return DEQUANTIZE_WEIGHT(payload, self.scales, RECIPE, self.dtype).transpose(1, 2)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator on the values; FSDP2 makes a parameter by those that change none."""
        del types
        is_as_it_is = func is ATEN.as_strided.default and [*args[1]] == [*args[0].shape]
        if is_as_it_is or func is ATEN.detach.default:
            return cls(args[0].payload, args[0].scales, args[0].dtype)
        if func is ATEN.zeros_like.default:  # the gradient of a weight that nobody used
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device=args[0].device)
        plain_args, plain_kwargs = tree_map_only(cls, cls.in_full, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def gathers_in_eight_bits(job: JobConfig, dims: ParallelDims, experts: Any) -> bool:
    """Whether FSDP2 gathers weights in eight bits, of experts with torchtitan's arguments."""
    return multiplies_in_eight_bits(job, dims) and not why_sixteen_bits(job, dims, experts)


def said_of_gathers(job: JobConfig, dims: ParallelDims, experts: Any) -> str:
    """Return how FSDP2 gathers these weights, "" where no product asks for eight bits."""
    if not multiplies_in_eight_bits(job, dims):
        return ""
    why = why_sixteen_bits(job, dims, experts)
    return f"FSDP2 gathers experts' weights in {f'sixteen bits: {why}' if why else 'eight bits'}"


def multiplies_in_eight_bits(job: JobConfig, dims: ParallelDims) -> bool:
    """Whether a job asks for products of experts in eight bits, and has experts on several ranks.

    Where it has not there is no region whose products these could be.
    """
    return dims.ep > 1 and asks_for_megamoe(job) and options_of(job).asks_for("expert_compute")


def why_sixteen_bits(job: JobConfig, dims: ParallelDims, experts: Any) -> str:
    """Return why FSDP2 gathers the weights of `experts` as they are, "" where in eight bits."""
    return next(_reasons(job, experts, experts.num_experts // dims.ep, expert_shards(dims)), "")


def _reasons(job: JobConfig, experts: Any, num_local: int, num_shards: int) -> Iterator[str]:
    """Yield reasons; a rank multiplies `num_local` experts, of which `num_shards` ranks have a
    part."""
    options = options_of(job)
    compute, products = options.expert_compute, options.fp8_products
    if compute not in OF_BLOCKS:
        yield (
            f'with expert_compute = "{compute}" the transposed weight of the backward pass has '
            'other scales; "fp8_blockwise" has the same'
        )
    if left := [name for name in READERS if name not in products]:
        yield f"fp8_products leaves out {', '.join(left)}, which read the weights in sixteen bits"
    disabled = {entry.partition(OF_REGION)[0] for entry in options.disable_passes}
    if left := [name for name in PASSES if name in disabled]:
        yield f"disable_passes has {', '.join(left)}"
    if not experts.use_grouped_mm:
        yield "the model has no grouped products here (use_grouped_mm)"
    if num_shards > num_local:
        yield (
            f"{num_shards} ranks share {num_local} experts, so FSDP2 shards each expert; there it "
            "gathers no tensor but one of the weight's own shape, and scales have another"
        )
    elif num_local % num_shards:
        yield f"{num_shards} ranks share {num_local} experts unequally"
    if job.training.enable_cpu_offload:
        yield "training.enable_cpu_offload keeps shards on the host"


def weights_of(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of experts by name; biases and others are gathered as they are."""
    return {name: p for name, p in experts.named_parameters(recurse=False) if p.dim() == 3}


def gather_in_eight_bits(experts: nn.Module) -> None:
    """Have FSDP2, which is to shard `experts` along dimension 0 next, gather their weights so."""
    weights = weights_of(experts)
    for name, weight in weights.items():
        shard = EightBitShard(weight.to_local().detach())
        laid_out = nn.Parameter(_like(weight, shard), requires_grad=weight.requires_grad)
        setattr(experts, name, laid_out)

    def in_full(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        del module, metadata
        for name in weights:
            local = (kept := state[prefix + name]).to_local()
            plain = local.values_in_full if isinstance(local, EightBitShard) else local
            state[prefix + name] = _like(kept, plain)

    experts.register_state_dict_post_hook(in_full)


def hold_gathered(experts: nn.Module, dtype: torch.dtype) -> None:
    """Have experts that FSDP2 does not shard hold weights as if gathered so, on the meta device."""
    for name, weight in weights_of(experts).items():
        local = weight.to_local()
        payload, scales = QUANTIZE_WEIGHT(local.detach().transpose(1, 2), RECIPE)
        gathered = _like(weight, GatheredWeight(payload.transpose(1, 2), scales, dtype))
        setattr(experts, name, nn.Parameter(gathered))


def bytes_of(sizes: Sequence[int]) -> int:
    """Return the bytes of a weight `[E, N, K]` in eight bits, scales included."""
    experts, columns, width = sizes
    blocks = blocks_along(columns, BLOCK) * blocks_along(width, BLOCK)
    return experts * (columns * width + SCALE_BYTES * blocks)


def _like(whole: DTensor, local: torch.Tensor) -> DTensor:
    """Return a tensor laid out as `whole`, of which this rank has `local`, not a view of it."""
    names, context = whole.__tensor_flatten__()
    parts = {name: getattr(whole, name) for name in names}
    own = {n: local if isinstance(part, torch.Tensor) else part for n, part in parts.items()}
    return DTensor.__tensor_unflatten__(own, context, whole.shape, whole.stride())
