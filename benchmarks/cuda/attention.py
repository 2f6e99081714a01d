"""`python -m benchmarks.cuda.attention HEAD VALUE_HEAD`: registers of FlexAttention's kernels.

Contract
    Prints JSON: of every kernel of a causal attention over documents, forward and backward, its
    name, registers a thread, and bytes that a thread spills. Compiled for an H100, with the options
    that pass `size_attention` gives, or without (`--default`). Nothing runs.
"""

from benchmarks.cuda.generate import kernel_figures  # first: it loads the device

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.fx as fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.cuda import fake_h100
from moe_compile.codegen import LevelPass
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from passes.pipeline import PIN

HEADS: Final = 16
TOKENS: Final = 4096


class Compiled(Exception):
    """Ends the program: nothing can run."""


def compile_attention(head: int, value_head: int, *, is_default: bool) -> None:
    """Compile forward and backward of one attention with heads of so many columns."""
    state = CompileState(config=MegaMoEConfig(), hardware=load_profile("h100"))
    ours = {"post_grad_custom_post_pass": LevelPass((PIN,), state, None)}
    patches = {} if is_default else ours

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compile_fx(gm, list(inputs), config_patches=patches)
        raise Compiled

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        inductor_config.patch(force_disable_caches=True),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
    ):
        q, k, v = (_heads(width) for width in (head, head, value_head))
        documents = torch.zeros(1, TOKENS, dtype=torch.int64, device=fake_h100.DEVICE)

        def mask(b: Any, _: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (documents[b, i] == documents[b, j])

        blocks = create_block_mask(mask, 1, None, TOKENS, TOKENS, device=fake_h100.DEVICE)
        compiled = torch.compile(flex_attention, backend=backend, fullgraph=True)
        try:
            compiled(q, k, v, block_mask=blocks)
        except BackendCompilerFailed as failed:
            if not isinstance(failed.inner_exception, Compiled):
                raise


def _heads(width: int) -> torch.Tensor:
    shape = (1, HEADS, TOKENS, width)
    return torch.empty(shape, dtype=torch.bfloat16, device=fake_h100.DEVICE, requires_grad=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile one attention."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cuda.attention", description=__doc__
    )
    parser.add_argument("head", type=int)
    parser.add_argument("value_head", type=int)
    parser.add_argument("--default", action="store_true")
    given = parser.parse_args(arguments)
    fake_h100.install(compile_kernels=True)
    compile_attention(given.head, given.value_head, is_default=given.default)
    sys.stdout.write(json.dumps([kernel_figures(*one) for one in fake_h100.COMPILED]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
