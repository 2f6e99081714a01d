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

Look here whether a layer of another package is found, and what to change if it is not.
`make acceptance` made the table: it installs the packages of
`benchmarks/acceptance/requirements.txt` in an environment of its own. Every layer and model is as
its package has it, small, with random weights, on CPUs; two ranks exchange by gloo. Each runs two
steps, the second with more tokens. Each is compiled by `backend="megamoe"` with `codegen = "fx"`,
on two ranks once more with `chunks = 2`. It is compared with plain `aot_eager` under torch's own
settings, on every rank, bit for bit: outputs, gradients of inputs and of all parameters, buffers
and random state. Where it says "Inductor", default code is compared with `backend="inductor"` as
well.

"Graphs" are those of the first step; 1 is a model captured whole. "Crash" is an error where
`aot_eager` runs. "Bounded": regions in chunks where `numerics = "bounded"` lets sums over rows
round otherwise. Chunks sort what they received stably then: each step is compared, bit for bit as
well, with plain `aot_eager`, or with it where sorts outside of the dispatch are stable.
A rank runs `aot_eager` first, in the same process: what a package keeps from its first call, as
fairscale's gate does (5 graphs in a fresh process), is there when megamoe compiles.

torch {torch}, Python {python}: the newest megatron-core, 0.19.2, needs Python 3.12. Tutel is not on
PyPI, and so not in the table.
"""
OWN: Final = "megamoe"
NOTES: Final = """\
## What the reasons come down to

A layer of this repository that is chunked was given each form alone, and then the same reason.

- transformers' experts sort what they received by `torch.sort(expert_ids)`. A sort that is not
  stable has another order where there are fewer rows (on a CPU with AVX-512 from some 20 rows on),
  and a weight's gradient is a sum in that order. Write `torch.sort(expert_ids, stable=True)`, or
  set `numerics = "bounded"`: then all five models run in chunks in bfloat16, with the bits of a
  stable sort. In other types transformers calls a grouped product of its own there, of which the
  effect on rows is not known. `AllToAllEP` also breaks the graph between dispatch and combine, at
  `if tokens.shape[0] == 0`.
- DeepSpeed's AutoEP puts its own layer in the place of a model's. With transformers 5.24.0 its last
  step fails (`_CanRecordRegistry.get() takes 2 positional arguments but 3 were given`), so the
  layer is compiled alone. On CPUs it reads every count on the host, and Dynamo ends the graph at
  `if length > 0`. On GPUs a kernel does the same, here "indices by operators": one graph, one
  region, in chunks, with the bits of `aot_eager`. On GPUs 0.19.8 moves the rows too by a kernel of
  its own (`permute_rows`). What a model's own kernel does to rows is not followed, so such a layer
  stays whole there.
- DeepSpeed with `drop_tokens=False` sends as many slots as the fullest expert of all ranks has
  rows. `capacity = int(counts.max())` is known at run time only; experts with a capacity are
  followed where sizes are numbers.
- DeepSpeed computes its capacity of tensors, `int(torch.ceil(tokens / experts *
  torch.tensor(factor)))`. Where the number of tokens is a symbol, torch 2.13 reads a wrong number
  of it, with every backend, under `capture_scalar_outputs` or `fullgraph=True`. megamoe notices,
  and compiles the code for one number of tokens at a time
  ([limits.md](limits.md#compilation)).
- Megatron-Core permutes tokens by `masked_select`, where Dynamo ends the graph, and sorts what it
  received by `[parts[i] for i in order.tolist()]`, which Dynamo does not trace with host reads in
  graphs: that function runs eagerly.
- Megatron-Core's linear layers warn on rank 0 (`warnings.warn`), where Dynamo ends the graph on
  that rank alone. With `torch._dynamo.config.ignore_logging_functions.add(warnings.warn)` its layer
  padded to capacity is one graph. It stays whole: it has two exchanges to the experts, split sizes
  read from a tensor, linear layers in a Function, and a router whose weight is given other memory
  (`.data =`).
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
    """Return `text` on one line, without this machine's paths and what would be markup."""
    line = " ".join(ADDRESSES.sub("", without_places(text)).split()).translate(MARKUP)
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."
