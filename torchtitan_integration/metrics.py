"""megamoe's metrics of a step, in torchtitan's own logger (TensorBoard, W&B), at its `log_freq`.

Contract
    Keys begin with `megamoe/` and end in their unit. All ranks run the same collectives, whether
    or not they log. The time this takes is counted, and logged as `megamoe/metrics_time_pct`.

    predicted_*   from the hardware profile, per block with experts, forward and backward together
    waits         of collectives, ms, in the steps that are logged, the first one of a process left
                  out, as it compiles; nothing of validation
    measured_*    from the newest trace of torchtitan's profiler, for all of its steps together
    exchange_*    rows this rank sent to others, out and back, forward and backward; exchanges
                  repeated by `recompute = "recompute_exchanges"` not counted
    *_max_over_mean  rows of all ranks' tokens; 1.0 is even

Hidden and exposed communication is measured in the traces that torch's profiler writes, as
`moe_compile/check/profiler_trace.py` says: of all collectives of the profiled steps, several at
once counted once. A trace is read once, in a process of its own: traces are large, and training
does not wait.

At the end a rank leaves the waits that it measured beside its errors, in the folder that torchrun
gives it; `megamoe train` reads those of all ranks, and no rank waits for another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims

from moe_compile.config import MegaMoEConfig
from moe_compile.ops.wire_format import row_bytes
from moe_compile.report.process_report import REPORT, figures
from moe_compile.report.process_waits import predictions, take_waits
from moe_compile.report.waits import Name
from moe_compile.runtime.launch_records import executed_records
from moe_compile.runtime.measured_waits import WAIT_TIMES
from moe_compile.runtime.rerun import RERUN
from torchtitan_integration.job_config import compile_options, options_of
from torchtitan_integration.meshes import expert_mesh
from torchtitan_integration.routing import RoutingCounter, imbalance, rows_to_others

QUANTIZED_WAYS: Final = {"fp8": 2, "fp8_forward": 1}
"""Ways of an exchange, of forward and backward, that travel in eight bits."""
TRACE_READER: Final = "moe_compile.check.profiler_trace"
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Variable by which torchrun names a rank's file of errors."""


class StepWaits:
    """The waits of this rank's measured steps."""

    def __init__(self) -> None:
        """Measure nothing until a step is announced."""
        WAIT_TIMES.is_on = False
        self._since = 0
        """Steps measured since the last `metrics`."""
        take_waits(0)
        self._all = take_waits(0)

    def end_step(self, *, is_next_measured: bool) -> None:
        """Note that a step is over, and whether the next one is measured."""
        self._since += WAIT_TIMES.is_on
        WAIT_TIMES.is_on = is_next_measured

    def forget(self) -> None:
        """Forget what was measured since the last `metrics`."""
        take_waits(0)

    def metrics(self) -> dict[str, float]:
        """Return the waits of steps measured since the last call; {} where there are none."""
        new, self._since = take_waits(self._since), 0
        self._all = new.and_those_of(self._all)
        if not new.steps or not new.waits:
            return {}
        return {
            "megamoe/measured_waits_ms_per_step": new.ms_per_step(),
            "megamoe/predicted_waits_ms_per_step": new.predicted_ms_per_step(predictions()),
            **{_key(name): 1e3 * s / runs for name, (s, runs) in sorted(new.waits.items())},
        }

    def leave(self, environment: Mapping[str, str] = os.environ) -> None:
        """Write all that was measured, where torchrun has a folder for this rank."""
        WAIT_TIMES.is_on = False
        if errors := environment.get(ERROR_FILE):
            self._all.write(Path(errors).parent)


def _key(name: Name) -> str:
    site, phase, node = name
    return f"megamoe/waits/{site.partition(' in ')[0]}/{phase}/{node}_ms"


