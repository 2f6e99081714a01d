"""A rank that Dynamo stops compiling must not run eagerly beside ranks that run rewritten code.

No fault, a limit: Dynamo compiles one piece of code `torch._dynamo.config.recompile_limit` times at
most, and runs it eagerly for all further inputs, as other numbers of tokens with `dynamic=False`.
Only this rank knows, and its exchanges would meet others, of chunks. Dynamo asks for the limit
before it calls callbacks or a backend, so that the limit cannot be set for one piece of code.

Noticed by
    `test_beyond_its_limit_dynamo_runs_code_eagerly` in test_still_there.py.
Contract
    From the last allowed compilation of rewritten code on, `fail_on_recompile_limit_hit` is set for
    the process: code that would run eagerly is an error.
"""

from __future__ import annotations

import logging
from typing import Final

import torch
from torch._guards import CompileContext

LOG: Final = logging.getLogger(__name__)


def forbid_eager_beyond_limit(place: str) -> None:
    """Make running eagerly an error if Dynamo may not compile the current code again."""
    config, compiling = torch._dynamo.config, CompileContext.current_compile_id()
    if compiling is None or config.fail_on_recompile_limit_hit or config.suppress_errors:
        return
    times = (compiling.frame_compile_id or 0) + 1
    if times < config.recompile_limit:
        return
    config.fail_on_recompile_limit_hit = True
    LOG.warning(
        "megamoe: the code at %s was compiled %d times, as often as Dynamo's recompile_limit "
        "allows. At the next recompile this rank alone would run the code in eager mode, while "
        "other ranks run the rewritten program, so megamoe makes this recompile an error "
        "(fail_on_recompile_limit_hit). To do: call torch._dynamo.mark_dynamic(x, 0) on tensors "
        "whose number of tokens changes, compile with dynamic=True, or set a higher "
        "torch._dynamo.config.recompile_limit",
        place,
        times,
    )
