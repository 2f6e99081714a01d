"""Faults that the product once had, put back one at a time: does the fuzzer find them?

`python -m tests.mutants.defects --seed 1`: exit status 1 when one is not found within the number of
programs allowed. Generated programs have two dozen rows at most: what shows only with hundreds is
for tests of its own (`tests/proof/test_row_premises.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moe_compile.report.provenance import describe_machine, recorded_command
from tests.mutants.sandbox import copy_repository


@dataclass(frozen=True, slots=True)
class Change:
    """One text of a module that stands there once, and what takes its place."""

    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Defect:
    """A fault as it was, in a few words, and the changes that bring it back."""

    name: str
    changes: tuple[Change, ...]


LEGALITY: Final = "moe_compile/graph/legality.py"
GRADIENTS: Final = "moe_compile/graph/gradient_order.py"
DEPENDENCE: Final = "moe_compile/graph/dependence.py"
EVERY_OBSTACLE: Final = (
    "self.written_meanwhile(in_order, anchor, anew) or self._random(in_order, anchor)"
)
SURROUNDINGS: Final = "moe_compile/regions/rewrite_effects.py"
EARLY: Final = "read_at = region.result if rewrite.at_result else self._first_read(region, reads)"
PROOF: Final = "moe_compile/proof/row_proof.py"
ROUNDING: Final = "moe_compile/testing/cpu_rounding"
FIRST_RUN: Final = "moe_compile/first_run.py"
SPLIT: Final = """    for gemm in sliceable:
        weight, tensor"""
SPLIT_ONCE: Final = """    for gemm in sliceable:
        if same := [other for other in pieces if other.args[1] is gemm.args[1]]:
            pieces[gemm] = pieces[same[0]]
            continue
        weight, tensor"""

DEFECTS: Final = (
    Defect(
        "a write does not keep alive what it writes",
        (
            Change(
                LEGALITY,
                "todo += _present(self.dependence.needs(node), replaced)",
                "todo += _present(node.all_input_nodes, replaced)",
            ),
        ),
    ),
    Defect(
        "a rank without tokens decides for itself, and no rank asks another",
        (
            Change(
                "moe_compile/backend.py",
                "    written = AsWritten.of(gm, example_inputs) if order else None\n",
                "    if any(\n"
                "        isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == 0\n"
                "        for t in example_inputs\n"
                "    ):\n"
                "        config = _as_written(config)\n"
                "    written = AsWritten.of(gm, example_inputs) if order else None\n",
            ),
            Change(
                FIRST_RUN,
                "turn = agreement.meet(self._programs) if agreement is not None else Turn()",
                "turn = Turn()",
            ),
        ),
    ),
    Defect(
        "readers run later whatever was written, thrown or drawn meanwhile",
        (
            Change(LEGALITY, EVERY_OBSTACLE, "None"),
            Change(SURROUNDINGS, EARLY, "read_at = region.result"),
        ),
    ),
    Defect(
        "what functions of Python write and draw is known by their names alone",
        (
            Change(DEPENDENCE, "seen = observed(node)", "seen = None"),
            Change(
                "moe_compile/graph/effects.py",
                "seen = observed(node)\n    by_name",
                "seen = None\n    by_name",
            ),
            Change(SURROUNDINGS, EARLY, "read_at = region.result"),
        ),
    ),
    Defect(
        "a concatenation of other experts' rows goes without any input",
        (
            Change(
                "passes/replay/prune.py",
                "return any(node not in joins.get(user, ()) or joins[user] <= empty "
                "for user in running)",
                "return False",
            ),
        ),
    ),
    Defect(
        "a dimension other than the rows' may depend on counts",
        (
            Change(
                "moe_compile/proof/row_proof.py",
                "if any(facts.depends_on_counts(other) for other in others):",
                "if False:",
            ),
        ),
    ),
    Defect(
        "indices that are not followed are taken to agree with the group sizes",
        (Change(PROOF, "        if not premises:\n", "        if True:\n"),),
    ),
    Defect(
        "a check of the user on counts is dropped",
        (Change(SURROUNDINGS, "and is_implied(node, rewrite.region, facts)", "and True"),),
    ),
    Defect(
        "operators are taken to round alike at every position",
        (
            Change(
                f"{ROUNDING}/position_rounding.py",
                "and not on_cuda(call.outputs[0]) and _by_position(call, floats)",
                "and False",
            ),
            Change(
                f"{ROUNDING}/position_rounding.py",
                'if on_cuda(out) or out.element_size() <= 2:\n        return ""\n    for',
                'if True:\n        return ""\n    for',
            ),
        ),
    ),
    Defect(
        "terms of a gradient are added in another order",
        (Change(GRADIENTS, "if before == after:", "if before:"),),
    ),
    Defect(
        "regions with one count exchange are replayed one after another",
        (
            Change(
                "passes/rewrite_regions.py",
                "            kind.emit(one, state)\n",
                "            new\n",
            ),
            Change(
                "passes/rewrite_regions.py",
                "            if one.is_rewritten\n        ]\n",
                "            if one.is_rewritten\n"
                "            for new in [kind.emit(one, state)]\n"
                "            if not replace_uses(new.instead)\n        ]\n",
            ),
        ),
    ),
    Defect(
        "of a list, the first tensor alone is taken to be written",
        (
            Change(
                PROOF,
                "self.parts.written(step.written, call",
                "self.parts.written(step.written[:1], call",
            ),
        ),
    ),
    Defect(
        "a weight that two products read is split once",
        (Change("passes/replay/chunk_axis.py", SPLIT, SPLIT_ONCE),),
    ),
    Defect(
        "an empty vector may be all that a concatenation is left",
        (
            Change(
                "moe_compile/proof/view_rules.py",
                "len({(t.dtype, t.dim()) for t in ts}) == 1",
                "len({t.dtype for t in ts}) == 1",
            ),
        ),
    ),
    Defect(
        "sums over several rows at once are taken to round alike for any number of rows",
        (
            Change(
                f"{ROUNDING}/cpu_bits.py",
                "return far and rounding.sums_by_place(rows)",
                "return False",
            ),
            Change(f"{ROUNDING}/position_rounding.py", "id(t) in marked and", "False and"),
        ),
    ),
    Defect(
        "rows of one expert may stand in any order",
        (
            Change(
                "moe_compile/proof/sampled_counts.py",
                "if len(premise.experts) == 1 and not torch.equal(chosen[: len(found)], whole):",
                "if False:",
            ),
            Change(
                "moe_compile/proof/order_rules.py",
                "if call.is_sized_by_counts() and not _are_distinct(key):",
                "if False:",
            ),
        ),
    ),
    Defect(
        "rows in an order not followed are cut anywhere",
        (
            Change(
                "moe_compile/proof/view_rules.py",
                "if is_part and not call.facts.note_experts_of(segment):",
                "if False:",
            ),
        ),
    ),
    Defect(
        "a tensor of another kind has no memory in common with its parts",
        (
            Change(
                "moe_compile/graph/memory.py",
                "elif is_traceable_wrapper_subclass(leaf):",
                "elif False:",
            ),
        ),
    ),
    Defect(
        "a weight that an operator gives back is another one",
        (
            Change(
                "moe_compile/regions/outside_reads.py",
                "for node in sorted(set(map(origin, outside.nodes))):",
                "for node in sorted(outside.nodes):",
            ),
        ),
    ),
    Defect(
        "a hook that nobody reads is erased",
        (
            Change(
                "moe_compile/graph/effects.py",
                "is_opaque(node) or registers_hook(node) or has_effects(target)",
                "is_opaque(node) or has_effects(target)",
            ),
        ),
    ),
    Defect(
        "a gradient's terms may lie in memory in any way",
        (
            Change(
                GRADIENTS, "return all(lies_by_rows(r, source) for r in before[:2])", "return True"
            ),
        ),
    ),
    Defect(
        "what functions of torch set is no mode",
        (
            Change(
                "moe_compile/graph/modes.py",
                "return by_name or chooses_attention(node) or _sets_state(node)",
                "return by_name or chooses_attention(node)",
            ),
        ),
    ),
    Defect(
        "rows that lie by columns are taken to lie by rows",
        (
            Change(
                f"{ROUNDING}/cpu_bits.py",
                "d < row_dim or call.facts.depends_on_counts(rows.stride(d))",
                "d < row_dim",
            ),
        ),
    ),
    Defect(
        "slots of experts with a capacity go to another chunk than theirs",
        (
            Change(
                "passes/replay/capacity_chunks.py",
                "zip(chunks, pieces.cut(source), strict=True)",
                "zip(chunks, pieces.cut(source)[::-1], strict=True)",
            ),
        ),
    ),
    Defect(
        "parts of the batch add up a weight's gradient in turn, not one part after another",
        (
            Change(
                "moe_compile/batch/batch_body.py",
                "yield from (source for source, count in times.items() if count > 1)",
                "yield from ()",
            ),
        ),
    ),
)


def put_back(defect: Defect, folder: Path) -> None:
    """Bring `defect` back in the copy at `folder`; ValueError where the product reads otherwise."""
    for change in defect.changes:
        path = folder / change.module
        source = path.read_text()
        if source.count(change.old) != 1:
            raise ValueError(f"{change.module} does not have once: {change.old}")
        path.write_text(source.replace(change.old, change.new))


def main() -> int:
    """Put back what the command line asks for, one after another."""
    options = _arguments()
    found = [
        _fuzz(defect, options) for defect in DEFECTS if options.only.lower() in defect.name.lower()
    ]
    if options.record:
        record = {
            "command": recorded_command("tests.mutants.defects", sys.argv[1:]),
            "machine": describe_machine(),
            "seed": options.seed,
            "defects": found,
        }
        Path(options.record).write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(one["found"] for one in found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.defects")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=500, help="within which it is to be found")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that are a hang")
    parser.add_argument("--only", default="", help="those whose name has this text")
    parser.add_argument("--record", default="", help="JSON file for the results")
    return parser.parse_args()


def _fuzz(defect: Defect, options: argparse.Namespace) -> dict[str, Any]:
    """Return after how many programs the fuzzer failed on a product with `defect`, and how."""
    with tempfile.TemporaryDirectory(prefix="defect-") as name:
        folder, record = Path(name), Path(name) / "record.json"
        copy_repository(folder)
        put_back(defect, folder)
        subprocess.run(
            [
                sys.executable, "-m", "moe_compile.testing.fuzz", "--first-failure",
                f"--seed={options.seed}", f"--programs={options.programs}",
                f"--timeout={options.timeout}", "--trials=0", f"--record={record}",
            ],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        (run,) = json.loads(record.read_text())["runs"]
    kinds = sorted({failure["kind"] for failure in run["failures"]})
    is_found = run["failed"] > 0
    said = f"found in {run['programs']} programs: {', '.join(kinds)}" if is_found else "NOT FOUND"
    sys.stdout.write(f"{defect.name}: {said}\n")
    sys.stdout.flush()
    return {
        "defect": defect.name,
        "found": is_found,
        "programs": run["programs"],
        "chunked": run["chunked"],
        "kinds": kinds,
    }


if __name__ == "__main__":
    sys.exit(main())
