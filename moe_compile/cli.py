"""The command line: `megamoe train CONFIG.toml` trains by torchtitan with our recipe.

Contract
    What can be wrong with the file is said before a process starts: file, key, nearest name.
    The exit status is torchrun's; an interrupt ends every process that was started.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

from moe_compile.config import OPTION_NAMES, TABLE_ONLY, check_name, from_sources
from moe_compile.errors import InvalidConfig
from moe_compile.report.explain import print_report

DEGREES: Final = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
)
"""Keys of [parallelism] whose product is the number of ranks; EP borrows from them."""
GRACE_S: Final = 10.0
"""How long ranks may take to end after an interrupt before they are killed."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="megamoe", description="Train mixture-of-experts models with hidden communication."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train by torchtitan from a TOML file",
        description="Check a torchtitan TOML file and train by it on this machine, one process "
        "per rank. Whatever follows the file goes to torchtitan: --section.key value.",
    )
    train.add_argument("config", type=Path, help="torchtitan 0.2.2 job configuration, TOML")
    train.add_argument(
        "--nproc", type=int, help="ranks to start; default: the product of the TOML's degrees"
    )
    known, overrides = parser.parse_known_args(arguments)
    try:
        return _train(known.config, known.nproc, overrides)
    except InvalidConfig as error:
        print(f"megamoe: {error}", file=sys.stderr)  # noqa: T201  (the user's terminal)
        return 2


def _train(config: Path, nproc: int | None, overrides: list[str]) -> int:
    job = load_job(config)
    if importlib.util.find_spec("torchtitan") is None:
        raise InvalidConfig(
            "torchtitan is not installed; pip install 'megamoe[titan]' brings the version wanted"
        )
    ranks = nproc or num_ranks(job, overrides, config)
    status = _run(_command(config, ranks, overrides))
    _print_report(job, overrides)
    return status


def load_job(config: Path) -> dict[str, Any]:
    """Return the TOML file's content after checking its `[megamoe]` table.

    Raises InvalidConfig that names the file and the key.
    """
    try:
        job = tomllib.loads(config.read_text())
    except OSError as error:
        raise InvalidConfig(f"{config}: {error.strerror or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{config} is not TOML: {error}") from None
    table = job.get("megamoe", {})
    if not isinstance(table, dict):
        raise InvalidConfig(f"{config}: megamoe must be a table, [megamoe]")
    for name in table:
        check_name(name, where=f"{config} [megamoe]", known=(*OPTION_NAMES, *TABLE_ONLY))
    try:
        from_sources(table=table, environment=os.environ)
    except InvalidConfig as error:
        raise InvalidConfig(f"{config}: {error}") from None
    return job


def num_ranks(job: dict[str, Any], overrides: list[str], config: Path) -> int:
    """Return the number of ranks the job's degrees multiply to.

    Raises InvalidConfig when a degree is left to torchtitan (-1).
    """
    degrees = {**dict.fromkeys(DEGREES, 1), "data_parallel_shard_degree": -1}
    degrees.update({k: v for k, v in job.get("parallelism", {}).items() if k in degrees})
    for name in DEGREES:
        if (value := _override(overrides, f"parallelism.{name}")) is not None:
            degrees[name] = int(value)
    if unknown := [name for name, value in degrees.items() if value < 1]:
        raise InvalidConfig(
            f"{config}: parallelism.{unknown[0]} is -1 (all ranks); say how many with --nproc N"
        )
    return math.prod(degrees.values())


def _override(overrides: list[str], key: str) -> str | None:
    """Return the value `--key value` or `--key=value` gives, the last one winning."""
    found = None
    for i, word in enumerate(overrides):
        name, equals, value = word.partition("=")
        if name in (f"--{key}", f"--{key}".replace("_", "-")):
            found = value if equals else (overrides[i + 1] if i + 1 < len(overrides) else None)
    return found


def _command(config: Path, ranks: int, overrides: list[str]) -> list[str]:
    has_gpu = Path("/dev/nvidia0").exists()
    module = "torchtitan.train" if has_gpu else "torchtitan_integration.cpu_launcher"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shown = ["--local-ranks-filter", "0", "--role", "rank", "--tee", "3"]
    job = ["-m", module, "--job.config_file", str(config), *overrides]
    return [*torchrun, "--nproc-per-node", str(ranks), *shown, *job]


def _run(command: list[str]) -> int:
    """Run `command`, its output on this terminal; end all its processes on an interrupt."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        _end(process)
        return 128 + signal.SIGINT


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group of `process`: ask, wait, then kill."""
    for how in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def _print_report(job: dict[str, Any], overrides: list[str]) -> None:
    name = _override(overrides, "megamoe.report") or job.get("megamoe", {}).get("report", "")
    path = Path(name)
    if name and path.is_file():
        print_report(json.loads(path.read_text()))
        print(f"megamoe: this report as JSON: {path}")  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
