"""Links of the documentation lead somewhere, and its snippets and commands run."""

import ast
import importlib.util
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import moe_compile
from moe_compile.cli import main, new_parser
from moe_compile.commands.bisect import split_command
from moe_compile.config import OPTION_NAMES
from moe_compile.journal.reasons import Reason
from tests.layers import GroupedExperts
from torchtitan_integration.job_checks import checked_ranks
from torchtitan_integration.job_file import JobFile, find_job, read_job, recipes

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
SNIPPET = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:megamoe|make|python -m) [^`]+)`")
RUN_ELSEWHERE = {
    "add-a-pass.md": "tests/architecture/test_add_a_pass.py",
    "add-a-style.md": "tests/passes/test_added_kind.py",
    "add-an-operator.md": "tests/dims/test_add_an_operator.py",
    "reasons.md": "tests/reason_programs.py",
}
"""Tests that run all Python of a page."""
NEEDS = re.compile(r"# .*\b(GPUs?|minutes?)\b")
"""Ends a command that is checked and not run: it says to its reader what it needs."""
OF_JOBS = ("train", "check", "bisect", "explain")
"""Subcommands that begin with the checks of a job."""
SHORT = ("simulate", "doctor", "options")
"""Subcommands that take seconds, and are run."""
JOB = {
    "model": {"name": "deepseek_v3", "flavor": "debug_cpu"},
    "training": {"dataset": "python_stdlib", "local_batch_size": 2, "seq_len": 512},
    "parallelism": {"data_parallel_shard_degree": 8, "expert_parallel_degree": 8},
}
"""A job as torchtitan takes it, to which docs/torchtitan.md adds."""


CHANGE_NO_VALUE = {
    "routing_skew", "blocks_per_graph", "node_ranks", "equal_tokens", "transport", "strict",
    "max_memory_increase", "step_peak_bytes", "hardware", "disable_passes", "report",
    "measure_waits", "offload_budget", "host_reads", "row_room",
}  # fmt: skip
"""Options that the table of docs/numerics.md has no row of."""


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str


def snippets(*languages):
    for page in PAGES:
        text = page.read_text()
        for found in SNIPPET.finditer(text):
            if found[1] in languages:
                yield Snippet(page, text.count("\n", 0, found.start(2)) + 1, found[1], found[2])


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_to_a_heading_of_it(page):
    for name, anchor in LINK.findall(page.read_text()):
        target = page.parent / name if name else page
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_no_snippet_is_of_a_kind_that_no_test_runs():
    fences = {
        fence for page in PAGES for fence in re.findall(r"^ *```(\w+)", page.read_text(), re.M)
    }
    assert fences == {"python", "toml", "sh", "diff", "text"}
    assert {one.page.name for one in snippets("diff")} == {"visible.md"}  # tests/test_visible.py
    assert {one.page.name for one in snippets("text")} == {"add-an-operator.md"}
    for page, test in RUN_ELSEWHERE.items():
        assert f'"{page}"' in (ROOT / test).read_text()


@pytest.fixture
def no_group_before_or_after():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


OF_16_RANKS = ("dispatch", "nodes")
"""Pages whose code is of so many."""
PYTHON = {
    page: [*blocks]
    for page, blocks in itertools.groupby(snippets("python"), lambda one: one.page)
    if page.name not in RUN_ELSEWHERE
}


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_from_its_top_to_its_end(
    no_group_before_or_after, page, tmp_path, monkeypatch
):
    """Names that a page leaves to its reader stand in its text; no other is missing."""
    monkeypatch.chdir(tmp_path)
    if "init_process_group" not in page.read_text():
        num_ranks = 16 if page.stem in OF_16_RANKS else 2  # a size for each takes time
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    layer = GroupedExperts(16, 24, 16, 2, dist.group.WORLD) if dist.is_initialized() else torch.relu
    given = {"model": layer, "inputs": (tokens(),)}
    names = {name: value for name, value in given.items() if f"`{name}`" in page.read_text()}
    for block in PYTHON[page]:
        if "torchrun" in block.text:
            continue  # the example of the README, below
        path = tmp_path / f"{page.stem}_{block.line}.py"
        path.write_text(block.text)  # Dynamo reads sources
        exec(compile(block.text, path, "exec"), names)
        for options in options_of(block.text):
            report = moe_compile.explain(layer, tokens(), **options).report
            assert [one["is_found"] for one in report["exchanges"]] == [True]
    if page.stem in FUNCTIONS:
        FUNCTIONS[page.stem](names)


def tokens():
    return torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)


def gathers_tokens(names):
    def layer(x):
        scores, chosen = torch.softmax(x @ router, -1).topk(2)
        return names["gathering"](x, scores, chosen, (torch.relu, torch.tanh), 0, dist.group.WORLD)

    router = torch.randn(16, 32, dtype=torch.bfloat16)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        exchanges = moe_compile.explain(layer, tokens()).report["exchanges"]
    assert len(exchanges) == 2
    assert all(Reason.TOKENS_GATHERED.value in one["because"] for one in exchanges)


def sums_rows(names):
    rows, order, scores = torch.arange(12.0).view(6, 2), torch.randperm(6), torch.rand(3, 2)
    placed = torch.empty_like(rows)
    placed[order] = rows
    expected = (placed.view(3, 2, 2) * scores[..., None]).sum(1)
    torch.testing.assert_close(names["sums"](rows, order, scores), expected)


