"""Layouts shown to train as one rank does, those refused, and the tables for the docs.

Contract
    `docs/layouts.md` is what `python -m tests.integration.layout_table` prints. Tests train
    every layout of `TESTED`, `ULYSSES` and `WITHOUT_EP`, and compare what it trains with one rank,
    and its losses with torchtitan's, or where those are wrong with its own, not compiled.
"""

from __future__ import annotations

from typing import Final

from torchtitan_integration.layout import KEYS, RULES, Layout

TESTED: Final = (
    Layout(dp_shard=2, ep=2, checkpointing="none"),
    Layout(dp_shard=4, ep=2, checkpointing="none"),
    Layout(dp_shard=4, ep=4, checkpointing="none"),
    Layout(dp_shard=4, ep=2, checkpointing="full"),
    Layout(dp_shard=4, ep=2, checkpointing="selective", selective="op"),
    Layout(dp_shard=4, ep=2, checkpointing="selective", selective="2"),
    Layout(dp_shard=2, tp=2, ep=2, checkpointing="none"),
    Layout(dp_shard=2, tp=2, ep=4, checkpointing="none"),
    Layout(dp_shard=2, tp=2, ep=2, etp=2, checkpointing="none"),
    Layout(dp_shard=2, tp=2, ep=4, checkpointing="full"),
    Layout(dp_shard=2, tp=2, ep=2, checkpointing="selective", selective="op"),
    Layout(dp_replicate=2, dp_shard=2, ep=2, checkpointing="none"),
    Layout(dp_replicate=2, dp_shard=2, tp=2, ep=4, checkpointing="none"),
    Layout(dp_shard=2, pp=2, ep=2, checkpointing="none"),
    Layout(dp_shard=2, pp=2, ep=2, pp_schedule="Interleaved1F1B", checkpointing="full"),
    Layout(dp_shard=2, tp=2, pp=2, ep=4, checkpointing="none"),
    Layout(dp_shard=2, tp=2, pp=2, ep=2, etp=2, checkpointing="none"),
    Layout(model="gpt_oss", dp_shard=2, ep=2, checkpointing="none"),
    Layout(model="gpt_oss", dp_shard=4, ep=2, checkpointing="full"),
    Layout(model="gpt_oss", dp_shard=4, ep=4, checkpointing="selective", selective="op"),
    Layout(model="gpt_oss", dp_shard=2, tp=2, ep=4, checkpointing="none"),
    Layout(model="gpt_oss", dp_shard=2, tp=2, ep=2, etp=2, checkpointing="none"),
    Layout(model="qwen3", dp_shard=4, ep=2, checkpointing="none"),
    Layout(model="qwen3", dp_shard=2, tp=2, ep=4, checkpointing="none"),
    Layout(model="qwen3", dp_shard=2, tp=2, pp=2, ep=4, checkpointing="none"),
    Layout(model="llama4", dp_shard=4, ep=2, checkpointing="none"),
    Layout(model="llama4", dp_shard=2, tp=2, ep=4, checkpointing="none"),
)
"""Layouts whose losses, over five steps, are torchtitan's to the last printed digit, or those of
the same layout that is not compiled."""

WITHOUT_EP: Final = (
    Layout(dp_replicate=2, dp_shard=1, checkpointing="none"),
    Layout(dp_shard=2, tp=2, checkpointing="none"),
    Layout(model="gpt_oss", dp_shard=2, tp=2, checkpointing="none"),
    Layout(model="llama4", dp_shard=2, tp=2, checkpointing="none"),
    Layout(model="llama4", dp_shard=2, tp=2, ep=2, etp=2, checkpointing="none"),
)
"""Layouts compared with one rank alone: those without an exchange, and scores before experts whose
columns are divided."""

ULYSSES: Final = (
    Layout(dp_shard=1, cp=2, ep=2, checkpointing="none"),
    Layout(dp_shard=1, cp=2, ep=2, checkpointing="full"),
    Layout(model="qwen3", dp_shard=1, cp=2, ep=1, checkpointing="none"),
    Layout(model="qwen3", dp_shard=1, cp=4, ep=4, checkpointing="none"),
    Layout(model="qwen3", dp_shard=2, cp=2, ep=2, checkpointing="none"),
    Layout(model="qwen3", dp_shard=2, cp=2, ep=4, checkpointing="none"),
)
"""Layouts with Ulysses attention whose losses are one-dimensional FSDP's to the last digit."""

