"""A distribution on the path, as far as entry points tell, without an installation."""

from moe_compile.entry_points import hash_of_packages
from passes.outside import find_transport
from passes.pipeline import outside_rewrites

REMEMBERED = (find_transport, hash_of_packages, outside_rewrites)


def add_distribution(folder, monkeypatch, entry_points):
    """Have one with these entry points until the test ends, and forget what was found before."""
    info = folder / "added-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(folder)
    forget()


def forget():
    for function in REMEMBERED:
        function.cache_clear()
