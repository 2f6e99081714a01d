"""`megamoe simulate`: predicted steps on clusters, beside published ones, and as timelines.

One layer under each way to divide it, nothing overlapped: MegaScale-MoE figure 14.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import load_cluster
from moe_compile.simulator import checks, setups
from moe_compile.simulator import cluster_tables as tables
from moe_compile.simulator.checks import FIGURE_14_GAINS, RATIO, Check, Row
from moe_compile.simulator.cluster_timeline import LEGEND, layer_trace
from moe_compile.simulator.explain import explain_speedup, find_bounds, predict_own_part
from moe_compile.simulator.layer_tasks import time_layer
from moe_compile.simulator.method import AttentionSharding, ExpertSharding, Method, Products
from moe_compile.simulator.models import MODELS, TABLE_2, ModelShape
from moe_compile.simulator.parts_table import find_part_shares
from moe_compile.simulator.scenario import (
    DEFAULT_FIT,
    default_fit,
    is_own,
    make_setting,
    predict,
    schedules,
)
from moe_compile.simulator.step import Setting
from torchtitan_integration.job_folder import why_not_written

TABLES: Final = ("megascale", "waterfall", "bounds", "parts")
OURS: Final[Sequence[str]] = ("2 chunks of experts", "2 chunks of tokens")
"""megamoe's own schedule: of experts where a rank has more than one."""
OURS_BETWEEN: Final[Sequence[str]] = (
    "flat: 2 chunks",
    "exact: 2 chunks",
    "rounded: 2 chunks",
    "rounded: 2 parts",
)
"""megamoe's own schedule where rows cross nodes."""
DRAWN: Final = ("flat: sequential", "sequential", "inter-op", "two-batches", "ideal")
"""Other schedules of a timeline by default."""
GPUS: Final = (240, 480, 720, 960, 1440)
SETTINGS: Final = (
    ("batch", "global_batch", "sequences per step"),
    ("seq-len", "seq_len", "tokens of a sequence"),
    ("pipeline", "pipeline", "pipeline stages"),
    ("virtual-stages", "virtual_stages", "chunks of layers per pipeline stage"),
    ("ranks", "ranks", "GPUs that share a layer's attention"),
    ("expert-ranks", "expert_ranks", "GPUs that share a layer's experts"),
)
"""Flag, field of the method or the job, help."""


def add_simulate(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "simulate",
        help="predict training steps on a cluster",
        description="Predict by formulas how long a training step of a mixture-of-experts model "
        "takes on a cluster, for every schedule; or print a table. If experts are on several "
        "nodes, schedules of megamoe come first: flat, exact and rounded (values of its option "
        "nodes), in chunks of experts, slices of tokens or parts of the batch. The other "
        "schedules send a row once to each node, over both links at once. This command needs no "
        "GPU and no torch.",
        epilog="Settings that you leave out are those of the model's published run.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="352b", help=f"one of {', '.join(MODELS)}")
    parser.add_argument("--cluster", default="h800", help="a GPU's profile or a TOML path")
    parser.add_argument("--gpus", type=_numbers, help="for instance 240,480,720")
    for flag, _, text in SETTINGS:
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--wire",
        choices=("bf16", "fp8"),
        help="number format in which rows travel to experts and back",
    )
    parser.add_argument(
        "--products",
        choices=tuple(one.value for one in Products),
        help="number format of matrix products but those of gradients of weights: fp8 is that of "
        "experts' products by expert_compute, with the time to quantise; fp8-free the same if "
        "quantising took no time; fp8-all also that of all other products, quantised in no time",
    )
    parser.add_argument(
        "--schedule",
        type=_words,
        default=(),
        help="schedules to print, by the names that are printed, separated by commas",
    )
    parser.add_argument(
        "--fit", help='name of the fitted constants of the profile to use, or "none"'
    )
    parser.add_argument("--table", choices=TABLES, help="print this table instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="PATH",
        help="write one layer's timelines: .png a picture, .json a trace for Perfetto",
    )
    parser.set_defaults(run=simulate)


def simulate(known: argparse.Namespace) -> int:
    """Run the subcommand; return the exit status. Raises InvalidConfig."""
    data = _table(known) if known.table else _predictions(known)
    if known.json:
        print(json.dumps(data, indent=1))  # noqa: T201  (what was asked for)
    return 0