COLUMNS: Final = ("model", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp", "pp", "pp_schedule")
"""Fields the table shows, and activation checkpointing at the end."""

HEAD: Final = """\
# Layouts

This page says which layouts of a job over ranks are tested, and which layouts are refused and why.
`python -m tests.integration.layout_table` prints this page. The code that refuses a layout and the
tests that train a layout read the same lists.

## Trained and compared

The tests train a tiny model in each of these layouts, over gloo, with `codegen = "fx"` and two
chunks. Every MoE layer runs in chunks. The same code lays out other degrees on the same axes.

- digits of: the other run, with which losses and gradient norms are compared. Over five steps from
  the same seed both runs agree to the last printed digit. The other run is torchtitan's. If
  torchtitan 0.2.2 gets gradients wrong ([torchtitan.md](torchtitan.md#gradients-of-one-rank)), the
  other run is the same layout without compilation ("itself").
- against one rank: the comparison with the same model, weights, sequences and loss on one rank
  without parallelism, not compiled, all in float32. `make one-rank` checks two conditions for every
  row. In the first step, no gradient is off by more than 1e-4 of its norm. After three steps of
  Adam, nothing is off by more than 1e-3: no change of a parameter, no moment and no expert bias.
  Experts are given the same numbers of tokens in every step.

"""
ALONE: Final = """
## Compared with one rank alone

Most of these layouts have no exchange to hide. In the last layout of this table, experts are
divided by columns, and scores multiply the rows before the experts.

"""
DIVIDED: Final = """
## Ulysses attention, trained and compared

torchtitan's own CP needs CUDA, so these layouts are compared with torchtitan's FSDP on two ranks,
without CP. Both runs start from one checkpoint, read one text, and have a learning rate of 5e-4.
Over five steps losses and gradient norms agree to the last printed digit; those of FSDP on four
ranks are the same. deepseek_v3 and llama4 with cp 2 and ep 2 differ in one last digit.

"""
REFUSED: Final = """
## Refused before training starts

"""


WITHIN: Final = "within 1e-4"


def has_mended_gradients(layout: Layout) -> bool:
    """Whether torchtitan 0.2.2 gets gradients of it wrong that this recipe gets right."""
    is_ddp_alone = layout.dp_replicate > 1 and layout.dense_shards == 1
    return layout.tp > 1 or layout.pp > 1 or is_ddp_alone


def table() -> str:
    """Return `docs/layouts.md`."""
    names = [*(name.replace("_", " ") for name in COLUMNS), "activation checkpointing"]
    tested, alone, divided = (
        [[*(_cell(x, name) for name in COLUMNS), _checkpointing(x)] for x in layouts]
        for layouts in (TESTED, WITHOUT_EP, ULYSSES)
    )
    digits = ["itself" if has_mended_gradients(x) else "torchtitan" for x in TESTED]
    compared = [[*row, of, WITHIN] for row, of in zip(tested, digits, strict=True)]
    refused = [[rule.what, f"`{KEYS[rule.field]}`", rule.why] for rule in RULES]
    return (
        HEAD
        + _markdown([*names, "digits of", "against one rank"], compared)
        + ALONE
        + _markdown([*names, "against one rank"], [[*row, WITHIN] for row in alone])
        + DIVIDED
        + _markdown([*names, "against one rank"], [[*row, WITHIN] for row in divided])
        + REFUSED
        + _markdown(["layout", "key to change", "why"], refused)
    )


def _cell(layout: Layout, name: str) -> str:
    if name == "pp_schedule" and layout.pp == 1:
        return ""
    return str(getattr(layout, name))


def _checkpointing(layout: Layout) -> str:
    kind = f", {layout.selective}" if layout.checkpointing == "selective" else ""
    return layout.checkpointing + kind


def _markdown(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(table(), end="")