def compiles_blocks(names):
    """The dataclasses have what torchtitan 0.3's `ModelSpec` and configuration have of it."""
    block = torch.nn.ReLU()
    model = SimpleNamespace(layers={"0": block})
    compile_config = make_dataclass("Compile", ["enable"])(True)
    spec = make_dataclass("ModelSpec", ["parallelize_fn"])(
        lambda model, *, compile_config: None if compile_config.enable else model
    )
    spec = names["with_megamoe"](spec)
    assert spec.parallelize_fn(model, compile_config=compile_config) is model
    assert "forward" in vars(block) and compile_config.enable


FUNCTIONS = {"dispatch": gathers_tokens, "wire": sums_rows, "torchtitan": compiles_blocks}
"""Calls of the functions that a page defines."""


def options_of(text):
    """Yield the `options=` of every call in a snippet."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.keyword) and node.arg == "options":
            yield ast.literal_eval(node.value)


@pytest.mark.slow
def test_the_example_of_the_readme_runs_in_four_chunks_and_prints_what_the_page_says(tmp_path):
    (example,) = (one for one in snippets("python") if "torchrun" in one.text)
    (said,) = re.findall(r"It prints `([^`]+)`", example.page.read_text())
    script = tmp_path / "example.py"
    script.write_text(example.text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert said in run.stdout.splitlines()
    (region,) = json.loads((tmp_path / "report.json").read_text())["regions"]
    assert (region["verdict"], region["num_chunks"]) == ("chunked", 4)


PAGES_OF_JOBS = ("torchtitan", "waits", "no_reads")
"""Pages whose TOML is of jobs; the first one's first block is what the others add to."""


def test_the_toml_of_a_page_is_of_a_job_that_passes_every_check():
    """The first block of docs/torchtitan.md makes torchtitan's job one of ours, others add."""
    pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
    of_jobs = [one for one in snippets("toml") if one.page.stem in PAGES_OF_JOBS]
    of_jobs.sort(key=lambda one: PAGES_OF_JOBS.index(one.page.stem))
    tables = [tomllib.loads(one.text) for one in of_jobs]
    assert len(tables) > 4 and "compile" in tables[0]
    for table in tables:
        content = {}
        for part in (JOB, tables[0], table):
            for section, keys in part.items():
                content[section] = {**content.get(section, {}), **keys}
        job = JobFile(path=Path("job.toml"), content=content)
        assert checked_ranks(job, None, is_run=True) >= 1


def test_the_other_toml_is_that_of_the_package_which_its_page_shows():
    tables = [
        tomllib.loads(one.text) for one in snippets("toml") if one.page.stem not in PAGES_OF_JOBS
    ]
    shown = tomllib.loads((ROOT / "tests/extension/hoist_all_reduce/pyproject.toml").read_text())
    (table,) = tables
    (group,) = table["project"]["entry-points"]
    assert table["project"]["entry-points"][group] == shown["project"]["entry-points"][group]


def test_the_table_of_numerics_has_every_option_that_may_change_values():
    text = (ROOT / "docs" / "numerics.md").read_text()
    table = text.partition("## Which option may change what")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    named = {name for cell in first for name in re.findall(r"`(\w+)", cell)}
    assert named | CHANGE_NO_VALUE == set(OPTION_NAMES)
    assert named & CHANGE_NO_VALUE == set()


def in_text():
    """Return the commands in the text of all pages; words in capitals are the reader's."""
    found = {found for page in PAGES for found in INLINE.findall(page.read_text())}
    return sorted(found)


def in_snippets():
    return [
        (line, not NEEDS.search(line)) for one in snippets("sh") for line in one.text.splitlines()
    ]


@pytest.mark.parametrize(("line", "is_run"), in_snippets())
def test_a_command_of_a_snippet_runs(line, is_run, tmp_path, monkeypatch, capsys):
    """Of a job all is done that comes before a process starts; tests/integration has the rest."""
    words = shlex.split(line, comments=True)
    assert_is_a_command(words)
    if words[0] == "megamoe" and words[1] in OF_JOBS:
        pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")
        known, overrides = new_parser().parse_known_args(split_command(words[1:])[0])
        if known.config in recipes():  # another is the reader's
            job = read_job(find_job(known.config), overrides)
            assert checked_ranks(job, None, is_run=False) >= 1
    elif words[0] == "megamoe" and is_run:
        monkeypatch.chdir(tmp_path)
        assert words[1] in SHORT and main(words[1:]) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("line", in_text())
def test_a_command_in_the_text_has_a_target_a_module_or_flags_that_are_there(line):
    assert_is_a_command(shlex.split(line))


def assert_is_a_command(words):
    """A command may follow variables that it is given; torchrun starts a module of ours."""
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "torchrun":
        words = ["megamoe", *words[words.index("moe_compile.cli") + 1 :]]
    if words[0] == "make":
        subprocess.run(["make", "-n", words[1]], cwd=ROOT, check=True, capture_output=True)
    elif words[0] == "python":
        knows = importlib.util.find_spec(words[2])
        assert knows is not None, words[2]
        folders = (Path(knows.origin).parent, ROOT / "moe_compile" / "check")  # flags they share
        text = "".join(path.read_text() for one in folders for path in one.glob("*.py"))
        assert [flag for flag in flags(words) if f'"{flag}"' not in text] == []
    else:
        assert words[0] == "megamoe"
        (commands,) = (a for a in new_parser()._actions if a.choices)
        theirs = commands.choices[words[1]]._option_string_actions
        ours = [flag for flag in flags(words) if "." not in flag]  # others are keys of a job
        assert [flag for flag in ours if flag not in theirs] == []


def flags(words):
    ours = itertools.takewhile(lambda word: word != "--", words)
    return [word.partition("=")[0] for word in ours if word.startswith("--")]
