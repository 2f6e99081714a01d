"""FSDP2 with experts' weights that are gathered in eight bits: bits, bytes, state, refusals."""

import contextlib
import functools
import hashlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.ops.scaled_products import DEQUANTIZE_WEIGHT, QUANTIZE_WEIGHT
from tests.integration.titan_jobs import OURS, PIPELINE, SAVES, VALIDATES, train
from torchtitan_integration.eight_bit_gathers import (
    EightBitShard,
    GatheredWeight,
    gather_in_eight_bits,
    gathers_in_eight_bits,
    said_of_gathers,
    why_sixteen_bits,
)
from torchtitan_integration.fsdp import adapt_to_gloo
from torchtitan_integration.job_config import MegaMoE

EXPERTS, WIDTH, HIDDEN = 8, 192, 136


class Rounded(torch.autograd.Function):
    """A weight `[e, N, K]` as products in eight bits have it; the gradient passes through."""

    @staticmethod
    def forward(ctx, weight):
        parts = QUANTIZE_WEIGHT(weight.bfloat16().transpose(1, 2), "blockwise")
        values = DEQUANTIZE_WEIGHT(*parts, "blockwise", weight.dtype)
        return values.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Experts(nn.Module):
    """Rows of each expert times its weight; a bias that is gathered as it is."""

    def __init__(self, mesh, is_rounded):
        super().__init__()
        torch.manual_seed(0)
        self.is_rounded, self.seen = is_rounded, []
        for name, shape in {"w1": (HIDDEN, WIDTH), "bias": (HIDDEN,)}.items():
            whole = torch.randn(EXPERTS, *shape)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, x):
        with torch.no_grad():
            self.seen.append(self.w1.detach().to_local())
        weight = self.w1.to_local()
        weight = Rounded.apply(weight) if self.is_rounded else weight
        return x @ weight.transpose(1, 2) + self.bias.to_local()[:, None]


class Gathered(TorchDispatchMode):
    """Bytes that this rank gathers."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in func._schema.name:
            self.bytes += args[0].nbytes if isinstance(args[0], torch.Tensor) else 0
        return func(*args, **(kwargs or {}))


def trained(rank, num_shards, param_dtype, in_eight_bits):
    """Return gradients and values after two steps, bytes gathered, and what is left of a weight."""
    mesh = init_device_mesh("cpu", (num_shards, 4 // num_shards), mesh_dim_names=("efsdp", "ep"))
    experts = Experts(mesh["ep"], is_rounded=not in_eight_bits)
    if in_eight_bits:
        gather_in_eight_bits(experts)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    fully_shard(experts, mesh=mesh["efsdp"], mp_policy=policy)
    adapt_to_gloo(experts)
    optimizer, grads = torch.optim.AdamW(experts.parameters(), lr=1e-2, foreach=True), []
    with Gathered() as gathered:
        for step in range(3):
            torch.manual_seed(10 * rank + step)
            x = torch.randn(num_shards * EXPERTS // 4, 5, WIDTH).to(param_dtype)
            experts(x).float().square().sum().backward()
            if step == 0:
                continue  # gradients of two batches add up
            grads += [p.grad.to_local().clone() for p in experts.parameters()]
            nn.utils.clip_grad_norm_(experts.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            state = experts.state_dict()
            assert {type(value.to_local()) for value in state.values()} == {torch.Tensor}
    assert {value.dtype for value in state.values()} == {torch.float32}
    values = {name: value.to_local().clone() for name, value in state.items()}
    experts.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert not any(value.to_local().any() for value in state.values())  # the memory is the shard's
    seen = experts.seen[-1]
    parts = (seen.payload, seen.scales) if in_eight_bits else (seen,)
    assert isinstance(seen, GatheredWeight) == in_eight_bits
    left = sum(part.untyped_storage().size() for part in parts)
    return grads, values, gathered.bytes, left


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_shards", [1, 2])
def test_training_has_the_bits_of_weights_that_are_rounded_once_gathered(
    four_ranks, num_shards, param_dtype
):
    """Gradients, clipped, and AdamW's steps; nothing gathered is left."""
    ours = four_ranks.run(trained, num_shards, param_dtype, True)
    plain = four_ranks.run(trained, num_shards, param_dtype, False)
    for mine, theirs in zip(ours, plain, strict=True):
        assert all(map(torch.equal, mine[0], theirs[0]))
        assert all(torch.equal(mine[1][name], theirs[1][name]) for name in theirs[1])
        assert mine[3] == 0 and len(mine[0]) == len(theirs[0]) == 4
        if num_shards > 1:
            assert mine[2] < theirs[2] * (0.52 if param_dtype is torch.bfloat16 else 0.27)


def a_job(**changes):
    asked = {"expert_compute": "fp8_blockwise"} | changes
    offload = asked.pop("enable_cpu_offload", False)
    return SimpleNamespace(
        megamoe=MegaMoE(**asked),
        compile=SimpleNamespace(enable=True, backend="megamoe"),
        training=SimpleNamespace(enable_cpu_offload=offload),
    )


def dims(shards, ep=2):
    return SimpleNamespace(dp_shard=shards * ep, cp=1, tp=1, etp=1, ep=ep)


def some_experts(grouped=True):
    return SimpleNamespace(num_experts=8, use_grouped_mm=grouped)


