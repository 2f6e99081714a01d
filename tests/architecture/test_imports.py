"""Importing our packages needs nothing optional and loads little beyond torch."""

import subprocess
import sys

PROGRAM = """
import sys
import torch, torch._dynamo, torch._inductor.compile_fx, torch._dynamo.backends.common
import torch.distributed, functorch.compile

class Left:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "torchtitan", "hypothesis", "tyro"):
            raise ImportError(f"{name} is optional and must not be imported")

sys.meta_path.insert(0, Left())
before = set(sys.modules)
import moe_compile.backend
allowed = {"moe_compile", "passes", *sys.stdlib_module_names}
others = [name for name in set(sys.modules) - before if name.partition(".")[0] not in allowed]
assert not others, f"importing the backend loads {others}"
import passes.pipeline, torchtitan_integration, moe_compile.cli
from moe_compile.journal.reasons import Left
"""


def python(code):
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr


def test_importing_needs_no_optional_package_and_the_backend_nothing_that_a_compile_does_not():
    """This test once limited the seconds that the import takes, and failed on a slower machine.

    What costs seconds is other packages, and parts of torch that a compilation does not load
    anyway. torch itself imports triton where it is installed: so torch first, then the refusal.
    """
    python(PROGRAM)


def test_the_command_line_starts_without_torch():
    python("import moe_compile.cli, sys; assert 'torch' not in sys.modules")
