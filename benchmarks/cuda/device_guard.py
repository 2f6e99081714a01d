"""Build and load CUDA hooks for a device that is not there, on any build of torch.

Contract
    `load_guard` is called before torch is imported, and `store_guard` after: a CUDA build of torch
    puts a guard of its own in its place.
    Needs g++ and torch's headers; the library is kept in the temporary folder, by a hash of
    torch's place and version and of the source: it is bound to the libraries at that place.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_suffix(".cpp")


def missing() -> str:
    """Return what this machine lacks to generate CUDA code, "" if nothing."""
    if shutil.which("g++") is None:
        return "g++ is not installed"
    if find_spec("triton") is None:
        return "triton is not installed"
    return ""


def load_guard() -> None:
    """Give this process, which has not imported torch yet, a CUDA device that does nothing."""
    if "torch" in sys.modules:
        raise RuntimeError("load_guard() comes before torch is imported")
    ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL)


def store_guard() -> None:
    """Put the guard that `load_guard` loaded in the place of torch's own."""
    ctypes.CDLL(str(_library())).megamoe_store_guard()


def name_of_library(torch: Path) -> str:
    """Return the name of the library for the torch in this folder."""
    key = str(torch) + (torch / "version.py").read_text() + SOURCE.read_text()
    return f"megamoe_guard_{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _library() -> Path:
    found = find_spec("torch")
    assert found is not None and found.submodule_search_locations is not None
    torch = Path(found.submodule_search_locations[0])
    name = name_of_library(torch)
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / name
            command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCE)]
            command += [f"-I{torch}/include", f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
            subprocess.run([*command, f"-Wl,-rpath,{torch}/lib", "-o", str(built)], check=True)
            built.replace(library)  # another process may build it too
    return library
