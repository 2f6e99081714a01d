"""Section `kernels`: quantized rows are right, and how near a copy's speed they are.

Contract
    Messages equal plain PyTorch's byte for byte, and rows read from them value for value, at
    every timed size, at odd widths and for rows of extreme values.
    Each time has beside it that of a copy that reads and writes as many bytes, taken in the same
    rounds, and, while time is left, that of Inductor's fusion of the plain PyTorch.
    One replay runs over several sets of inputs and outputs, together larger than the caches.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any, Final

import torch
import torch._dynamo
from torch.utils import _pytree as pytree

from benchmarks.gpu.replay import Replay, replayable, time_in_turn
from benchmarks.gpu.row_ops import ROW_OPS, Inputs, RowOp, extreme_rows, random_inputs
from benchmarks.gpu.sizes import Sizes
from moe_compile.check.sections import Record, say
from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    UNPACK_DEQUANTIZE,
    has_kernel,
    pack_rows,
    unpack_rows,
)

ODD_WIDTHS: Final = (1, 127, 130, 2052)
ODD_ROWS: Final = (0, 1, 33)
JOB_S: Final = 3.0
"""What one size of one operator takes at most, compilation aside."""
COMPILE_S: Final = 12.0


def check_kernels(record: Record, sizes: Sizes) -> None:
    """Run the section."""
    if sizes.device == "cuda":
        record.expect(has_kernel(torch.device("cuda")), "kernels", "the plain operators run here")
    for op in ROW_OPS:
        record.attempt(f"{op.name} at odd sizes", lambda op=op: check_odd(record, sizes, op))
    for dtype in (torch.bfloat16, torch.float32):
        what = f"extreme values, {dtype}"
        record.attempt(what, lambda d=dtype, w=what: _check_extremes(record, sizes, d, w))
    timed = list(itertools.product(sizes.widths, sizes.row_counts, ROW_OPS))
    for width, num_rows, op in timed:
        what = f"{op.name} {num_rows} x {width}"
        record.attempt(what, lambda j=(num_rows, width, op): measure_op(record, sizes, *j), JOB_S)
        _release(sizes)
    _compare_with_inductor(record, sizes)


def check_odd(record: Record, sizes: Sizes, op: RowOp) -> None:
    """Check one operator at widths that fill no vector, for few rows and for none."""
    for width, num_rows in itertools.product(ODD_WIDTHS, ODD_ROWS):
        inputs = random_inputs(sizes.device, num_rows, width, seed=width)
        _expect_equal(
            record, f"{op.name} {num_rows} x {width}", [op.run(inputs)], [op.expected(inputs)]
        )


def _check_extremes(record: Record, sizes: Sizes, dtype: torch.dtype, what: str) -> None:
    """Bytes of a block without a finite largest value are not fixed: their values must be NaN."""
    for width in ODD_WIDTHS:
        rows = extreme_rows(sizes.device, width, dtype)
        finite = torch.isfinite(rows).all(1)
        message, expected = GATHER_QUANTIZE_PACK(rows), pack_rows(rows, None)
        _expect_equal(record, f"{what}, width {width}", [message[finite]], [expected[finite]])
        values = UNPACK_DEQUANTIZE(message, width, dtype)
        wanted = unpack_rows(expected, width, dtype)
        record.expect(
            torch.allclose(values, wanted, rtol=0, atol=0, equal_nan=True),
            f"{what}, width {width}",
            "values read back differ from plain PyTorch's",
        )


def measure_op(record: Record, sizes: Sizes, num_rows: int, width: int, op: RowOp) -> None:
    """Check and time one operator at one size; adds a row."""
    sets = _input_sets(sizes, op, num_rows, width)
    ours = replayable(sizes.device, lambda: [op.run(inputs) for inputs in sets])
    what = f"{op.name} {num_rows} x {width}"
    expected = (op.expected(inputs) for inputs in sets)
    is_equal = _expect_equal(record, what, ours.fresh_outputs(), expected)
    num_bytes = op.bytes_per_row(width) * num_rows
    copy = _copy(sizes, num_bytes, len(sets))
    jobs = {"ours": ours.launch, "copy": copy.launch}
    times = time_in_turn(sizes.device, jobs, sizes.kernel_rounds)
    seconds = {name: statistics.median(t) / len(sets) for name, t in times.items()}
    row = {
        "op": op.name,
        "rows": num_rows,
        "width": width,
        "bytes": num_bytes,
        "input_sets": len(sets),
        "is_equal": is_equal,
        "us": 1e6 * seconds["ours"],
        "us_quartiles": [1e6 * q / len(sets) for q in statistics.quantiles(times["ours"], n=4)],
        "gb_per_s": num_bytes / seconds["ours"] / 1e9,
        "copy_us": 1e6 * seconds["copy"],
        "copy_gb_per_s": num_bytes / seconds["copy"] / 1e9,
        "fraction_of_copy": seconds["copy"] / seconds["ours"],
    }
    record.add_row(row)
    say(f"{what}: {row['gb_per_s']:.0f} GB/s, {row['fraction_of_copy']:.2f} of a copy")


def _compare_with_inductor(record: Record, sizes: Sizes) -> None:
    """Time Inductor's fusion of the same jobs against our operators, again in turn."""
    record.put(inductor=[])
    for width, op in itertools.product(sizes.widths, ROW_OPS):
        what = f"inductor {op.name} width {width}"
        record.attempt(what, lambda j=(width, op): _inductor_rows(record, sizes, *j), COMPILE_S)


