"""`python -m moe_compile.check.script_rank SECTION ...`: one rank of a script's step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moe_compile.check.job_sections import leave, run_rank
from moe_compile.check.script import ScriptSteps, steps_of
from moe_compile.torch_quirks.python311_frames import with_frame_space


@with_frame_space
def main() -> int:
    """Be one rank of the section named on the command line."""
    return run_rank("the script's step", _steps)


def _steps(words: list[str], asked: argparse.Namespace) -> ScriptSteps:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--function", required=True)
    parser.add_argument("--flags", type=json.loads, default={})
    script = parser.parse_args(words)
    return steps_of(script.script, script.function, asked.device, script.flags)


if __name__ == "__main__":
    leave(main())
