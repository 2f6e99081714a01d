"""Section `link`: what each way of compiling the layer takes over an emulated link (lanes.py).

Contract
    Rates are set from plain Inductor's step on the control lane and the bytes it sends, so that its
    exchanges alone take compute / ratio on the modelled link.
    Within a round every variant makes one step; the order rotates from round to round.
    Variants compute what plain Inductor does on every lane, outputs poisoned until they arrive.

Pseudo-code
    compile the baseline, run it on the control lane -> compute time, bytes -> rates
    compile the others, told the rate at 1:1, while time is left for rounds
    rounds on the control lane, at each ratio, and through host memory
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import torch.distributed as dist

from benchmarks.gpu.exact_layer import Tensors, relative_errors
from benchmarks.gpu.lanes import CONTROL, Carried, CudaLane, Pace, ProcessorLane
from benchmarks.gpu.layer_check import start_one_rank
from benchmarks.gpu.layer_step import GPU_VARIANTS, Compiled, LayerStep, is_known, start_compiler
from benchmarks.gpu.link_rows import AGAIN, Step, rows_of, warnings_of
from benchmarks.gpu.one_rank_link import one_rank_link
from benchmarks.gpu.sizes import Sizes
from benchmarks.link.cases import BASELINE, LATENCY_S, NO_LINK_RATIO, RATIOS
from benchmarks.link.link_model import LinkRate
from benchmarks.link.machine import emulated_link_origin, write_profile
from moe_compile.check.sections import Record, say
from moe_compile.hardware import load_profile

WARM_UP: Final = 3
ESTIMATE_STEPS: Final = 10
LEAST_ROUNDS: Final = 3
LEAST_S: Final = 5.0
"""Time a setting's rounds are not begun without."""


def check_link(record: Record, sizes: Sizes) -> None:
    """Run the section."""
    run = _Run(record, sizes)
    run.compile(BASELINE, "detect")
    if BASELINE not in run.compiled:
        return
    compute_s, control = run.estimate()
    paces = run.paces(compute_s, control)
    profile = record.path.with_name("link_profile.toml")
    hardware = load_profile("detect")
    link_gb_per_s = paces["1:1"].rate.bytes_per_s / 1e9
    origins = {**hardware.origins, "link_gb_per_s": emulated_link_origin()}
    told = replace(
        hardware,
        link_gb_per_s=link_gb_per_s,
        node=None,
        network=None,
        origins=origins,
    )
    write_profile(told, profile)
    for name in sizes.link_variants:
        if name != BASELINE:
            run.compile(name, profile)
    run.compiled[AGAIN] = run.compiled[BASELINE]
    for setting, pace in paces.items():
        rounds = sizes.control_rounds if setting == NO_LINK_RATIO else sizes.rounds
        record.attempt(setting, lambda s=setting, p=pace, n=rounds: run.rounds(s, p, n), LEAST_S)
    record.put(warnings=warnings_of(record.data["rows"]))
    dist.destroy_process_group()