def _inductor_rows(record: Record, sizes: Sizes, width: int, op: RowOp) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(op.plain, fullgraph=True)
    for num_rows in sizes.row_counts:
        sets = _input_sets(sizes, op, num_rows, width)
        for inputs in sets:
            _mark_rows_dynamic(op.arguments(inputs))
        compiled(*op.arguments(sets[0]))
        theirs = replayable(
            sizes.device, lambda sets=sets: [compiled(*op.arguments(i)) for i in sets]
        )
        ours = replayable(sizes.device, lambda sets=sets: [op.run(i) for i in sets])
        jobs = {"inductor": theirs.launch, "ours": ours.launch}
        times = time_in_turn(sizes.device, jobs, sizes.kernel_rounds)
        seconds = {name: statistics.median(t) / len(sets) for name, t in times.items()}
        expected = [op.expected(inputs) for inputs in sets]
        equal = all(map(torch.equal, theirs.fresh_outputs(), expected))
        found = {
            "op": op.name,
            "rows": num_rows,
            "width": width,
            "inductor_us": 1e6 * seconds["inductor"],
            "ours_us": 1e6 * seconds["ours"],
            "inductor_over_ours": seconds["inductor"] / seconds["ours"],
            "inductor_is_equal": equal,
        }
        record.put(inductor=[*record.data["inductor"], found])
        say(f"{op.name} {num_rows} x {width}: inductor takes {found['inductor_over_ours']:.2f} x")
        del theirs, ours, sets
        _release(sizes)


def _mark_rows_dynamic(arguments: Iterable[Any]) -> None:
    for argument in pytree.tree_leaves(tuple(arguments)):
        if isinstance(argument, torch.Tensor):
            torch._dynamo.mark_dynamic(argument, 0)


def _input_sets(sizes: Sizes, op: RowOp, num_rows: int, width: int) -> list[Inputs]:
    bytes_per_set = op.bytes_per_row(width) * num_rows
    num_sets = max(2, math.ceil(sizes.least_footprint / bytes_per_set))
    return [random_inputs(sizes.device, num_rows, width, seed) for seed in range(num_sets)]


def _copy(sizes: Sizes, num_bytes: int, num_sets: int) -> Replay:
    """Return copies that read and write `num_bytes` together, one per set."""
    pairs = []
    for _ in range(num_sets):
        source = torch.randint(256, (num_bytes // 2,), dtype=torch.uint8, device=sizes.device)
        pairs.append((torch.empty_like(source), source))
    return replayable(sizes.device, lambda: [target.copy_(source) for target, source in pairs])


def _expect_equal(
    record: Record, what: str, found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]
) -> bool:
    for mine, theirs in zip(found, expected, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            why = f"{mine.dtype} {list(mine.shape)} instead of {theirs.dtype} {list(theirs.shape)}"
            return record.expect(False, what, why)
        if not torch.equal(mine, theirs):
            wrong = (mine != theirs).sum().item()
            return record.expect(False, what, f"{wrong} of {mine.numel()} elements differ")
    return True


def _release(sizes: Sizes) -> None:
    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
