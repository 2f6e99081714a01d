"""Links of the documentation lead somewhere, and the README's example runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_to_a_heading_of_it(page):
    for name, anchor in LINK.findall(page.read_text()):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


@pytest.mark.slow
def test_the_example_of_the_readme_runs_in_four_chunks(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    (example,) = (block for block in blocks if "torchrun" in block)
    script = tmp_path / "example.py"
    script.write_text(example)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=600)
    (region,) = json.loads((tmp_path / "report.json").read_text())["regions"]
    assert (region["verdict"], region["num_chunks"]) == ("chunked", 4)