class _Run:
    def __init__(self, record: Record, sizes: Sizes) -> None:
        start_compiler()
        start_one_rank("gloo")
        self._record, self._sizes = record, sizes
        self.lane = CudaLane() if sizes.device == "cuda" else ProcessorLane()
        group = one_rank_link(sizes.device, self.lane)
        self._step = LayerStep(sizes.case, group, sizes.device)
        self._needs_s = sizes.compile_s
        self._expected: Tensors = {}
        self.compiled: dict[str, Compiled] = {}
        record.put(
            emulated="one GPU; exchanges go over the lane of benchmarks/gpu/lanes.py",
            case=asdict(sizes.case),
            variants={},
            lane={
                "cycles_per_s": self.lane.cycles_per_s,
                "copy_bytes_per_s": self.lane.copy_bytes_per_s,
                "host_bytes_per_s": self.lane.host_bytes_per_s,
            },
        )

    def compile(self, name: str, hardware: str | Path) -> None:
        """Compile one variant if it fits before the rounds."""
        needs_s = self._needs_s + self._sizes.rounds_s
        self._record.attempt(name, lambda: self._compile(name, hardware), needs_s)

    def _compile(self, name: str, hardware: str | Path) -> None:
        if not is_known(GPU_VARIANTS[name]):
            raise LookupError("this torch has no such option")
        say(f"link: compiling {name}")
        compiled = self._step.compile(GPU_VARIANTS[name], hardware)
        self._needs_s = max(self._needs_s, compiled.compile_s)
        error = self._error(name, compiled, CONTROL)
        facts = {
            "compile_s": compiled.compile_s,
            "error": error,
            "orders": [asdict(order) for order in compiled.orders],
        }
        self._record.put(variants={**self._record.data["variants"], name: facts})
        for _ in range(WARM_UP):
            self._step.run(compiled.forward)
        self.compiled[name] = compiled

    def _error(self, name: str, compiled: Compiled, pace: Pace) -> float:
        """Return the largest relative difference from the baseline's first results."""
        self.lane.pace, self.lane.poisons = pace, True
        try:
            results = self._step.results(compiled.forward)
        finally:
            self.lane.poisons = False
        if not self._expected:
            self._expected = {key: tensor.clone() for key, tensor in results.items()}
        error = max(relative_errors(results, self._expected).values(), key=_nan_last)
        allowed = GPU_VARIANTS.get(name, GPU_VARIANTS[BASELINE]).max_error
        if not error <= allowed:
            raise ArithmeticError(f"differs from {BASELINE} by {error:.4g}, allowed {allowed:.4g}")
        return error

    def _is_right(self, name: str, setting: str, pace: Pace) -> bool:
        what = f"{name} at {setting}"
        error = self._record.attempt(what, lambda: self._error(name, self.compiled[name], pace))
        return error is not None

    def step(self, name: str) -> Step:
        """Make one timed step of a variant at the lane's present pace."""
        self.lane.carried = carried = Carried()
        timed = self._step.timed(self.compiled[name].forward)
        return Step(
            seconds=timed.seconds,
            host_s=timed.host_s,
            link_s=self.lane.busy_s(),
            num_bytes=carried.num_bytes,
            num_exchanges=carried.num_exchanges,
        )

    def estimate(self) -> tuple[float, Step]:
        """Return the baseline's step time on the control lane, and one of its steps."""
        self.lane.pace = CONTROL
        steps = [self.step(BASELINE) for _ in range(ESTIMATE_STEPS)]
        return statistics.median(s.seconds for s in steps), steps[-1]

    def paces(self, compute_s: float, control: Step) -> dict[str, Pace]:
        """Return the settings, by name; the control first."""
        settings = {NO_LINK_RATIO: CONTROL}
        for name, wanted in RATIOS.items():
            moving_s = compute_s / wanted - control.num_exchanges * LATENCY_S
            bytes_per_s = control.num_bytes / max(moving_s, LATENCY_S)
            settings[name] = Pace(rate=LinkRate(latency_s=LATENCY_S, bytes_per_s=bytes_per_s))
        whole_s = control.num_bytes / self.lane.host_bytes_per_s
        settings["host 1:1"] = Pace(host_share=min(1.0, compute_s / whole_s))
        settings["host, all bytes"] = Pace(host_share=1.0)
        self._record.put(
            compute_ms=1e3 * compute_s,
            bytes_per_step=control.num_bytes,
            exchanges_per_step=control.num_exchanges,
            settings={
                name: {
                    "gb_per_s": pace.rate.bytes_per_s / 1e9,
                    "latency_us": 1e6 * pace.rate.latency_s,
                    "host_share": pace.host_share,
                }
                for name, pace in settings.items()
            },
        )
        return settings

    def rounds(self, setting: str, pace: Pace, num_rounds: int) -> None:
        """Run every variant in turn at one setting; adds a row for each."""
        say(f"link: {setting}: {num_rounds} rounds of {len(self.compiled)} variants")
        names = [name for name in self.compiled if self._is_right(name, setting, pace)]
        self.lane.pace = pace
        steps: dict[str, list[Step]] = {name: [] for name in names}
        gc.collect()
        gc.disable()
        for done in range(num_rounds):
            if done >= LEAST_ROUNDS and self._record.left_s() < 0:
                say(f"link: {setting}: out of time after {done} rounds")
                break
            names = [*names[1:], names[0]]
            for name in names:
                steps[name].append(self.step(name))
        gc.enable()
        for row in rows_of(setting, steps, self._record.data["compute_ms"]):
            self._record.add_row(row)


def _nan_last(error: float) -> float:
    return float("inf") if error != error else error
