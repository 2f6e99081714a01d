"""One rank of `megamoe train`: runs a module as `python -m` does, and ends with torchrun."""

from __future__ import annotations

import runpy
import sys

from moe_compile.check.parent import end_with_parent


def main() -> None:
    """Run the module that the first argument names with the others."""
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
