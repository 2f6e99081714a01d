"""The command line; its subcommands are in moe_compile/commands.

Contract
    An error that the user can correct is printed in one line, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import sys

from moe_compile.commands.bisect import add_bisect, bisect, split_command
from moe_compile.commands.calibrate import add_calibrate
from moe_compile.commands.check import add_check, check
from moe_compile.commands.doctor import add_doctor
from moe_compile.commands.options import add_options
from moe_compile.commands.simulate import add_simulate
from moe_compile.commands.train import add_train, train
from moe_compile.errors import InvalidConfig
from moe_compile.source_hash import installed_version


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = _parser()
    words, command = split_command(sys.argv[1:] if arguments is None else arguments)
    known, overrides = parser.parse_known_args(words)
    try:
        if known.command is None:
            parser.print_help()
            return 0
        if known.command == "train":
            return train(known, overrides)
        if known.command == "check":
            return check(known, overrides)
        if known.command == "bisect":
            return bisect(known, overrides, command)
        if overrides:
            parser.error(f"megamoe {known.command} has no {overrides[0]!r}")
        return int(known.run(known))
    except InvalidConfig as error:
        print(f"megamoe: {error}", file=sys.stderr)  # noqa: T201  (the user's terminal)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megamoe", description="Train mixture-of-experts models with hidden communication."
    )
    parser.add_argument("--version", action="version", version=f"megamoe {installed_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_train(commands)
    add_check(commands)
    add_bisect(commands)
    add_simulate(commands)
    add_doctor(commands)
    add_calibrate(commands)
    add_options(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
