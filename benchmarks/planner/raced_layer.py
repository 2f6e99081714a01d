"""A layer run in many ways on the emulated device and link: what each way takes, and predicts.

Contract
    Each way goes through all passes of `torch.compile(backend="megamoe")`, and runs node by node on
    all ranks, which are threads here. Values are held against those of the layer as it is written.
    Predicted is what the product predicts, by the profile that it is told; the charged time has
    errors that nobody is told of (`DrawnErrors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist

from benchmarks.link.cases import Case, NodesCase
from benchmarks.link.charged_graph import Price, as_estimated
from benchmarks.link.clocks import ChargedClock
from benchmarks.link.link_model import NO_LINK, LinkRate, Topology
from benchmarks.link.machine import emulated_link_origin, write_profile
from benchmarks.link.rank_threads import RUNNING, RankThreads, SharedDevice, as_rank
from benchmarks.link.step import relative_error
from benchmarks.link.subjects import OneLayer, Subject, Values
from benchmarks.link.variants import MAX_ERROR, MAX_ERROR_FP8
from benchmarks.planner.planned_models import CapturedError
from benchmarks.planner.predicted_layer import STEP_PEAK_BYTES
from benchmarks.planner.prediction_settings import emulated_devices, ratio_of
from benchmarks.planner.raced_settings import DrawnErrors, Found, Raced
from moe_compile.check.better import form_of, predicted_us
from moe_compile.check.candidates import Options, found_in, freed, over
from moe_compile.check.faster import plan_of
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import HardwareProfile, Link, load_profile
from moe_compile.hardware.links import NUMBERS
from moe_compile.hardware.profile import NO_HOST
from moe_compile.report.process_report import report_of

AS_ASKED: Final = MegaMoEConfig(
    codegen="fx",
    equal_tokens=True,
    numerics="lossy",
    chunks=1,
    chunk_by="experts",
    dispatch="all_to_all",
    dispatch_wire="same",
    combine_wire="same",
    nodes="off",
    step_peak_bytes=STEP_PEAK_BYTES,
)
"""The job whose other ways are raced: the layer as it is written."""
INSIDE_LATENCY_US: Final = 8.0
"""Of a node's link, as in the profile h100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One way, compiled as one rank."""

    call: Any
    inputs: Sequence[str]
    """Names of parameters, "" for the tokens."""
    device: SharedDevice

    @property
    def has_rank(self) -> bool:
        """Whether passes wrote the rank into the code, so that it runs on that rank alone."""
        regions = [one for compilation in self.device.compilations for one in compilation.regions]
        return any(
            one.dispatch == "all_gather" or one.chunk_edges == "load" or one.nodes != "off"
            for one in regions
        )


