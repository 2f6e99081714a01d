"""Importing our packages needs nothing optional and costs little beyond torch."""

import subprocess
import sys
import time

import pytest

MODULES = ("moe_compile.backend", "passes.pipeline", "torchtitan_integration", "moe_compile.cli")
LIMIT_S = 0.3
"""What importing the backend may add to importing torch and what a compile loads anyway."""

OPTIONAL = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "torchtitan", "hypothesis", "tyro"):
            raise ImportError(f"{name} is optional and must not be imported")
sys.meta_path.insert(0, Refuse())
"""


def python(code):
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("module", MODULES)
def test_importing_needs_no_optional_package(module):
    # torch itself imports triton where it is installed: so torch first, then the refusal
    python(f"import torch._inductor.compile_fx, torch._dynamo\n{OPTIONAL}\nimport {module}")


def test_importing_the_backend_is_quick():
    code = (
        "import time, torch, torch._dynamo, torch._inductor.compile_fx\n"
        "import torch.distributed as d, torch._dynamo.backends.common, functorch.compile\n"
        "start = time.process_time(); import moe_compile.backend\n"
        "print(time.process_time() - start)"
    )
    assert min(float(python(code)) for _ in range(3)) < LIMIT_S


def test_the_command_line_starts_without_torch():
    start = time.perf_counter()
    python("import moe_compile.cli, sys; assert 'torch' not in sys.modules")
    assert time.perf_counter() - start < 30
