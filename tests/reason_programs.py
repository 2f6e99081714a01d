"""The sections of `docs/reasons.md`, and the run of their programs."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_compile.backend import rewrite
from moe_compile.codegen import EVERY_LEVEL, trace_graphs
from moe_compile.config import MegaMoEConfig
from moe_compile.proof.kernel_bits import KernelBits, bits_by
from passes.pipeline import DYNAMO
from tests.capture import dynamo_graphs

PAGE = Path(__file__).parents[1] / "docs" / "reasons.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DETAIL = re.compile(r"^\| (?!detail)([^|]+) \|", re.MULTILINE)
SAID_BY = re.compile(r"`(\w+)`, by `(\w+)`(?: on `(\w+)`)?\.")
TEXT = PAGE.read_text()


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page has on one reason."""

    name: str
    text: str
    kind: str
    pass_name: str
    option: str
    details: tuple[str, ...]
    """What its table has of what the reason is given for."""
    layers: tuple[str, str]
    """What all programs begin with, then those of its chapter."""
    program: str

    @property
    def is_traced(self):
        """Whether its pass runs on graphs of AOTAutograd."""
        return self.pass_name not in {step.name for step in DYNAMO.passes}


def programs(first, last):
    """Return the programs between two places of the page, behind as many lines as on it."""
    found = list(BLOCK.finditer(TEXT, first, last))
    return "".join("\n" * TEXT.count("\n", 0, f.start(1)) + f[1] for f in found)


def read_sections():
    """Return every section; the first chapter holds what all programs begin with."""
    heads = list(re.finditer(r"^(##|###) (.+)$", TEXT, re.MULTILINE))
    ends = [head.start() for head in heads[1:]] + [len(TEXT)]
    everywhere, layers = programs(heads[0].end(), ends[0]), ""
    for head, end in zip(heads, ends, strict=True):
        program = programs(head.end(), end)
        if head[1] == "##":
            layers = program
            continue
        text = " ".join(TEXT[head.end() : end].split())
        kind, pass_name, option = SAID_BY.search(text).groups()
        yield Section(
            name=head[2],
            text=text,
            kind=kind,
            pass_name=pass_name,
            option=option or "",
            details=tuple(DETAIL.findall(TEXT, head.end(), end)),
            layers=(everywhere, layers),
            program=program,
        )


SECTIONS = {section.name: section for section in read_sections()}


def verdicts(name):
    """Compile the program of a reason; return the verdicts of the pass and option it names.

    Of several graphs those on the last that has any: the backward graph if it has.
    """
    section, names = SECTIONS[name], {}
    for program in (*section.layers, section.program):
        exec(compile(program, str(PAGE), "exec"), names)
    x = names.get("x", torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True))
    options = names.get("options", {"megamoe.chunks": 2})
    options = {key.removeprefix("megamoe."): value for key, value in options.items()}
    gm, *_ = dynamo_graphs(names["program"], x)
    with bits_by(KernelBits()):  # as users have it
        state, compilation = rewrite(gm, MegaMoEConfig(**{"hardware": "cpu", **options}))
    if section.is_traced:
        inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        trace_graphs(gm, inputs, state, EVERY_LEVEL)
    records = [r for _, r in compilation.journal.records if r.pass_name == section.pass_name]
    said = [getattr(record, "skipped", (record,)) for record in records]
    *_, last = filter(None, said)
    return [v for v in last if getattr(v, "option", "") == section.option]
