"""Places where Dynamo ended a graph, or compiled nothing, and what to write instead.

Contract
    Reads torch's own records: for a graph, the reason passed to the backend with it; for code left
    to Python, the metrics of its compilations.
    Texts name the user's line and no memory address: each place is reported once.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from traceback import FrameSummary
from typing import Any, Final

import torch._dynamo.utils as dynamo_utils
import torch.fx as fx

from moe_compile.graph.query import TORCH, place_of

COLLECTIVES: Final = str(Path(TORCH, "distributed"))
EXCHANGE: Final = re.compile(r"\ball_to_all")
AUTOGRAD_FORM: Final = (
    "where gradients flow, all_to_all_single_autograd of torch.distributed._functional_collectives"
)
VALUE_NEEDED: Final = re.compile("^generic_jump (?:Tensor|SymNode)|data-dependent expression")
"""Pattern in torch's reasons for breaks where Python branches on a tensor's value."""
UNKNOWN_LENGTH: Final = re.compile("output shape depends on")
REMEDIES: Final = (
    (
        re.compile("async_op"),
        "leave async_op out: a region's exchanges are launched early and awaited late anyway",
    ),
    (
        re.compile(r"distributed\.all_to_all\b"),
        f"all_to_all_single on the joined tensors with split sizes, or, {AUTOGRAD_FORM}",
    ),
    (
        re.compile(r"distributed\.reduce_scatter\b"),
        "reduce_scatter_tensor on the joined tensors",
    ),
    (
        re.compile(r"distributed\.nn\b"),
        f"all_to_all_single of torch.distributed, or, {AUTOGRAD_FORM}",
    ),
    (
        UNKNOWN_LENGTH,
        "say how long the result is, repeat_interleave(..., output_size=n), or compile with "
        "fullgraph=True, which captures such operators",
    ),
    (
        re.compile("recompile limit"),
        "keep shapes, dtypes and Python's numbers the same from call to call, or mark sizes that "
        "change by torch._dynamo.mark_dynamic; TORCH_LOGS=recompiles shows the values that "
        "changed, and the limit is torch._dynamo.config.recompile_limit",
    ),
    (
        re.compile("needs a value of a tensor"),
        "compute the value from tensors alone (torch.where for a branch, x[order] for a list), or "
        "from Python's own numbers",
    ),
    (
        re.compile(r"builtin(?: operator)? `(?:print|_warnings\.warn)`"),
        "have Dynamo ignore the function: call "
        "torch._dynamo.config.ignore_logging_functions.add(print), or add(warnings.warn), on "
        "every rank",
    ),
)
"""Pattern of the reason -> remedy; the first match counts."""
OTHERWISE: Final = "torch.compile(..., fullgraph=True) prints more about it"
ADDRESS: Final = re.compile(
    r"<(?:built-in )?(?:function|method) (\S+) at 0x[0-9a-f]+>| at 0x[0-9a-f]+"
)
EXPLANATION: Final = re.compile(r"Explanation: (.+)")
RAISED: Final = re.compile(r"raised exception \w+\((['\"])(.+?)\1\)")
LONGEST: Final = 300
"""Limit of characters quoted of torch's reason."""


@dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where a graph ends."""

    where: str
    """`file.py:line in function`, the user's line."""
    why: str
    is_collective: bool
    """Whether the code that is not traced is a collective."""

    @property
    def is_of_unknown_length(self) -> bool:
        """Whether the code that is not traced has a result whose length depends on data."""
        return UNKNOWN_LENGTH.search(self.why) is not None

    def __str__(self) -> str:
        """Return the place and the reason."""
        return f"{self.where}: {self.why}"

    @property
    def remedy(self) -> str:
        """Return the user's remedy."""
        return next((do for says, do in REMEDIES if says.search(self.why)), OTHERWISE)


def graph_break(gm: fx.GraphModule) -> GraphBreak | None:
    """Return why the Dynamo graph `gm` ends before its function does; None where it does not.

    Releases of torch that give no reason end no graph, as far as this tells.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    return break_at(reason.user_stack, reason.reason)


def break_at(stack: Iterable[FrameSummary], reason: str) -> GraphBreak:
    """Return Dynamo's account of a break at `stack`, the innermost frame last."""
    frames = list(stack)
    own = [frame for frame in frames if not frame.filename.startswith(TORCH)]
    collective = _collective(frames)
    said = f"Dynamo does not trace {collective}" if collective else _short(reason)
    if own and own[-1].line and VALUE_NEEDED.search(reason):
        said = f"Dynamo does not trace `{own[-1].line}`, for which it needs a value of a tensor"
    return GraphBreak(
        where=place_of(own[-1].filename, own[-1].lineno, own[-1].name) if own else "",
        why=said,
        is_collective=bool(collective) or "async_op" in said,
    )


def forget_frames() -> None:
    """Forget torch's records of the functions it has left to Python so far."""
    getattr(dynamo_utils, "clear_compilation_metrics", int)()


def frames_left_out() -> list[GraphBreak]:
    """Return the functions with exchanges that Dynamo left to Python.

    Each calls a collective that is not traced; or has an all-to-all in its source, and untraceable
    code in a loop or a `with`, where Dynamo cannot end a graph.
    """
    metrics: list[Any] = getattr(dynamo_utils, "get_compilation_metrics", list)()
    functions: dict[str, Any] = {}  # the newest: torch._dynamo.reset() begins numbers anew
    found = []
    for one in metrics:
        if one.co_filename:
            functions[_code_of(one)] = one
        function = functions.get(_code_of(one))
        if one.fail_reason and function and _has_exchange(function, one):
            found.append(_left_out(function, one))
    return found


def _code_of(metrics: Any) -> str:
    """Return torch's number of the function that was compiled.

    Its identifier is "FUNCTION/COMPILATION". Where the limit on compilations of a function is
    reached, torch records this number without the function's name.
    """
    return str(metrics.compile_id).rpartition("/")[0]


def _left_out(function: Any, failed: Any) -> GraphBreak:
    why = _short(failed.fail_reason)
    if failed.fail_user_frame_filename == function.co_filename:
        why = (
            "Dynamo leaves the function to Python because of line "
            f"{failed.fail_user_frame_lineno}: {why}"
        )
    where = place_of(function.co_filename, function.co_firstlineno, function.co_name)
    return GraphBreak(where, why, True)


def _has_exchange(function: Any, failed: Any) -> bool:
    if str(failed.fail_user_frame_filename).startswith(COLLECTIVES):
        return True
    following = linecache.getlines(function.co_filename)[function.co_firstlineno - 1 :]
    return EXCHANGE.search("".join(inspect.getblock(following))) is not None


def warning_of(one: GraphBreak) -> str:
    """Return the warning for a collective that is not traced."""
    return f"megamoe: no region is found around {one}. To do: {one.remedy}"


def _collective(frames: Sequence[FrameSummary]) -> str:
    """Return the function of `torch.distributed` in which tracing ended, "" for none."""
    inside = (f.name for f in frames if PurePath(f.filename).name == "distributed_c10d.py")
    name = next(inside, "")
    return f"torch.distributed.{name}" if name else ""


def _short(reason: str) -> str:
    """Return one sentence of torch's reason."""
    first = reason.splitlines()[0]
    raised, explained = RAISED.search(reason), EXPLANATION.search(reason)
    said = raised.groups()[-1] if raised and "async_op" not in first else first
    if explained and not raised:
        said = f"{first} ({explained[1].removesuffix('.')})"
    return ADDRESS.sub("", said)[:LONGEST]
