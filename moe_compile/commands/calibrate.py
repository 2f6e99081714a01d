"""`megamoe calibrate`: measure the rates of one device and write them as a profile.

Contract
    Values that one device cannot show (links, capacities, peaks) stay as in the profile started
    from, with their origin; its fits are left out. The written profile loads.
"""

from __future__ import annotations

import argparse
import importlib
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.detect import NO_GPU, detected_profile
from moe_compile.hardware.profile import load_profile, read_profile
from moe_compile.hardware.sourced_file import dump_sourced, put_number
from moe_compile.simulator.cluster_tables import new_console
from torchtitan_integration.job_folder import why_not_written

LINKS: Final = (
    "One device alone cannot measure links: `megamoe check` of a job measures the links between "
    "its ranks too, and writes FOLDER/measured.toml."
)
DEVICES: Final = ("auto", "cuda", "cpu")


def add_calibrate(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this device and write its hardware profile",
        description="Run small kernels on one device for a minute at most and write a profile with "
        "the rates measured; links and peak rates are copied from the profile that --start "
        f"names. {LINKS}",
        allow_abbrev=False,
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="TOML file to write")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="device to measure")
    parser.add_argument("--start", metavar="PROFILE", help="profile to start from; default: detect")
    parser.set_defaults(run=calibrate)


def calibrate(known: argparse.Namespace) -> int:
    """Measure and write; return the exit status. Raises InvalidConfig."""
    torch: Any = importlib.import_module("torch")
    has_gpu = torch.cuda.is_available()
    device = ("cuda" if has_gpu else "cpu") if known.device == "auto" else known.device
    if device == "cuda" and not has_gpu:
        raise InvalidConfig("--device is cuda, but torch sees no CUDA device; write --device cpu")
    if known.out.suffix != ".toml":
        raise InvalidConfig(
            f"{known.out}: the profile must be a TOML file; write a name that ends in .toml"
        )
    if known.out.exists():
        raise InvalidConfig(f"{known.out} exists already; write another name, or remove the file")
    if why := why_not_written(known.out):
        raise InvalidConfig(f"{known.out} cannot be written: {why}")
    start = known.start or (detected_profile() if device == "cuda" else NO_GPU)
    table = tomllib.loads(read_profile(start).path.read_text())
    if device == "cpu" and "compute" in table:
        raise InvalidConfig(
            f"--start is {start}, but the rates that are measured here are those of a CPU: leave "
            "--start out, or write --start cpu"
        )
    table.pop("fit", None)  # fitted on other efficiencies
    measure: Any = importlib.import_module("moe_compile.hardware.measure")
    chip = measure.device_name(device)
    day = datetime.now(UTC).date()
    origin = f"measured: {day} on {chip}, torch {torch.__version__}, median of {measure.REPEATS}"
    table["name"] = known.out.stem
    for path, value in measure.measured_rates(device, table).items():
        put_number(table, path, value, origin)
    known.out.parent.mkdir(parents=True, exist_ok=True)
    known.out.write_text(dump_sourced(table))
    load_profile(str(known.out))
    new_console().print(
        f"{known.out}: measured on {chip}, links copied from profile {start}. {LINKS}"
    )
    return 0
