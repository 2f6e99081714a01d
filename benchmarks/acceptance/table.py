"""The results as a page: one row per case, and what stands in the way of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.acceptance.cases import CASES

ROW: Final = "| {} | {} | {} | {} | {} | {} | {} | {} |"
HEAD: Final = (
    ROW.format("", "version", "ranks", "graphs", "regions", "bounded", "equal", "crash"),
    ROW.format(*["---"] * 8),
)
BOUNDED: Final = "fx, 2 chunks, bounded"
STABLE: Final = "stable sorts"
MEASURES: Final = {"inductor": "inductor", BOUNDED: STABLE}
"""What a run is compared with, where that is not `aot_eager`, or not where a region is chunked."""
INTRODUCTION: Final = """\
# Layers and models of other packages

This page says whether megamoe finds a layer of another package, and what to change if it does not.
`make acceptance` made the table. It installs the packages of
`benchmarks/acceptance/requirements.txt` in a separate environment. Every layer and model is
unchanged, small, with random weights, and runs on CPUs; two ranks exchange by gloo. Each case runs
two steps, the second with more tokens. Each is compiled by `backend="megamoe"` with `codegen =
"fx"`; cases on two ranks are compiled once more with `chunks = 2`. Results are compared with those
of plain `aot_eager` under torch's own settings, on every rank, bit for bit: outputs, gradients of
inputs and of all parameters, buffers and random state. Where the page says "Inductor", megamoe
with its default `codegen` was also compared with `backend="inductor"`.

- "Graphs" is the number of graphs in the first step; 1 is a model captured whole.
- "Crash" says whether megamoe raises an error where `aot_eager` runs.
- "Bounded" is the number of regions that run in chunks with `numerics = "bounded"`, which lets sums
  over rows round differently. Chunks then sort the received rows stably. Each step is compared bit
  for bit with plain `aot_eager`, or with `aot_eager` whose sorts are stable outside of the
  dispatch.

A rank runs `aot_eager` first, in the same process. So if a package keeps state from its first call,
this state is there when megamoe compiles. fairscale's gate keeps such state; in a fresh process it
has 5 graphs.

The versions are torch {torch} and Python {python}. The newest megatron-core, 0.19.2, needs Python
3.12, so the table has an older one. Tutel is not on PyPI, and so not in the table.
"""
OWN: Final = "megamoe"
NOTES: Final = """\
## What the reasons come down to

To confirm a reason, a layer of this repository that runs in chunks was given each form alone, and
it then had the same reason.

- transformers' experts sort received rows by `torch.sort(expert_ids)`. With fewer rows, a sort that
  is not stable may give another order (on a CPU with AVX-512 from some 20 rows on), and a weight's
  gradient is a sum in that order. Write `torch.sort(expert_ids, stable=True)`, or set `numerics =
  "bounded"`. Then all five models run in chunks in bfloat16, with the bits of a stable sort. In
  other types transformers calls a grouped product of its own, whose effect on rows megamoe does not
  know. `AllToAllEP` also breaks the graph between dispatch and combine, at `if tokens.shape[0] ==
  0`.
- DeepSpeed's AutoEP replaces a model's layer by its own. With transformers 5.24.0 its last step
  fails (`_CanRecordRegistry.get() takes 2 positional arguments but 3 were given`), so the layer is
  compiled alone. On CPUs it reads every count on the host, and Dynamo ends the graph at `if length
  > 0`. On GPUs a kernel does the same work. The rows "indices by operators" show this form: one
  graph, one region, in chunks, with the bits of `aot_eager`. On GPUs 0.19.8 also moves the rows by
  a kernel of its own (`permute_rows`). megamoe does not follow what a model's own kernel does to
  rows, so such a layer stays whole on GPUs.
- With `drop_tokens=False` DeepSpeed sends as many slots as the fullest expert of all ranks has
  rows. `capacity = int(counts.max())` is known at run time only, and megamoe follows experts with a
  capacity only if sizes are numbers.
