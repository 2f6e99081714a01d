"""The sections of `docs/reasons.md`, and the run of their programs."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_graphs
from moe_compile.config import MegaMoEConfig
from passes.pipeline import DYNAMO
from tests.capture import dynamo_graphs

PAGE = Path(__file__).parents[1] / "docs" / "reasons.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID_BY = re.compile(r"`(\w+)`, by `(\w+)`(?: on `(\w+)`)?\.")
TEXT = PAGE.read_text()


@dataclass(frozen=True)
class Section:
    """What the page has on one reason."""

    name: str
    text: str
    kind: str
    pass_name: str
    option: str
    program: str
    """With empty lines before it, so that its lines have their numbers on the page."""


def blocks(first, last):
    """Return the programs between two places of the page, each at its line."""
    for found in BLOCK.finditer(TEXT, first, last):
        yield "\n" * TEXT.count("\n", 0, found.start(1)) + found[1]


def read_sections():
    heads = list(re.finditer(r"^(##|###) (.+)$", TEXT, re.MULTILINE))
    ends = [head.start() for head in heads[1:]] + [len(TEXT)]
    for head, end in zip(heads, ends, strict=True):
        if head[1] == "###":
            text = " ".join(TEXT[head.end() : end].split())
            kind, pass_name, option = SAID_BY.search(text).groups()
            program = "".join(blocks(head.end(), end))
            yield Section(head[2], text, kind, pass_name, option or "", program)


SECTIONS = {section.name: section for section in read_sections()}
CHAPTERS = [
    block
    for chapter in re.finditer(r"^## .+?(?=^#)", TEXT + "\n#", re.MULTILINE | re.DOTALL)
    for block in blocks(chapter.start(), chapter.end())
]
"""The layers that programs share: at the head of a chapter, before its first reason."""


def verdicts(name):
    """Compile the program of a reason; return the verdicts of the pass and option it names."""
    section, names = SECTIONS[name], {}
    for program in (*CHAPTERS, section.program):
        exec(compile(program, str(PAGE), "exec"), names)
    x = names.get("x", torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True))
    options = names.get("options", {"megamoe.chunks": 2})
    options = {key.removeprefix("megamoe."): value for key, value in options.items()}
    gm, *_ = dynamo_graphs(names["program"], x)
    state, compilation = rewrite(gm, MegaMoEConfig(**{"hardware": "cpu", **options}))
    if section.pass_name not in {step.name for step in DYNAMO.passes}:
        inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        trace_graphs(gm, inputs, state)
    reports = [r for _, r in compilation.journal.records if r.pass_name == section.pass_name]
    said = [v for report in reports for v in getattr(report, "skipped", (report,))]
    return [v for v in said if getattr(v, "option", "") == section.option]
