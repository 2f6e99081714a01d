"""What the compiler makes of many programs, as hashes: `python -m tests.recorder --out FILE`.

Contract
    For every program: hashes of its Dynamo graphs after all passes, of the plan that ranks compare,
    of the journal, and of the forward and backward graphs after all passes, in the order they run.
    Programs are those the fuzzer draws from a seed, and every style of layer of the tests. Each
    runs in one process whose other ranks are its mirror images. A rewrite of the compiler that is
    to change nothing leaves every hash: `--against FILE` names the programs whose hashes differ,
    prints with `--show` the text that is hashed, and exits with 1 where there are some.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_graphs
from moe_compile.read_options import read_options
from moe_compile.testing.mirrored_rank import become_mirrored
from moe_compile.testing.programs.campaign import drawn_programs
from moe_compile.testing.programs.choices import Groups, Reader
from moe_compile.testing.programs.grammar import Experts, Rewrite
from moe_compile.testing.programs.run import load, start_ranks, steps
from moe_compile.testing.programs.text import source_of
from tests.layers import STYLES
from tests.loop_layers import LOOPS

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MODULE = re.compile(r"(moe_compile|passes)[\w.]*[._](?=\w+\()")
"""Where a function of ours stands: files may move."""


@dataclass
class Recording:
    """What is known of one program."""

    graphs: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    journals: list[str] = field(default_factory=list)
    traced: list[str] = field(default_factory=list)
    error: str = ""

    def as_hashes(self):
        """Return a hash for each kind of text."""
        kinds = {kind: getattr(self, kind) for kind in ("graphs", "plans", "journals", "traced")}
        return {kind: _hash(texts) for kind, texts in kinds.items()} | {"error": self.error[:200]}

    def backend(self, options):
        """Return a backend that rewrites as megamoe does, notes it and runs the graph as it is."""

        def record(gm, inputs):
            config, _ = read_options(None, options)
            state, _ = rewrite(gm, config)
            self.graphs.append("\n".join(_texts(gm)))
            self.plans.append(state.plan_digest)
            self.journals.append(json.dumps(state.journal.as_data(), sort_keys=True, default=str))
            with contextlib.suppress(Exception):  # a graph that AOTAutograd refuses has no others
                traced = trace_graphs(gm, inputs, state)
                self.traced += ["\n".join(_texts(one)) for one in traced]
            return gm.forward

        return record


def _texts(gm):
    yield MODULE.sub("", ADDRESS.sub("", str(gm.graph)))
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            yield from _texts(child)


def _hash(texts):
    return hashlib.sha256("\n\n".join(texts).encode()).hexdigest()[:16]


def programs(seed, count) -> Iterator[tuple[str, str]]:
    """Yield names and texts of programs that one process can run as all their ranks."""
    names = set()
    for program in drawn_programs(seed):
        alone = replace(program, tokens=tuple((step[0],) * len(step) for step in program.tokens))
        layers = [one for one in alone.layers if isinstance(one, Experts)]
        if alone.groups is not Groups.WORLD or any(Reader.METRICS in a.readers for a in layers):
            continue
        text = source_of(alone)
        if alone.rewrite is Rewrite.GATHERED:
            text = text.replace("MIRRORED = False", "MIRRORED = True")
        name = f"program {hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if name not in names:
            names.add(name)
            yield name, text
        if len(names) >= count:
            return


def _record_program(text):
    module, found = load(text), Recording()
    torch._dynamo.reset()
    start_ranks(module)
    options = {"megamoe.codegen": "fx", **module.OPTIONS}
    _, found.error = steps(module, 0, found.backend(options))
    return found


def _record_style(style, chunks):
    found = Recording()
    torch._dynamo.reset()
    become_mirrored(2)
    layer = style(32, 32, 6, 2, dist.group.WORLD, torch.bfloat16, seed=1)
    x = torch.randn(12, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    try:
        compiled = torch.compile(layer, backend=found.backend({"megamoe.chunks": chunks}))
        out = compiled(x.requires_grad_())
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    except Exception as error:  # noqa: BLE001  (whatever a layer raises on one rank)
        found.error = f"{type(error).__name__}: {error}"
    return found


STYLED = {f"{s.__module__}.{s.__qualname__}": s for s in (*STYLES, *LOOPS)}
CHUNKS = (2, "auto")


def _record(task):
    name, text = task
    torch.set_num_threads(1)
    if dist.is_initialized():  # names of groups are numbers that count up
        dist.destroy_process_group()
    try:
        if name.startswith("program "):
            found = _record_program(text)
        else:
            style, chunks = name.rsplit(" ", 1)
            found = _record_style(STYLED[style], int(chunks) if chunks.isdigit() else chunks)
    except Exception:  # noqa: BLE001  (a program that cannot be recorded is recorded as that)
        return name, Recording(error=traceback.format_exc()[-200:])
    return name, found


def recorded(task):
    """Return the name of a program and its hashes."""
    name, found = _record(task)
    return name, found.as_hashes()


def record(seed, count, workers):
    """Return the hashes of every program by its name, and show how far they are."""
    tasks = [(f"{name} {chunks}", "") for name in STYLED for chunks in CHUNKS]
    tasks += programs(seed, count)
    done = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, maxtasksperchild=50) as pool:
        for name, hashes in pool.imap(recorded, tasks):
            done[name] = hashes
            sys.stderr.write(f"\r{len(done)} of {len(tasks)}")
    sys.stderr.write("\n")
    return done


def compare(before, after):
    """Return a line for every program whose hashes differ."""
    lines = [f"{name}: recorded in one of both alone" for name in sorted({*before} ^ {*after})]
    for name in sorted({*before} & {*after}):
        kinds = [k for k, value in before[name].items() if after[name].get(k) != value]
        lines += [f"{name}: {', '.join(kinds)}"] if kinds else []
    return lines


def main():
    """Record, and compare where that is asked."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorder")
    parser.add_argument("--seed", type=int, default=47)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default="", help="JSON file to write")
    parser.add_argument("--against", default="", help="JSON file of an earlier run")
    parser.add_argument("--show", default="", help="print the texts of the program of this name")
    options = parser.parse_args()
    if options.show:
        tasks = dict(programs(options.seed, options.programs))
        _, found = _record((options.show, tasks.get(options.show, "")))
        for kind in ("graphs", "plans", "journals", "traced", "error"):
            sys.stdout.write(f"# {kind}\n{getattr(found, kind)!s}\n".replace("\\n", "\n"))
        return 0
    made = record(options.seed, options.programs, options.workers)
    failed = sum(bool(hashes["error"]) for hashes in made.values())
    sys.stdout.write(f"{len(made)} programs, {failed} of them raise\n")
    if options.out:
        Path(options.out).write_text(json.dumps(made, indent=0, sort_keys=True) + "\n")
    if not options.against:
        return 0
    lines = compare(json.loads(Path(options.against).read_text()), made)
    sys.stdout.write("\n".join([*lines, f"{len(lines)} programs differ"]) + "\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