- DeepSpeed computes its capacity from tensors, `int(torch.ceil(tokens / experts *
  torch.tensor(factor)))`. If the number of tokens is a symbol, torch 2.13 reads a wrong number from
  such a tensor, with every backend, under `capture_scalar_outputs` or `fullgraph=True`. megamoe
  recognises this case, and compiles the code for one number of tokens at a time
  ([limits.md](limits.md#compilation)).
- torchao's `Float8Linear` is one function of Python in the graph, with a backward of its own
  (`trampoline_autograd_apply`). megamoe does not look inside. Around experts it is compute as any
  other: the region beside it runs in chunks. Experts that it multiplies for stay whole. In the
  recipe "tensorwise" that is right in any case, since one scale is computed from all rows of a
  product, and rows of a chunk would have another.
- Megatron-Core permutes tokens by `masked_select`, at which Dynamo ends the graph. It sorts
  received rows by `[parts[i] for i in order.tolist()]`, which Dynamo does not trace if host reads
  stay in graphs; so the function with this line runs eagerly.
- Megatron-Core's linear layers warn on rank 0 (`warnings.warn`), and Dynamo ends the graph there on
  that rank alone. With `torch._dynamo.config.ignore_logging_functions.add(warnings.warn)` its layer
  that is padded to capacity is one graph. This layer stays whole, because it has two exchanges to
  the experts, split sizes read from a tensor, linear layers in a Function, and a router whose
  weight is given other memory (`.data =`).
"""
PATHS: Final = re.compile(r"[^\s\"']*/site-packages/")
ADDRESSES: Final = re.compile(r" at 0x[0-9a-f]+")
MARKUP: Final = str.maketrans("|<>", "/()")
LONGEST: Final = 400


def without_places(text: str) -> str:
    """Return `text` without the folders in which this machine has packages."""
    return PATHS.sub("", text)


def write_page(record: Mapping[str, Any], page: Path) -> None:
    """Write the page for the results in `record`."""
    page.write_text(page_of(record))


def page_of(record: Mapping[str, Any]) -> str:
    """Return the page for the results in `record`."""
    cases: Sequence[Mapping[str, Any]] = record["cases"]
    crashes = sum(bool(crashes_of(case)) for case in cases)
    different = sum(is_equal(case) == "no" for case in cases)
    summary = (
        f"{len(cases)} of {len(CASES)} layers and models were run: {crashes} crash where "
        f"`aot_eager` works, {different} compute other values. {_of_exchanges(cases)}"
    )
    return "\n".join(
        [
            INTRODUCTION.format(**record["versions"]),
            summary + "\n",
            *HEAD,
            *(_row(case) for case in cases),
            "\n## What stands in the way\n",
            *(line for case in cases for line in _remarks(case)),
            "",
            NOTES,
        ]
    )


def _of_exchanges(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return how many third-party layers whose all-to-all is captured run in chunks."""
    others = [case for case in cases if case.get("package") != OWN]
    theirs = [_ranks(case, "fx, 2 chunks") for case in others]
    captured = [ranks[0] for ranks in theirs if ranks and _is_exchange_captured(ranks[0])]
    bounded = [_ranks(case, BOUNDED) for case in others]
    return (
        f"Of {len(captured)} of other packages with an all-to-all in a graph "
        f"{sum(map(_is_chunked, captured))} run in chunks, in their first step, and "
        f"{sum(bool(ranks) and _is_chunked(ranks[0]) for ranks in bounded)} where numerics are "
        "bounded."
    )


def _is_chunked(rank: Mapping[str, Any]) -> bool:
    return any(chunks > 1 for _, _, chunks in rank["regions"])


def _num_chunked(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return how many regions of a run are in chunks; "" where it was not run."""
    if not ranks:
        return ""
    return str(sum(chunks > 1 for _, _, chunks in {tuple(r) for r in ranks[0]["regions"]}))


def _is_exchange_captured(rank: Mapping[str, Any]) -> bool:
    return bool(rank["regions"]) or any("the exchange at" in text for text in rank["warnings"])


def _row(case: Mapping[str, Any]) -> str:
    ranks = _ranks(case, "fx")
    return ROW.format(
        case["name"],
        f"{case.get('package', '')} {case.get('version', '')}".strip(),
        case.get("num_ranks", ""),
        ranks[0]["graphs"] if ranks else "",
        _regions(ranks),
        _num_chunked(_ranks(case, BOUNDED)),
        is_equal(case),
        "yes" if crashes_of(case) else "no",
    )


def _ranks(case: Mapping[str, Any], run: str) -> list[Mapping[str, Any]]:
    """Return what the ranks said of a run, [] where it crashed."""
    found = case.get("runs", {}).get(run, [])
    return found if isinstance(found, list) else []


def _regions(ranks: Sequence[Mapping[str, Any]]) -> str:
    if not ranks:
        return ""
    regions = {tuple(region) for region in ranks[0]["regions"]}
    chunked = sum(chunks > 1 for _, _, chunks in regions)
    return f"{len(regions)}, {chunked} in chunks" if regions else "0"


def crashes_of(case: Mapping[str, Any]) -> dict[str, str]:
    """Return the runs that ended where `aot_eager` did not, with the error of each."""
    if "failure" in case:
        return {"all": case["failure"]}
    if "aot_eager" in case["failed_measures"]:
        return {}
    return {title: run["crash"] for title, run in case["runs"].items() if isinstance(run, dict)}


def is_equal(case: Mapping[str, Any]) -> str:
    """Return whether runs with `codegen = "fx"` computed what the measure did: yes, no or ""."""
    found = [errors for _, _, measure, errors in _comparisons(case) if measure != "inductor"]
    return ("no" if any(found) else "yes") if found else ""


def _remarks(case: Mapping[str, Any]) -> list[str]:
    """Return a paragraph's lines on a case; [] where there is nothing to say."""
    lines = [
        *_of_breaks(_ranks(case, "fx")),
        *_of_regions(_ranks(case, "fx")),
        *(f"crash, {title}: {_short(text)}" for title, text in crashes_of(case).items()),
        *(f"`{b}` fails: {_short(t)}" for b, t in case.get("failed_measures", {}).items()),
        *_of_differences(case),
    ]
    return [f"- {case['name']}", *(f"    - {line}" for line in lines)] if lines else []


def _of_breaks(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    if not ranks or not ranks[0]["breaks"]:
        return []
    return [f"first break: {_short(ranks[0]['breaks'][0])}"]


def _of_regions(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    if not ranks:
        return []
    whole = {(where, verdict) for where, verdict, chunks in ranks[0]["regions"] if chunks < 2}
    warnings = [text.partition(" To do:")[0] for text in ranks[0]["warnings"]]
    return [
        *(f"region at {where}: {_short(verdict)}" for where, verdict in sorted(whole)),
        *(_short(text.removeprefix("megamoe: ")) for text in warnings),
    ]


def _of_differences(case: Mapping[str, Any]) -> list[str]:
    lines = []
    for title, rank, measure, errors in _comparisons(case):
        if errors:
            name, worst = max(errors.items(), key=lambda item: item[1])
            lines.append(
                f"{title}, rank {rank}: {len(errors)} tensors differ from {measure}, by up to "
                f"{worst:.1e} of their largest value: {name}"
            )
        elif measure == "inductor" and rank == 0:
            lines.append('Inductor: default code computes what `backend="inductor"` does')
    return lines


def _comparisons(case: Mapping[str, Any]) -> Iterator[tuple[str, int, str, Mapping[str, float]]]:
    """Give run, rank, measure and errors."""
    for title in case.get("runs", {}):
        for rank, found in enumerate(_ranks(case, title)):
            for measure, errors in found["differences"].items():
                own = MEASURES.get(title)
                if own == STABLE and not _is_chunked(found):
                    own = None
                if measure == own if own else measure not in MEASURES.values():
                    yield title, rank, measure, errors


def _short(text: str) -> str:
    """Return `text` on one line, without this machine's paths, or markup outside of code."""
    line = " ".join(ADDRESSES.sub("", without_places(text)).split())
    *parts, last = (line if len(line) <= LONGEST else line[: LONGEST - 3] + "...").split("`")
    kept = (part if i % 2 else part.translate(MARKUP) for i, part in enumerate(parts))
    return "`".join((*kept, last.translate(MARKUP)))