def _console(known: argparse.Namespace) -> Console:
    """Return the console for tables, which prints nothing if JSON is printed."""
    return Console(quiet=True) if known.json else tables.new_console()


def _predictions(known: argparse.Namespace) -> dict[str, Any]:
    setting = _setting(known)
    sizes = known.gpus or ((setting.job.gpus,) if known.model != "352b" else GPUS)
    rows = [
        predict(name, replace(changed, job=replace(changed.job, gpus=gpus)))
        for gpus in sizes
        for name, changed in schedules(setting, known.schedule).items()
    ]
    if known.timeline:
        written = _write_timeline(known, setting)
        _console(known).print(f"{known.timeline}: one layer under {', '.join(written)}.")
        _console(known).print(f"{LEGEND}")
    fit = {k: v for k, v in asdict(setting.fit).items() if v != 1.0}
    said = ", ".join(f"{k} {v}" for k, v in fit.items())
    job, name = setting.job, known.fit or default_fit(known.model, setting.profile)
    fitted = f"fit {name}: {said}" if said else "no fit"
    title = (
        f"{setting.model.name} on {setting.profile.name}: batch {job.global_batch}, sequence "
        f"{job.seq_len}, pipeline {job.pipeline} x {job.virtual_stages}; {fitted}"
    )
    tables.print_predictions(rows, title, _console(known))
    if rate := _eight_bit_rate(setting):
        tables.print_eight_bit_rate(rate, setting.method.products, _console(known))
    return {
        "model": setting.model.name,
        "cluster": setting.profile.name,
        "fit": name,
        "factors": asdict(setting.fit),
        "contention": setting.costs.link.contention,
        "overlap_slowdown": setting.costs.link.overlap_slowdown,
        "job": asdict(job),
        "products": setting.method.products.value,
        "eight_bit_rate": rate,
        "rows": tables.as_data(rows),
    }


def _eight_bit_rate(setting: Setting) -> dict[str, Any] | None:
    """Return the rate of products in fp8 with the origins of its factors; None without them."""
    if setting.method.products is Products.BF16:
        return None
    compute, factors = setting.profile.compute, ("fp8_tflops", "fp8_gemm_share")
    return {
        "tflops": compute.large_tflops * compute.eight_bit_share,
        "bf16_tflops": compute.large_tflops,
        **{name: getattr(compute, name) for name in factors},
        "origins": {name: compute.origins[name] for name in factors},
    }


def _table(known: argparse.Namespace) -> dict[str, Any]:
    if known.timeline:
        raise InvalidConfig(
            "--timeline draws the step of one model, and --table prints tables without one; "
            "leave out --timeline or --table"
        )
    if known.table != "megascale":
        kinds = {"waterfall": _waterfall, "bounds": _bounds, "parts": _part_shares}
        return kinds[known.table](known)
    main = [checks.check_table_3(), checks.check_table_5()]
    others = [
        checks.check_speedups(),
        checks.check_weak_scaling(),
        check_layouts(),
        checks.check_eos(),
        checks.check_deepseek(),
    ]
    ranked = checks.rank_deepseek()
    console = _console(known)
    tables.print_checks([*main, *others], console)
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in ranked.items())
    console.print(
        "Predictions for DeepSeek-V3 without fitted constants, in tokens per second and GPU: "
        f"{rates}."
    )
    data = tables.checks_as_data([*main, *others], main)
    return {**data, "deepseek_v3_tokens_per_gpu_s": ranked}


def _waterfall(known: argparse.Namespace) -> dict[str, Any]:
    data = {}
    for gpus in known.gpus or GPUS[-1:]:
        changes, own = explain_speedup(gpus), predict_own_part(gpus)
        tables.print_changes(changes, own, gpus, _console(known))
        data[str(gpus)] = tables.as_data([*changes, own])
    return data


def _bounds(known: argparse.Namespace) -> dict[str, Any]:
    profile = load_cluster(known.cluster)
    fit = known.fit or DEFAULT_FIT.get(profile.name, "none")
    bounds = find_bounds(profile, profile.fit(fit))
    tables.print_bounds(bounds, f"Bounds on {profile.name}, fit {fit}", _console(known))
    return {"cluster": profile.name, "fit": fit, "rows": tables.as_data(bounds)}


