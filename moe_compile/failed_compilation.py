"""A program that fails to compile once it is rewritten is compiled as it was written.

Contract
    This holds for any error of AOTAutograd, the code generator and a check of ours. Errors that the
    user can correct, and exceptions by which Dynamo traces anew or goes on without a graph, pass
    through. So does every error under `strict`.
    Both graphs are compiled before the program first runs: an error of the backward would come too
    late otherwise, when other ranks run what was rewritten.
    The failure is warned of and stands in the journal, and ranks compare it: ranks that compiled
    their rewritten program run it as written too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile.errors import InvalidConfig, RankDisagreement, RegionRefused
from moe_compile.journal.entries import Dropped
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState

LOG: Final = logging.getLogger(__name__)

COMPILATION: Final = "compilation"
"""Name of the step in the journal, in the place of a pass."""
PASS_THROUGH: Final = (
    InvalidConfig,
    RankDisagreement,
    RegionRefused,
    TorchDynamoException,
    GuardOnDataDependentSymNode,
)

Compiled = Callable[..., Any]


def compiled_or_as_written(
    compile_rewritten: Callable[[], Compiled],
    compile_whole: Callable[[], Compiled] | None,
    state: CompileState,
) -> tuple[Compiled, bool]:
    """Return the compiled program, and whether that is the program as it was written.

    `compile_whole` is None where nothing was rewritten that other ranks may run differently.
    """
    try:
        return compile_rewritten(), False
    except Exception as raised:
        error = _cause(raised)
        if isinstance(error, PASS_THROUGH) or compile_whole is None or state.config.strict:
            raise
        failure = f"{type(error).__name__}: {error}"
        LOG.warning(
            "megamoe: the rewritten program at %s does not compile (%s), so the original program "
            "runs. This is a bug in megamoe: please report it with the program",
            state.site,
            failure,
        )
    state.journal.add("dynamo", Dropped(COMPILATION, Reason.FAILED, failure))
    state.dropped.append(COMPILATION)
    forget_unfinished_symbols()
    return compile_whole(), True


def _cause(error: Exception) -> Exception:
    """Return the error itself where Inductor wrapped it in an error of Dynamo."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def forget_unfinished_symbols() -> None:
    """Drop the pending symbols of an operator that failed halfway, before the next trace."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()
