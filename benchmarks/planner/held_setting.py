"""Predict the steps of one setting, then run them on the emulated device and link."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.link.charged_step import EmulatedDevice, compile_for
from benchmarks.link.clocks import ChargedClock
from benchmarks.link.emulated_link import EmulatedLink, make_emulated_group
from benchmarks.link.link_model import LinkRate
from benchmarks.link.post_board import PostBoard
from benchmarks.link.step import Forward, Stepper, relative_error
from benchmarks.link.subjects import OneLayer
from benchmarks.link.variants import MAX_ERROR
from benchmarks.planner.predicted_layer import PLANNED, PredictedLayer, predict_layer
from benchmarks.planner.prediction_settings import RATIO_NAMES, Setting, emulated_devices, ratio_of
from benchmarks.planner.stated_routing import state_routing
from moe_compile.hardware import HardwareProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One number of chunks at one ratio; times are milliseconds."""

    name: str
    ranks: int
    device: str
    routing: str
    imbalance: float
    ratio: str
    num_chunks: int
    predicted_ms: float
    measured_ms: float
    computed_ms: float
    """Of the measured step on this rank, waits left out."""
    link_mb_per_s: float
    chosen: int
    """The number of chunks the planner takes."""
    relative_error: float
    """Of what was computed, against the layer run eagerly."""

    @property
    def error(self) -> float:
        """Return by which share the prediction is too long."""
        return self.predicted_ms / self.measured_ms - 1.0


@dataclass(frozen=True, slots=True)
class _Rank:
    """What all settings of one process share."""

    rank: int
    link: EmulatedLink
    clock: ChargedClock

    def hold(self, setting: Setting) -> list[Held]:
        """Return, ratio by ratio, every number of chunks."""
        case = setting.case
        subject = OneLayer(case, self.link).of(None)
        if setting.weights is not None:
            state_routing(subject, case, setting.weights)
        stepper = Stepper(subject, self.link, self.clock)
        predicted = predict_layer(subject.module, subject.tokens, setting.imbalance)
        device = emulated_devices()[setting.device]
        rates = {name: predicted.rated(device, ratio_of(name)) for name in RATIO_NAMES}
        held = []
        for num_chunks in setting.numbers_of_chunks:
            config = replace(PLANNED, chunks=num_chunks)
            run = EmulatedDevice(config=config, clock=self.clock, hardware=device)
            forward = compile_for(stepper.module, run)
            error = relative_error(stepper.values(forward), stepper.expected)
            if run.num_chunks != [num_chunks] or not error <= MAX_ERROR:
                raise RuntimeError(f"{case.name}: {run.num_chunks} chunks, off by {error}")
            for ratio, hardware in rates.items():
                run.hardware = hardware
                seconds = self._measure(stepper, forward, hardware)
                predicted_us = predicted.us(num_chunks, hardware)
                chosen = _chosen(predicted, hardware)
                self._say(
                    f"{case.name}: {num_chunks} chunks at {ratio}: predicted "
                    f"{predicted_us / 1e3:.2f}, measured {seconds * 1e3:.2f} ms; chosen {chosen}"
                )
                held.append(
                    Held(
                        name=case.name,
                        ranks=case.num_ranks,
                        device=setting.device,
                        routing=setting.routing,
                        imbalance=setting.imbalance,
                        ratio=ratio,
                        num_chunks=num_chunks,
                        predicted_ms=predicted_us / 1e3,
                        measured_ms=seconds * 1e3,
                        computed_ms=run.computed_us / 1e3,
                        link_mb_per_s=hardware.link_gb_per_s * 1e3,
                        chosen=chosen,
                        relative_error=error,
                    )
                )
        return sorted(held, key=lambda h: (RATIO_NAMES.index(h.ratio), h.num_chunks))

    def _measure(self, stepper: Stepper, forward: Forward, hardware: HardwareProfile) -> float:
        rate = LinkRate(
            latency_s=hardware.link_latency_us * 1e-6, bytes_per_s=hardware.link_gb_per_s * 1e9
        )
        return stepper.timed(forward, rate).elapsed_s

    def _say(self, what: str) -> None:
        if self.rank == 0:
            sys.stderr.write(f"  {what}\n")
            sys.stderr.flush()


def _chosen(predicted: PredictedLayer, hardware: HardwareProfile) -> int:
    return predicted.decide(hardware).chosen.candidate.num_chunks


def hold_all(rank: int, settings: Sequence[Setting], board: Path) -> list[list[Held]]:
    """Return, on every rank, what came of each of the settings; all have as many ranks."""
    torch.set_num_threads(1)
    torch._dynamo.config.capture_scalar_outputs = True
    clock = ChargedClock()
    link = make_emulated_group(PostBoard(board, rank, settings[0].case.num_ranks), clock)
    return [_Rank(rank, link, clock).hold(setting) for setting in settings]