class MegaMoEMetrics(MetricsProcessor):
    """torchtitan's metrics, and ours."""

    def __init__(self, job: JobConfig, dims: ParallelDims, model_args: Any = None) -> None:
        """Log for `job`; the trainer adds optimizers and model parts later."""
        super().__init__(job, dims)
        traces = Path(job.job.dump_folder, job.profiling.save_traces_folder)
        dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
        width = int(getattr(model_args, "dim", 0))
        options = options_of(job)
        self._bytes_per_row = bytes_of_routed_row(width, dtype.itemsize, options)
        self._sends_rows = options.dispatch == "all_to_all"  # else tokens, whatever the routing
        self._window = ProfileWindow(traces, dist.get_rank())
        self._routing = RoutingCounter()
        measures = compile_options(getattr(job, "megamoe", None))["megamoe.measure_waits"]
        self._waits = StepWaits() if measures else None
        self._ep_rank = 0

    def __setattr__(self, name: str, value: Any) -> None:
        """Start counting when the trainer sets the model, which it sets last."""
        super().__setattr__(name, value)
        if name == "model_parts" and value is not None:
            dims = self.parallel_dims
            loss, ep = dims.get_optional_mesh("loss"), expert_mesh(dims, ["ep"])
            self._ep_rank = 0 if ep is None else ep.get_local_rank()
            self._routing.watch(self.optimizers, value, None if loss is None else loss.get_group())

    def should_log(self, step: int) -> bool:
        """Return whether torchtitan logs `step`, which is over; the next is measured if logged."""
        if self._waits is not None:
            self._waits.end_step(is_next_measured=super().should_log(step + 1))
        return bool(super().should_log(step))

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Add our metrics to the step's, then log as torchtitan does."""
        began = time.perf_counter()
        seconds = began - self.time_last_log
        steps, counting = self._routing.take()
        ours = self._metrics(seconds / max(1, steps))
        own = time.perf_counter() - began + counting
        ours["megamoe/metrics_time_pct"] = 100 * own / seconds
        extra = {**(extra_metrics or {}), **ours}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log as torchtitan does, which starts its clock anew: count steps from there."""
        super().log_validation(loss, step, extra_metrics)
        self._routing.take()
        if self._waits is not None:
            self._waits.forget()

    def close(self) -> None:
        """Stop counting, and log no more."""
        self._routing.close()
        self._window.close()
        if self._waits is not None:
            self._waits.leave()
        super().close()

    def _metrics(self, step_seconds: float) -> dict[str, float]:
        ours = {f"megamoe/measured_{key}": value for key, value in self._window.poll().items()}
        ours |= _predicted()
        if RERUN.is_served:
            ours["megamoe/steps_run_again"] = float(RERUN.num_again)
            ours["megamoe/row_room_needed"] = RERUN.needed
        if self._waits is not None:
            ours |= self._waits.metrics()
        if self._routing.rows is not None and self.parallel_dims.ep_enabled:
            ours |= self._routed(step_seconds)
        return ours

    def _routed(self, step_seconds: float) -> dict[str, float]:
        dims, rows = self.parallel_dims, self._routing.rows
        assert rows is not None
        uneven = imbalance(self._routing.total(), dims.ep)
        found = {
            "megamoe/rows_per_expert_max_over_mean": uneven.experts,
            "megamoe/rows_per_expert_max_over_mean_worst_layer": uneven.experts_worst_layer,
            "megamoe/rows_per_rank_max_over_mean": uneven.ranks,
            "megamoe/rows_per_rank_max_over_mean_worst_layer": uneven.ranks_worst_layer,
        }
        if self._sends_rows:
            sent = rows_to_others(rows, dims.ep, self._ep_rank, dims.tp // dims.etp)
            gigabytes = sent * self._bytes_per_row / 1e9
            found["megamoe/exchange_GB_per_step"] = gigabytes
            found["megamoe/exchange_GB_per_s_of_step"] = gigabytes / step_seconds
        return found


def bytes_of_routed_row(width: int, itemsize: int, options: MegaMoEConfig) -> int:
    """Return the bytes that travel for one routed row: out and back, forward and backward."""
    ways = [QUANTIZED_WAYS.get(w, 0) for w in (options.dispatch_wire, options.combine_wire)]
    return sum(ways) * row_bytes(width) + (4 - sum(ways)) * width * itemsize


def _predicted() -> dict[str, float]:
    """Return the predicted hidden and exposed time of the newest graphs of blocks with experts."""
    newest = {(r["site"], r["phase"]): figures(r) for r in executed_records()}
    with_exchanges = [f for f in newest.values() if "hidden_us" in f]
    found = {"megamoe/recompiles": float(REPORT.num_recompiles())}
    if with_exchanges:
        for name in ("hidden", "exposed"):
            total = sum(f[f"{name}_us"] for f in with_exchanges)
            found[f"megamoe/predicted_{name}_ms_per_block"] = total / 1e3
    return found


class ProfileWindow:
    """The newest measurement of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Look for this rank's traces below `folder`, one folder per profiled iteration."""
        self._folder = folder
        self._name = f"rank{rank}_trace.json"
        self._seen: set[Path] = set(folder.glob(f"*/{self._name}"))
        self._reader: subprocess.Popen[str] | None = None
        self._latest: dict[str, float] = {}

    def poll(self) -> dict[str, float]:
        """Return the newest measurement, {} before there is one; never waits."""
        if self._reader is not None and self._reader.poll() is not None:
            printed, _ = self._reader.communicate()
            if self._reader.returncode == 0:
                self._latest = json.loads(printed)
            self._reader = None
        fresh = sorted(set(self._folder.glob(f"*/{self._name}")) - self._seen)
        if fresh and self._reader is None:
            self._seen |= set(fresh)
            command = [sys.executable, "-m", TRACE_READER, str(fresh[-1])]
            self._reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self._latest

    def close(self) -> None:
        """End a reader that still runs."""
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()
