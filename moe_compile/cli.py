"""The command line; its subcommands are in moe_compile/commands.

Contract
    An error that the user can correct is printed in one line, and the exit status is 2.
    Where the reader of the output has gone, as `| head` has, it is that of SIGPIPE, silently.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Final

from moe_compile.commands.bisect import add_bisect, bisect, split_command
from moe_compile.commands.calibrate import add_calibrate
from moe_compile.commands.check import add_check, check
from moe_compile.commands.doctor import add_doctor
from moe_compile.commands.explain import add_explain, explain_report
from moe_compile.commands.options import add_options
from moe_compile.commands.simulate import add_simulate
from moe_compile.commands.train import add_train, train
from moe_compile.errors import InvalidConfig
from moe_compile.source_hash import installed_version

NO_READER: Final = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        status = _main(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes as it ends
        return NO_READER


def _main(arguments: list[str] | None) -> int:
    parser = new_parser()
    words, command = split_command(sys.argv[1:] if arguments is None else arguments)
    known, overrides = parser.parse_known_args(words)
    try:
        if known.command is None:
            parser.print_help()
            return 0
        if known.command == "explain" and known.config.endswith(".json"):
            return explain_report(known)
        if known.command in ("train", "explain"):
            return train(known, overrides)
        if known.command == "check":
            return check(known, overrides)
        if known.command == "bisect":
            return bisect(known, overrides, command)
        if overrides:
            known.own.error(f"this command has no argument {overrides[0]!r}")
        return int(known.run(known))
    except InvalidConfig as error:
        print(f"megamoe: {error}", file=sys.stderr)  # noqa: T201  (the user's terminal)
        return 2


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; flags of torchtitan are left over."""
    parser = argparse.ArgumentParser(
        prog="megamoe", description="Train mixture-of-experts models with hidden communication."
    )
    parser.add_argument("--version", action="version", version=f"megamoe {installed_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_train(commands)
    add_explain(commands)
    add_check(commands)
    add_bisect(commands)
    add_simulate(commands)
    add_doctor(commands)
    add_calibrate(commands)
    add_options(commands)
    for command in commands.choices.values():
        command.set_defaults(own=command)  # its error shows its usage
    return parser


if __name__ == "__main__":
    sys.exit(main())