class RacedLayer:
    """One layer in all its settings."""

    def __init__(self, case: Case, topology: Topology) -> None:
        """Make the layer of each rank."""
        self.case, self.topology = case, topology
        self.threads = RankThreads(topology)
        self._subjects: list[Subject] = []
        for rank in range(case.num_ranks):
            as_rank(rank, topology)
            self._subjects.append(OneLayer(case, dist.group.WORLD).of(None))
        self._programs: dict[str, list[Program]] = {}
        self._expected: list[Values] = []

    def profile_of(self, raced: Raced) -> HardwareProfile:
        """Return what megamoe is told of the device and the link, on which the layer as written
        takes as long for its exchanges, between nodes, as for compute over the ratio."""
        device = replace(emulated_devices()[raced.device], host=NO_HOST)
        programs = self.compiled({}, AS_ASKED, device)
        _, _, compute_s = self.timed(programs, NO_LINK, as_estimated)
        nbytes = self.threads.ranks[0].wire.traffic.wire_bytes
        link = nbytes * ratio_of(raced.ratio) / compute_s / 1e9
        return replace(device, link_gb_per_s=link, node=_node_link(self.case, link))

    def candidates(self, config: MegaMoEConfig) -> dict[str, Any]:
        """Return what the planner ranks."""
        free = over(config, freed(config))
        programs = self.compiled(free, config, load_profile(config.hardware))
        return found_in(_report(programs[0]))

    def found(self, raced: Raced, config: MegaMoEConfig, options: Options) -> Found:
        """Return what is predicted of a way, and what its step takes."""
        hardware, drawn = load_profile(config.hardware), DrawnErrors(raced.name)
        if not self._expected:
            as_written = self.compiled({}, config, hardware)
            self._expected = self.timed(as_written, NO_LINK, as_estimated)[1]
        programs = self.compiled(options, config, hardware)
        rate = drawn.link(rate_of(hardware))
        passes, values, seconds = self.timed(programs, rate, drawn.price)
        error = max(map(relative_error, values, self._expected))
        is_packed = any("fp8" in str(v) for v in options.values()) or "auto" in options.values()
        if not error <= (MAX_ERROR_FP8 if is_packed else MAX_ERROR):
            raise RuntimeError(f"{raced.name}, {form_of(options).name}: off by {error}")
        return {
            "us": max(predicted_us({"passes": one}) for one in passes),
            "plan": plan_of(_report(programs[0])),
            "seconds": seconds,
            "error": error,
        }

    def compiled(
        self, options: Options, config: MegaMoEConfig, hardware: HardwareProfile
    ) -> list[Program]:
        """Return a way compiled for all ranks; once, where the profile decides nothing."""
        key = form_of(options).name + (config.hardware if "auto" in options.values() else "")
        if key not in self._programs:
            asked, (first, *others) = replace(config, **options), range(self.case.num_ranks)
            programs = [self._compile(asked, first)]
            if programs[0].has_rank:
                programs += [self._compile(asked, rank) for rank in others]
            self._programs[key] = programs
        for program in self._programs[key]:
            program.device.hardware = hardware
        return self._programs[key]

    def timed(
        self, programs: Sequence[Program], rate: LinkRate, price: Price
    ) -> tuple[list[list[dict[str, Any]]], list[Values], float]:
        """Return what the passes of each program report, the values of each rank, and seconds."""
        passes = []
        for rank, program in enumerate(programs):
            as_rank(rank, self.topology)  # whose groups have the names in the program
            passes.append(program.device.schedule())
            program.device.price = price
        return passes, *self.threads.timed(lambda rank: self._step(programs, rank), rate)

    def _compile(self, config: MegaMoEConfig, rank: int) -> Program:
        spans = as_rank(rank, self.topology)
        subject, found = self._subjects[rank], list[Program]()
        device = SharedDevice(
            config=config, clock=ChargedClock(), hardware=load_profile("cpu"), spans=spans
        )
        names = {id(p): name for name, p in subject.module.named_parameters()}

        def stop(*_: Any) -> Any:
            raise CapturedError

        def keep(gm: Any, inputs: Sequence[Any]) -> Any:
            order = [names.get(id(one), "") for one in inputs]
            if order.count("") != 1:
                raise RuntimeError(f"inputs of the layer are {order}")
            call = device(gm, inputs)
            found.append(Program(call=call, inputs=order, device=device))
            return stop

        torch._dynamo.reset()
        scalars = torch._dynamo.config.patch(capture_scalar_outputs=True)
        whole = functorch_config.patch(force_non_lazy_backward_lowering=True)
        with scalars, whole, suppress(CapturedError):
            torch.compile(subject.module, backend=keep, fullgraph=True)(subject.tokens)
        return found[0]

    def _step(self, programs: Sequence[Program], rank: int) -> Values:
        """Make one step of a rank, forward and backward."""
        program = programs[rank % len(programs)]  # one for all, or one each
        subject = self._subjects[rank]
        given = {"": subject.tokens, **dict(subject.module.named_parameters())}
        inputs = [given[name] for name in program.inputs]
        RUNNING.rank = self.threads.ranks[rank]
        (out,) = program.call(*inputs)
        tokens, *weights = torch.autograd.grad(out, [*given.values()], subject.grad)
        return Values(out.detach(), tokens, tuple(weights))


def _report(program: Program) -> Mapping[str, Any]:
    return report_of(program.device.compilations, [], hardware="")


def rate_of(hardware: HardwareProfile) -> LinkRate:
    """Return the link that a profile states."""
    rate = LinkRate(
        latency_s=hardware.link_latency_us * 1e-6, bytes_per_s=hardware.link_gb_per_s * 1e9
    )
    if (node := hardware.node) is None:
        return rate
    inside = {"inside_latency_s": node.latency_us * 1e-6, "inside_bytes_per_s": node.gb_per_s * 1e9}
    return replace(rate, **inside)


def _node_link(case: Case, between_gb_per_s: float) -> Link | None:
    if not isinstance(case, NodesCase):
        return None
    return Link(
        num_ranks=case.num_local,
        gb_per_s=between_gb_per_s * case.inside_speed,
        latency_us=INSIDE_LATENCY_US,
        origins=dict.fromkeys(NUMBERS, emulated_link_origin()),
    )


def told(raced: Raced, profile: HardwareProfile, folder: Path) -> MegaMoEConfig:
    """Return the job's options in a setting, the profile in a file of `folder`."""
    path = folder / f"{raced.name.replace(':', '-')}.toml"
    origins = {**profile.origins, "link_gb_per_s": emulated_link_origin()}
    write_profile(replace(profile, origins=origins), path)
    return replace(AS_ASKED, hardware=str(path))
