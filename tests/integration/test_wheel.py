"""What is built from the sources and installed elsewhere runs a recipe."""

import os
import shutil
import subprocess
import sys

import pytest

from moe_compile.hardware import PROFILES
from tests.integration.titan_jobs import CONFIG, ROOT

PACKAGES = ("moe_compile", "passes", "torchtitan_integration")
PIP = [sys.executable, "-m", "pip", "--quiet"]


@pytest.fixture
def installed(tmp_path):
    """Return a folder with the wheel's packages, built from a copy: setuptools leaves files."""
    copy, site = tmp_path / "copy", tmp_path / "site"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "megamoe.py"):
        shutil.copy(ROOT / name, copy)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    install = [*PIP, "install", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True, timeout=600)
    shutil.rmtree(copy)
    return site


@pytest.mark.slow
def test_an_installed_wheel_runs_a_recipe_of_its_own(installed, tmp_path):
    profiles = installed / "moe_compile/hardware/profiles"
    assert {p.name for p in profiles.iterdir()} >= {p.name for p in PROFILES.glob("*.toml")}
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    recipe = installed / CONFIG.relative_to(ROOT)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
        )  # fmt: skip

    modules = run("-c", "import moe_compile, passes; print(moe_compile.__file__, passes.__file__)")
    assert modules.stdout.split() == [str(installed / n / "__init__.py") for n in PACKAGES[:2]]
    alias = run("-c", "import megamoe; print(megamoe.__file__, megamoe.explain.__module__)")
    assert alias.stdout.split() == [str(installed / "megamoe.py"), "moe_compile"]
    job = run("-m", "moe_compile.cli", "train", str(recipe), "--training.steps=2")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "step:  2" in job.stdout
    assert '"all_to_all_single' in (tmp_path / "outputs/report.html").read_text()