@pytest.mark.parametrize("compute", ["fp8_blockwise", "fp8_blockwise_e5m2"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_shards_of_whole_experts_are_gathered_in_eight_bits(compute, shards):
    job = a_job(expert_compute=compute)
    assert gathers_in_eight_bits(job, dims(shards), some_experts())
    assert said_of_gathers(job, dims(shards), some_experts()).endswith("in eight bits")


REFUSED = [
    ({"expert_compute": "fp8_rowwise"}, 2, "the transposed weight"),
    ({"fp8_products": ["gate", "up", "down"]}, 2, "leaves out grad_input"),
    ({"fp8_products": ["down", "grad_input"]}, 2, "leaves out gate, up"),
    ({"disable_passes": ["quantize_products:region 0"]}, 2, "disable_passes has quantize_products"),
    ({"disable_passes": ["feed_products"]}, 2, "disable_passes has feed_products"),
    ({}, 8, "8 ranks share 4 experts, so FSDP2 shards each expert"),
    ({}, 3, "3 ranks share 4 experts unequally"),
    ({"enable_cpu_offload": True}, 2, "keeps shards on the host"),
]


@pytest.mark.parametrize(("changes", "shards", "why"), REFUSED)
def test_other_weights_are_gathered_in_sixteen_bits_which_is_said_with_the_reason(
    changes, shards, why
):
    job = a_job(**changes)
    assert not gathers_in_eight_bits(job, dims(shards), some_experts())
    said = said_of_gathers(job, dims(shards), some_experts())
    assert "in sixteen bits: " in said and why in said


def test_experts_without_grouped_products_are_gathered_in_sixteen_bits():
    assert "use_grouped_mm" in why_sixteen_bits(a_job(), dims(2), some_experts(grouped=False))


@pytest.mark.parametrize("backend", ["inductor", "megamoe"])
def test_a_job_that_multiplies_in_sixteen_bits_has_nothing_to_say(backend):
    job = a_job(expert_compute="same" if backend == "megamoe" else "fp8_blockwise")
    job.compile.backend = backend
    assert not gathers_in_eight_bits(job, dims(2), some_experts())
    assert not said_of_gathers(job, dims(2), some_experts())


@contextlib.contextmanager
def noted(folder, rank, trainer):
    """Write what kinds of shards this rank has, and hashes of its gradients."""
    parameters = [p for part in trainer.model_parts for p in part.parameters()]
    with torch.no_grad():
        kinds = [type(p.detach().to_local()) for p in parameters]
    hashes = []

    def hash_gradients(*_, **__):
        digest = hashlib.sha256()
        for p in parameters:
            digest.update(p.grad.to_local().numpy().tobytes())
        hashes.append(digest.hexdigest())

    trainer.optimizers.register_step_pre_hook(hash_gradients)
    yield
    found = {"shards": kinds.count(EightBitShard), "hashes": hashes}
    (folder / f"{rank}.json").write_text(json.dumps(found))


BOTH_TENSOR_PARALLEL = (
    "parallelism.tensor_parallel_degree", "parallelism.expert_tensor_parallel_degree"
)  # fmt: skip
JOBS = [
    (2, {"activation_checkpoint.mode": "full"}),
    (2, {"megamoe.codegen": "inductor"}),
    (4, {}),
    (4, PIPELINE | {"parallelism.pipeline_parallel_degree": 2}),
    (
        4,
        VALIDATES
        | {
            "parallelism.data_parallel_replicate_degree": 2,
            "parallelism.fsdp_reshard_after_forward": "never",
        },
    ),
    (4, dict.fromkeys(BOTH_TENSOR_PARALLEL, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "changes"), JOBS)
def test_a_job_has_the_bits_of_one_that_gathers_in_sixteen_bits(request, tmp_path, ranks, changes):
    """Losses as printed, and every gradient; with one shard of each expert, and with two."""
    pool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    asked = OURS | {"megamoe.expert_compute": "fp8_blockwise"} | changes
    found = {}
    for what, disabled in {"ours": (), "plain": ("feed_products",)}.items():
        folder = tmp_path / what
        folder.mkdir()
        settings = {"megamoe.disable_passes": disabled} if disabled else {}
        recorder = functools.partial(noted, folder)
        jobs = train(pool, ranks, folder, asked, settings, recorder=recorder)
        notes = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        assert {note.pop("shards") > 0 for note in notes} == {what == "ours"}
        found[what] = [(job.steps, job.validated) for job in jobs], notes
    assert found["ours"] == found["plain"]


@pytest.mark.slow
def test_a_checkpoint_has_plain_values_that_any_job_goes_on_from(two_ranks, tmp_path):
    asked = OURS | SAVES | {"megamoe.expert_compute": "fp8_blockwise"}
    ways = {"eight": {}, "sixteen": {"megamoe.disable_passes": ("feed_products",)}}
    for first, second in (("eight", "sixteen"), ("sixteen", "eight")):
        whole = train(two_ranks, 2, tmp_path / first, asked, ways[first])[0]
        folder = tmp_path / f"{first}, then {second}"
        kept = "checkpoint/step-2"
        shutil.copytree(tmp_path / first / kept, folder / kept)
        resumed = train(two_ranks, 2, folder, asked, ways[second])[0]
        assert resumed.state_keys == whole.state_keys
        assert resumed.steps == {step: whole.steps[step] for step in (3, 4, 5)}