def _part_shares(known: argparse.Namespace) -> dict[str, Any]:
    rows = find_part_shares(known.cluster, known.fit)
    tables.print_part_shares(rows, known.cluster, _console(known))
    return {"cluster": known.cluster, "fit": known.fit, "rows": tables.as_data(rows)}


def _setting(known: argparse.Namespace) -> Setting:
    changes: dict[str, Any] = {
        field: getattr(known, flag.replace("-", "_")) for flag, field, _ in SETTINGS
    }
    if known.wire:
        nbytes = 1.0 if known.wire == "fp8" else 2.0
        changes |= {"dispatch_bytes": nbytes, "combine_bytes": nbytes}
    if known.products:
        changes["products"] = Products(known.products)
    return make_setting(known.model, known.cluster, fit=known.fit, changes=changes)


def _write_timeline(known: argparse.Namespace, setting: Setting) -> list[str]:
    """Write the file; return the names of the schedules in it."""
    found = schedules(setting)
    own = [name for name in OURS_BETWEEN if name in found]
    own = own or [name for name in OURS if name in found][:1]
    first, *others = (name for name in DRAWN if name in found)
    names = known.schedule or [first, *own, *others]
    layers = {
        f"{name} (megamoe)" if is_own(found[name]) else name: time_layer(found[name].costs)
        for name in names
    }
    path: Path = known.timeline
    if why := why_not_written(path):
        raise InvalidConfig(f"--timeline {path} cannot be written: {why}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(layer_trace(layers)))
    elif path.suffix == ".png":
        _picture().draw_timelines(layers, f"{setting.model.name} on {setting.profile.name}", path)
    else:
        raise InvalidConfig(f"--timeline {path}: write a name that ends in .png or .json")
    return list(layers)


def _picture() -> Any:
    """Import the module that draws: matplotlib is not installed with megamoe."""
    try:
        return importlib.import_module("moe_compile.simulator.cluster_picture")
    except ModuleNotFoundError:
        raise InvalidConfig(
            "--timeline with a .png picture needs matplotlib: pip install matplotlib, or name a "
            ".json trace"
        ) from None


def _numbers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdigit() and int(word) for word in words):
        raise argparse.ArgumentTypeError(
            f"--gpus is {text!r}; write numbers of GPUs with commas between, for example 240,480"
        )
    return tuple(int(word) for word in words)


def _words(text: str) -> Sequence[str]:
    return tuple(word.strip() for word in text.split(","))


LAYOUTS: Final[Mapping[str, Method]] = {
    "TP + TP": Method(attention=AttentionSharding.HEADS, experts=ExpertSharding.SLICES),
    "TP + EP": Method(attention=AttentionSharding.HEADS),
    "SP + TP": Method(experts=ExpertSharding.SLICES),
    "SP + EP": Method(),
}
"""Attention, then experts: tensor (TP), sequence (SP), expert parallelism (EP)."""


def layout_gains(model: ModelShape) -> dict[str, float]:
    """Return the time of a layer under TP + TP over its time under each layout.

    Rows go to experts by all-to-all or all-gather, whichever is faster.
    """
    profile = setups.shipped("h800")
    times = {}
    for name, method in LAYOUTS.items():
        ways = (method, replace(method, gathers_rows=True))
        settings = (
            Setting(
                model=model,
                profile=profile,
                fit=profile.fit("bytedance"),
                method=way,
                job=setups.MEGASCALE_JOB,
            )
            for way in ways
        )
        times[name] = min(time_layer(setting.costs).total_us for setting in settings)
    return {name: times["TP + TP"] / us for name, us in times.items()}


def check_layouts() -> Check:
    """Return the least and the greatest gain of SP + EP over six models."""
    gains = sorted((layout_gains(model)["SP + EP"], model.name) for model in TABLE_2)
    return Check(
        title="SP + EP over TP + TP on 8 H800, nothing overlapped",
        source="MegaScale-MoE (arXiv 2505.11432) figure 14",
        constants="h800, fit bytedance",
        rows=tuple(
            Row(label=f"{label} of six models ({name})", unit=RATIO, published=gain, predicted=ours)
            for label, gain, (ours, name) in zip(
                ("least", "greatest"), FIGURE_14_GAINS, (gains[0], gains[-1]), strict=True
            )
        ),
    )
